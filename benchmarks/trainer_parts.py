"""Where the time of a step of Megatron-LM's script goes: GPU time of its parts, and of none of them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lm import script_run

PROFILED, FIRST = 2, 12
"""Steps that are profiled, and the first of them."""
_BACKWARD = {
    "EmbeddingBackward": "embedding",
    "VocabParallelCrossEntropy": "loss",
    "CrossEntropy": "loss",
    "LinearWithGradAccumulation": "output layer",
}


def parts_of_a_step(script: Path, flags: Sequence[str], plan: Path, directory: Path) -> list[list[str]]:
    """Rows of a table: GPU milliseconds of each part of a step, in the middle of a run by the plan."""
    result = directory / "parts.json"
    launcher = directory / "profiled.py"
    launcher.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}, {str(script.parent)!r}]\n"
        f"import trainer_parts\ntrainer_parts.profile({str(script)!r}, {str(result)!r})\n"
    )
    ran = script_run(launcher, flags, plan=plan, log=directory / "parts.log")
    if ran.code or not result.exists():
        return [["part", "ms"], ["failed", ran.error or f"exit code {ran.code}"]]
    told = json.loads(result.read_text())
    rows = [["part of a step", "GPU ms", "launches by the host"]]
    rows += [[name, f"{ms:.1f}", str(told["launches"].get(name, ""))] for name, ms in told["parts"]]
    rows.append(["GPU waits for the host", f"{told['step_ms'] - told['busy_ms']:.1f}", ""])
    rows.append(["whole step, profiled", f"{told['step_ms']:.1f}", ""])
    return rows


def profile(script: str, result: str) -> None:
    """Run `script` in this process with PROFILED of its steps under torch's profiler."""
    import runpy

    import torch
    from megatron.training import training
    from torch.profiler import ProfilerActivity, record_function

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
            Path(result).write_text(json.dumps(summary(profiler)))
        return told

    training.setup_model_and_optimizer, training.train_step = setup, step
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


def summary(profiler: Any) -> dict[str, Any]:
    """Milliseconds of GPU work by part, of one step: each kernel counts for the part whose host call launched it."""
    from torch.autograd import DeviceType

    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    on_gpu, starts, ends = [], [], []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("part:", "ProfilerStep")):
            on_gpu.append((event.time_range.start, event.time_range.end))
        if event.device_type != DeviceType.CPU:
            continue
        if event.name == "part:other":
            starts.append(event.time_range.start)
            ends.append(event.time_range.end)
        if event.kernels:
            part = part_of(event)
            spent[part] += sum(kernel.duration for kernel in event.kernels) / 1000
            launches[part] += len(event.kernels)
    # kernels inside graphs belong to no host call: the graphs are the decoder's
    spent["decoder (graphs)"] += sum(end - start for start, end in on_gpu) / 1000 - sum(spent.values())
    busy, until = 0.0, 0.0
    for start, end in sorted(on_gpu):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = max([end for _, end in on_gpu] + ends) - min(starts)
    parts = sorted(((name, ms / PROFILED) for name, ms in spent.items()), key=lambda pair: -pair[1])
    return {
        "parts": parts,
        "launches": {name: n // PROFILED for name, n in launches.items()},
        "step_ms": whole / 1000 / PROFILED,
        "busy_ms": busy / 1000 / PROFILED,
    }


def part_of(event: Any) -> str:
    """The part of a step that a host event belongs to, by the ranges and backward functions around it."""
    while event is not None:
        if event.name.startswith("part:"):
            return str(event.name.removeprefix("part:"))
        if "cudaGraphLaunch" in event.name:
            return "decoder"
        if event.name.startswith("autograd::engine::evaluate_function"):
            for word, name in _BACKWARD.items():
                if word in event.name:
                    return f"{name}, backward"
            return "decoder and other, backward"
        event = event.cpu_parent
    return "other"
