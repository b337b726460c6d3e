"""Cases of a loop of one's own, one after the other in one process: asked for by name, and told in a line each."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from support.own_loop import VOCABULARY, process_groups
from support.own_loop_steps import (
    DISTINCT_STEPS,
    NOT_AS_PREDICTED,
    bounds_of,
    descend,
    fitted,
    mean_loss,
    nothing_told,
    run_schedule,
    shares_of,
    timed,
)
from support.plans import plan_of_shares
from thdprof.plan import Plan
from thdprof.runtime.megatron import install, packed_seq_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and what of it is captured."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig."""
    graphs: dict[str, Any] = field(default_factory=dict)
    """Changes of the plan's graphs."""
    experts: str = "none"
    """The plan's `experts`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Sizes of Megatron's process groups."""
    steps: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The micro-batches of cases, with other numbers of documents in turn; buckets hold 8 and 16 documents."""

    tokens: int
    """Tokens of a micro-batch, on all context-parallel ranks."""
    each: int
    """Micro-batches of a step."""
    documents: tuple[int, ...]
    by_rank: bool = False
    """Whether the turn begins with another number on each data-parallel rank."""
    distinct_steps: int = DISTINCT_STEPS
    """Steps after which micro-batches repeat themselves."""

    def numbers_of(self, case: Case, rank: int = 0) -> list[int]:
        """Numbers of documents of all micro-batches of a data-parallel rank."""
        return [self._documents(number, rank) for number in range(case.steps * self.each)]

    def _documents(self, number: int, rank: int) -> int:
        return self.documents[(number + (rank if self.by_rank else 0)) % len(self.documents)]

    def plan_of(self, case: Case) -> Plan:
        """A plan of buckets that hold 8 and 16 documents; micro-batches of 20 fall back."""
        context = case.sizes.get("context_parallel_size", 1)
        stages = case.sizes.get("pipeline_model_parallel_size", 1)
        ranks = parallel_state.get_data_parallel_world_size()
        every = [number for rank in range(ranks) for number in self.numbers_of(case, rank)]
        plan = plan_of_shares(
            shares_of(every),
            count=len(every),
            steps=case.steps,
            context_parallel_size=context,
            pipeline_parallel_size=stages,
            data_parallel_size=ranks,
            seq_length=self.tokens,
            global_batch_size=self.each * ranks,
            experts=case.experts,
        )
        return fitted(plan, case.graphs, tokens=self.tokens, stages=stages, cp_size=context)

    def drawn(self, step: int) -> Iterator[tuple[np.random.Generator, list[int]]]:
        """For each micro-batch of a step what draws the rest of it, and its boundaries.

        Ranks with the same data draw the same.
        """
        rank = parallel_state.get_data_parallel_rank()
        for number in range(self.each):
            random = np.random.default_rng([step % self.distinct_steps, number, rank])
            yield random, bounds_of(random, self._documents(step * self.each + number, rank), self.tokens)

    def text(self, step: int) -> Iterator[dict[str, Any]]:
        """The micro-batches of a step, as `forward_step` takes them."""
        tokens = self.tokens // parallel_state.get_context_parallel_world_size()
        for random, bounds in self.drawn(step):
            drawn = torch.from_numpy(random.integers(1, VOCABULARY, (2, tokens))).cuda()
            positions = torch.arange(tokens, device="cuda")[None]
            yield {"bounds": bounds, "tokens": drawn[:1], "labels": drawn[1:], "positions": positions}


def forward_step(data: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False) -> Any:
    """What Megatron's schedules call for a micro-batch: `more` are further arguments of the model."""
    batch = next(data)
    params = packed_seq_params(batch["bounds"])
    params.tokens_per_sample = batch.get("tokens_per_sample", params.tokens_per_sample)
    run = model.build_schedule_plan if return_schedule_plan else model
    more = {"labels": batch["labels"], "packed_seq_params": params, **batch.get("more", {})}
    return run(batch["tokens"], batch["positions"], None, **more), mean_loss


def descended(
    case: Case,
    model: Any,
    config: Any,
    of_case: MicroBatches,
    *,
    replay: bool | None,
    batches: Callable[[int], Iterator[dict[str, Any]]] | None = None,
    after_step: Callable[[dict[str, Any]], None] = lambda told: None,
    **options: Any,
) -> dict[str, Any]:
    """What a run tells whose weights follow the gradients, with its counters as `stats`.

    Args:
        case: the case.
        model: its model, wrapped.
        config: the model's configuration.
        of_case: the micro-batches.
        replay: whether graphs are replayed; None: the run is without thdprof.
        batches: gives the micro-batches of a step, where they are more than text.
        after_step: gets what is told, after each step.
        options: further options of `install`.
    """
    told = nothing_told()
    following = (
        nullcontext() if replay is None else install(model, of_case.plan_of(case), config, replay=replay, **options)
    )
    with following as installation:
        for step in range(case.steps):
            data = (batches or of_case.text)(step)
            passes = partial(run_schedule, model, forward_step, data, count=of_case.each, tokens=of_case.tokens)
            descend(model, passes, told)
            after_step(told)
        if installation is not None:
            told["stats"] = installation.stats()
    return told


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
