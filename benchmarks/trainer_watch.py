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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import script_run

STEPS, BEFORE = 140, 40
"""Steps of a run, and steps of it that are not counted: graphs are warm by then, and the watch has verified its early
micro-batches, which come whatever the rate."""


def watch_lines(
    script: Path, flags: Sequence[str], plan: Path, directory: Path, environment: Mapping[str, str], *, every: int
) -> tuple[list[list[str]], str]:
    """Lines of the table, the first of which is its head, and what they say of a rate of one in `every`.

    The script is pretrain_gpt.py, and the plan has a rate of its own; `directory` gets the log and a line a step.
    """
    result, launcher = directory / "watch.jsonl", directory / "watch.py"
    result.unlink(missing_ok=True)  # of an earlier call
    launcher.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}, {str(script.parent)!r}]\n"
        f"import trainer_watch\ntrainer_watch.timed({str(script)!r}, {str(result)!r})\n"
    )
    ran = script_run(launcher, flags, plan=plan, limit=1200, environment=environment, log=directory / "watch.log")
    if ran.code:
        return [["exit code", "error"], [str(ran.code), ran.error]], "The run failed."
    steps = [json.loads(line) for line in result.read_text().splitlines()]
    microbatches = int(flags[[*flags].index("--global-batch-size") + 1])
    return lines_of(steps), share_at(steps, every=every, microbatches=microbatches)


def lines_of(steps: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table of what was timed: of each step its `ms`, whether it was `watched`, and what it `verified`."""
    counted = steps[BEFORE:]
    without = [one["ms"] for one in counted if not one["watched"]]
    of_watch = [one for one in counted if one["watched"]]
    kinds = {
        "without the watch": without,
        "with it": [one["ms"] for one in of_watch],
        "with it, no micro-batch verified": [one["ms"] for one in of_watch if not one["verified"]],
        "with it, one or more verified": [one["ms"] for one in of_watch if one["verified"]],
    }
    lines = [["steps", "number", "mean, ms", "standard error, ms", "longer than without the watch"]]
    for name, ms in kinds.items():
        longer = f"{statistics.mean(ms) / statistics.mean(without) - 1:.2%}" if ms and without else "-"
        cells = [f"{statistics.mean(ms):.2f}", f"{_error(ms):.2f}", longer] if ms else ["-", "-", "-"]
        lines.append([name, str(len(ms)), *cells])
    return lines


def share_at(steps: Sequence[dict[str, Any]], *, every: int, microbatches: int) -> str:
    """How much longer steps are with one verified micro-batch in `every`, of steps that have so many micro-batches."""
    counted = steps[BEFORE:]
    without = [one["ms"] for one in counted if not one["watched"]]
    quiet = [one["ms"] for one in counted if one["watched"] and not one["verified"]]
    often = [one for one in counted if one["watched"] and one["verified"]]
    if not (without and quiet and often):
        return "Too few steps to tell."
    base, idle = statistics.mean(without), statistics.mean(quiet)
    each = (sum(one["ms"] for one in often) - idle * len(often)) / sum(one["verified"] for one in often)
    verifying, watching = each * microbatches / every / base, idle / base - 1
    error = math.hypot(_error(without), _error(quiet)) / base
    return (
        f"A verified micro-batch takes {each:.0f} ms more. One in {every}: {verifying:.3%} of a step; with what the "
        f"watch takes in steps without any, {verifying + watching:.3%}, standard error {error:.3%}."
    )


def _error(ms: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(ms) / len(ms) ** 0.5 if len(ms) > 1 else float("nan")


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
        told = own_step(*args, **kwargs)
        torch.cuda.synchronize()
        ms = (time.perf_counter() - began) * 1000
        count[0] += 1
        with Path(result).open("a") as file:
            file.write(json.dumps({"ms": ms, "watched": watched, "verified": verified() - before}) + "\n")
        return told

    def verified() -> int:
        return sum(sum(module.stats().verified.values()) for module, _ in modules)

    training.train_step = step
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
