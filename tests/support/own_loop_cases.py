"""Cases of a loop of one's own, one after the other in one process: asked for by name, and told in a line each."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from support.own_loop import process_groups
from support.own_loop_steps import NOT_AS_PREDICTED, timed


def asked(words: Sequence[str], cases: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name and case of each word: NAME, or NAME@STEPS for another number of steps than the case's own.

    Args:
        words: what the command line asks for.
        cases: all cases by their names; each has a field `steps`.
    """
    found = []
    for word in words:
        name, _, steps = word.partition("@")
        if name not in cases:
            sys.exit(f"no case is called {name!r}: {', '.join(cases)}")
        found.append((name, replace(cases[name], steps=int(steps)) if steps else cases[name]))
    return found


def run_cases(
    words: Sequence[str],
    cases: Mapping[str, Any],
    result_of: Callable[[Any], str],
    *,
    around: Callable[[Any], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Run cases, tell each in a line, and exit with 1 if one is not as it should be.

    Those of equal sizes in a row share their process groups, which take long to make. One that fails on several ranks
    ends the process, because the others may wait in a collective.

    Args:
        words: as `asked` takes them.
        cases: all cases by their names; each has fields `steps` and `sizes`, those of Megatron's process groups.
        result_of: runs a case, and gives a line that begins with `equal: ` if all is well.
        around: makes what a case needs besides its process groups.
    """
    if not words:
        sys.exit(f"name cases: {', '.join(cases)}")
    failed = []
    for sizes, of_sizes in groupby(asked(words, cases), key=lambda one: sorted(one[1].sizes.items())):
        with process_groups(**dict(sizes)):
            for name, case in of_sizes:
                with around(case):
                    told = _told(name, case, result_of)
                if not told.startswith("equal: ") or NOT_AS_PREDICTED in told:
                    failed.append(name)
                gc.collect()
                torch.cuda.empty_cache()
    print("ok" if not failed else f"not equal: {failed}", flush=True)
    sys.exit(bool(failed))


def _told(name: str, case: Any, result_of: Callable[[Any], str]) -> str:
    """What is told of a case, which is printed."""
    seconds: list[float] = []
    try:
        with timed(seconds):
            told = result_of(case)
        told += f"; {case.steps} steps in {seconds[0] / 1000:.1f} s"
    except Exception as error:
        traceback.print_exc()
        told = f"failed: {type(error).__name__}: {error}"
    print(f"rank {os.environ.get('RANK', '0')}: {name}: {told}", flush=True)
    if told.startswith("failed") and "RANK" in os.environ:
        os._exit(1)
    return told


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Whether Transformer Engine and torch may take kernels alone that add in the same order each time."""
    variable = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    before, algorithms = os.environ.get(variable), torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ[variable] = "0" if wanted else "1"
    torch.use_deterministic_algorithms(wanted and algorithms, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warned)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
