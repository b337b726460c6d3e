"""Where the time of a step of Megatron-LM's script goes: GPU time of its parts, and of none of them."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import script_run

PROFILED, FIRST = 3, 12
"""Steps that are profiled, and the first of them."""
_BACKWARD = {
    "EmbeddingBackward": "embedding",
    "VocabParallelCrossEntropy": "loss",
    "CrossEntropy": "loss",
    "LinearWithGradAccumulation": "output layer",
}


def parts_of_a_step(
    script: Path, flags: Sequence[str], plan: Path, directory: Path, environment: Mapping[str, str]
) -> list[list[str]]:
    """Rows of a table: GPU milliseconds of each part of a step, in the middle of a run by the plan."""
    told = profiled(script, flags, plan, directory, "parts", environment)
    if "failed" in told:
        return [["part", "ms"], ["failed", told["failed"]]]
    rows = [["part of a step", "GPU ms", "launches by the host"]]
    rows += [[name, f"{ms:.1f}", str(told["launches"].get(name, ""))] for name, ms in told["parts"]]
    rows.append(["GPU waits for the host", f"{told['step_ms'] - told['busy_ms']:.1f}", ""])
    rows.append(["whole step, profiled", f"{told['step_ms']:.1f}", ""])
    return rows


def profiled(
    script: Path,
    flags: Sequence[str],
    plan: Path | None,
    directory: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
    *,
    gpus: int = 1,
) -> dict[str, Any]:
    """What `summary` says of the middle of a run by the plan, or without one; `failed` alone where it ended early.

    Args:
        script: Megatron-LM's script.
        flags: its arguments.
        plan: the plan to follow; None: the script alone.
        directory: folder for the trace and the log.
        name: stem of their files.
        environment: variables beside this process's own.
        gpus: number of ranks, the first of which is profiled.
    """
    result = directory / f"{name}.json"
    launcher = directory / f"{name}.py"
    launcher.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}, {str(script.parent)!r}]\n"
        f"import trainer_parts\ntrainer_parts.profile({str(script)!r}, {str(result)!r})\n"
    )
    ran = script_run(launcher, flags, plan=plan, gpus=gpus, environment=environment, log=directory / f"{name}.log")
    if ran.code or not result.exists():
        return {"failed": ran.error or f"exit code {ran.code}"}
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def profile(script: str, result: str) -> None:
    """Run `script` in this process with PROFILED of its steps under torch's profiler, where it is the first rank."""
    import runpy

    import torch
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import arguments, training
    from torch.profiler import ProfilerActivity, record_function

    sys.argv[0] = script
    if os.environ["RANK"] != "0":
        runpy.run_path(script, run_name="__main__")
        return
    own_step, count, profiler = (
        training.train_step,
        [0],
        torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]),
    )
    own_setup = training.setup_model_and_optimizer

    def named(owner: Any, attribute: str, name: str) -> None:
        own = getattr(owner, attribute)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"part:{name}"):
                return own(*args, **kwargs)

        setattr(owner, attribute, inside)

    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = own_setup(*args, **kwargs)
        inner = model[0]
        while not hasattr(inner, "decoder"):
            inner = inner.module
        for attribute, name in (("embedding", "embedding"), ("decoder", "decoder"), ("output_layer", "output layer")):
            named(getattr(inner, attribute), "forward", name)
        named(inner, "compute_language_model_loss", "loss")
        named(optimizer, "step", "optimizer")
        named(model[0], "zero_grad_buffer", "zero gradients")
        return model, optimizer, scheduler

    def step(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == FIRST:
            torch.cuda.synchronize()
            profiler.start()
        with record_function("part:other"):
            told = own_step(*args, **kwargs)
        if count[0] == FIRST + PROFILED - 1:
            torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(f"{result}.trace")
            Path(result).write_text(json.dumps(summary(json.loads(Path(f"{result}.trace").read_text()))))
        return told

    named(RerunDataIterator, "__next__", "data")
    named(arguments, "core_transformer_config_from_args", "configuration of each micro-batch")
    for name in ("consume_seqlen_stats_in_iteration", "num_floating_point_operations", "training_log"):
        named(training, name, name)
    training.setup_model_and_optimizer, training.train_step = setup, step
    runpy.run_path(script, run_name="__main__")


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of GPU work by part, of one step, and the longest waits of the GPU with what the host did then.

    Args:
        trace: torch's profile as a Chrome trace. Each kernel counts for the part whose host call launched it.
    """
    launched: dict[int, tuple[int, float]] = {}
    of_graphs: set[int] = set()
    ranges: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    work = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, start, name = event.get("cat"), event["ts"], event["name"]
        if category in ("cuda_runtime", "cuda_driver"):
            launched[event["args"]["correlation"]] = (event["tid"], start)
            if "GraphLaunch" in name:
                of_graphs.add(event["args"]["correlation"])
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((start, start + event["dur"], event["args"]["correlation"]))
        elif category == "user_annotation" or name.startswith("autograd::engine::evaluate_function"):
            ranges[event["tid"]].append((start, start + event["dur"], name))
    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, set[int]] = defaultdict(set)
    parts = parts_of(launched, ranges)
    for start, end, correlation in work:
        part = parts.get(correlation, "other")
        spent[part] += (end - start) / 1000 / PROFILED
        launches[part].add(correlation)
    steps = sorted(r for of_thread in ranges.values() for r in of_thread if r[2] == "part:other")
    thread = next(tid for tid, of_thread in ranges.items() if steps[0] in of_thread)
    busy, until, gaps = 0.0, min(steps[0][0], min(work)[0]), []
    began = until
    for start, end, correlation in sorted(work):
        if start > until:
            gaps.append((start - until, until, start, parts.get(correlation, "other")))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    in_graphs = [end - start for start, end, correlation in work if correlation in of_graphs]
    return {
        "graphs": {"ms": sum(in_graphs) / 1000 / PROFILED, "kernels": len(in_graphs) // PROFILED},
        "kernels": len(work) // PROFILED,
        "parts": sorted(spent.items(), key=lambda pair: -pair[1]),
        "launches": {name: len(found) // PROFILED for name, found in launches.items()},
        "step_ms": (until - began) / 1000 / PROFILED,
        "busy_ms": busy / 1000 / PROFILED,
        "gaps": [
            {
                "ms": ms / 1000,
                "at_ms": (start - began) / 1000,
                "before": before,
                "host": host_in(ranges[thread], start, end),
            }
            for ms, start, end, before in sorted(gaps, reverse=True)[:25]
        ],
    }


def host_in(of_thread: Sequence[tuple[float, float, str]], start: float, end: float) -> str:
    """The innermost range in the middle of a wait, and all that began inside it."""
    middle = (start + end) / 2
    around = [r for r in of_thread if r[0] <= middle <= r[1]]
    inner = min(around, key=lambda r: r[1] - r[0])[2] if around else "outside a step"
    began = Counter(r[2] for r in of_thread if start <= r[0] <= end)
    return f"{inner}; began {dict(began.most_common(6))}"


def parts_of(
    launched: Mapping[int, tuple[int, float]], ranges: Mapping[int, Sequence[tuple[float, float, str]]]
) -> dict[int, str]:
    """The part of a step to which each launch belongs, by the innermost ranges of its thread.

    Args:
        launched: thread and time of each launch, by its correlation.
        ranges: start, end and name of what ran in each thread, nested or one after the other.
    """
    of_threads: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for correlation, (thread, at) in launched.items():
        of_threads[thread].append((at, correlation))
    found = {}
    for thread, launches in of_threads.items():
        waiting = sorted(ranges.get(thread, ()), reverse=True)
        around: list[tuple[float, float, str]] = []
        for at, correlation in sorted(launches):
            while waiting and waiting[-1][0] <= at:
                around.append(waiting.pop())
            around = [r for r in around if r[1] >= at]
            found[correlation] = _part(name for _, _, name in sorted(around, key=lambda r: r[1] - r[0]))
    return found


def _part(names: Iterable[str]) -> str:
    """The part that ranges around a launch tell of, the innermost first."""
    for name in names:
        if name.startswith("part:"):
            return name.removeprefix("part:")
        for word, part in _BACKWARD.items():
            if word in name:
                return f"{part}, backward"
        if "Replay" in name:
            return "decoder, backward"
    return "other"
