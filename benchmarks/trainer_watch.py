"""What the watch costs in Megatron-LM's own script: half of the steps with it and half without, in the same process.

Steps of two processes differ by more than the watch's cost; steps of one process that lie side by side do not.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import script_run, table

STEPS, BEFORE = 140, 40
"""Steps of a run, and steps of it that are not counted: graphs are warm by then, and the watch has verified its early
micro-batches, which come whatever the rate."""
WITHOUT, QUIET, OFTEN = "without the watch", "with it, no micro-batch verified", "with it, one or more verified"
KINDS: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    WITHOUT: lambda step: not step["watched"],
    "with it": lambda step: step["watched"],
    QUIET: lambda step: step["watched"] and not step["verified"],
    OFTEN: lambda step: step["watched"] and step["verified"] > 0,
}
"""Kinds of steps; a step has its `ms`, whether it was `watched`, and how many micro-batches it `verified`."""
Kinds = Mapping[str, Sequence[dict[str, Any]]]
"""The steps of each kind."""


def watch_lines(
    script: Path, flags: Sequence[str], plan: Path, directory: Path, found_first: Sequence[Path], *, every: int
) -> list[str]:
    """A table of the kinds of steps, and what they say of a rate of one verified micro-batch in `every`.

    The script is pretrain_gpt.py, and the plan has a rate of its own; `directory` gets the log and a line a step.
    """
    result, launcher = directory / "watch-steps.jsonl", directory / "watch.py"
    result.unlink(missing_ok=True)  # of an earlier call
    launcher.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}, {str(script.parent)!r}]\n"
        f"import trainer_watch\ntrainer_watch.timed({str(script)!r}, {str(result)!r})\n"
    )
    ran = script_run(launcher, flags, directory, "watch", plan=plan, limit=1200, found_first=found_first)
    if ran.code:
        return [*table([["exit code", "error"], [str(ran.code), ran.error]]), "", "The run failed."]
    steps = [json.loads(line) for line in result.read_text().splitlines()][BEFORE:]
    kinds = {name: [step for step in steps if is_of(step)] for name, is_of in KINDS.items()}
    microbatches = int(flags[[*flags].index("--global-batch-size") + 1])
    return [*table(lines_of(kinds)), "", describe_rate(kinds, every=every, microbatches=microbatches)]


def lines_of(kinds: Kinds) -> list[list[str]]:
    """The lines of the table, the first of which is its head."""
    lines = [["steps", "number", "mean, ms", "standard error, ms", "longer than without the watch"]]
    for name, steps in kinds.items():
        cells = ["-", "-", "-"]
        if steps:
            longer = f"{_mean(steps) / _mean(kinds[WITHOUT]) - 1:.2%}" if kinds[WITHOUT] else "-"
            cells = [f"{_mean(steps):.2f}", f"{_error(steps):.2f}", longer]
        lines.append([name, str(len(steps)), *cells])
    return lines


def describe_rate(kinds: Kinds, *, every: int, microbatches: int) -> str:
    """How much longer steps are with one verified micro-batch in `every`, of steps that have so many micro-batches."""
    without, quiet, often = (kinds[name] for name in (WITHOUT, QUIET, OFTEN))
    if not (without and quiet and often):
        return "Too few steps to tell."
    each = (_mean(often) - _mean(quiet)) * len(often) / sum(step["verified"] for step in often)
    base = _mean(without)
    verifying, watching = each * microbatches / every / base, _mean(quiet) / base - 1
    error = math.hypot(_error(without), _error(quiet)) / base
    return (
        f"A verified micro-batch takes {each:.0f} ms more. One in {every}: {verifying:.3%} of a step; with what the "
        f"watch takes in steps without any, {verifying + watching:.3%}, standard error {error:.3%}."
    )


def _mean(steps: Sequence[dict[str, Any]]) -> float:
    return statistics.mean(step["ms"] for step in steps)


def _error(steps: Sequence[dict[str, Any]]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(step["ms"] for step in steps) / len(steps) ** 0.5 if len(steps) > 1 else float("nan")


def timed(script: str, result: str) -> None:
    """Run `script` in this process; its modules are watched in half of the steps, and every step is timed."""
    import runpy

    import torch
    from megatron.training import training

    from thdprof.runtime.graphs.graphed_module import GraphedModule

    own_step, modules, count = training.train_step, [], [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        if not modules:
            modules.extend((one, one._watch) for one in gc.get_objects() if issubclass(type(one), GraphedModule))
            if not any(watch for _, watch in modules):
                raise RuntimeError("no module is watched: the plan has no graphs.verify, or nothing is captured")
        watched = count[0].bit_count() % 2 == 0  # half of the steps, of each kind of place
        for module, watch in modules:
            module._watch = watch if watched else None
        before = verified()
        torch.cuda.synchronize()
        began = time.perf_counter()
        result_of_step = own_step(*args, **kwargs)
        torch.cuda.synchronize()
        ms = (time.perf_counter() - began) * 1000
        count[0] += 1
        with Path(result).open("a") as file:
            file.write(json.dumps({"ms": ms, "watched": watched, "verified": verified() - before}) + "\n")
        return result_of_step

    def verified() -> int:
        return sum(sum(module.stats().verified.values()) for module, _ in modules)

    training.train_step = step
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
