"""Dropless experts at the shape of Qwen3-30B-A3B: steps by a plan beside eager ones, and what graphs hold of a step.

Every layer has the model's own sizes; there are fewer of them, so that weights, gradients and optimizer states of all
experts fit on one GPU.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import (
    COMMON,
    NO_DROPOUT,
    Ran,
    different_steps,
    environment_here,
    plan_of,
    script_run,
    without,
    write_documents,
)
from trainer_exact import APEX_STAND_IN
from trainer_parts import profiled

LAYERS = 8
"""Layers of the model; Qwen3-30B-A3B has 48, and each takes 11 GB in bf16 with states of the optimizer in fp32."""
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-permute-fusion --moe-router-fusion"
)
PARALLEL: Mapping[int, str] = {1: "", 2: "--expert-model-parallel-size 2 --use-distributed-optimizer"}
"""Arguments by the number of GPUs."""
RUNS: Mapping[str, Sequence[str] | None] = {
    "eager (unchanged)": None,
    "up to the router": ("attn", "moe_router"),
    "up to the exchange": ("attn", "moe_router", "moe_preprocess"),
}
"""Name of each run, and its plan's graphs.modules; None: no plan."""
STEPS, WARM = 20, 6


def experts_lines(
    script: Path,
    directory: Path,
    *,
    gpus: int,
    runs: Sequence[str] = (),
    steps: int = STEPS,
    parts: bool = True,
    fused: bool = False,
) -> list[list[str]]:
    """Lines of the table, the first of which is its head.

    Args:
        script: pretrain_gpt.py.
        directory: folder for data, plans and logs.
        gpus: number of GPUs, which share the experts.
        runs: names of the runs; none: all.
        steps: steps of each run.
        parts: whether to run each by a plan once more, its first rank under torch's profiler.
        fused: whether matrix products add weight gradients to main_grad, as Megatron-LM does unless told
            otherwise.
    """
    write_documents(directory / "documents", tokens=4_000_000, mean=400)
    flags = experts_flags(directory / "documents", steps, gpus)
    flags = without(flags, "--no-gradient-accumulation-fusion") if fused else flags
    environment = {"PYTHONPATH": environment_here(*[APEX_STAND_IN] * fused)["PYTHONPATH"]}
    ran: dict[str, Ran] = {}
    seen: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(runs or RUNS):
        modules = RUNS[name]
        plan = None
        if modules is not None:
            plan = plan_of(flags, directory, f"plan-{number}", gpus=gpus, impl="transformer_engine", modules=modules)
        ran[name] = script_run(
            script,
            flags,
            plan=plan,
            stats=None if plan is None else directory / f"stats-{number}.jsonl",
            gpus=gpus,
            tensorboard=directory / f"tensorboard-{gpus}-{number}",
            environment=environment,
            log=directory / f"run-{gpus}-{number}.log",
        )
        print(gpus, name, ran[name].code, ran[name].step_ms(after=WARM), ran[name].error, flush=True)
        if parts and plan is not None:
            seen[name] = profiled(script, flags, plan, directory, f"parts-{gpus}-{number}", environment, gpus=gpus)
    return lines_of(ran, seen, steps)


def experts_flags(documents: Path, steps: int, gpus: int) -> list[str]:
    """Megatron's arguments of all runs on so many GPUs."""
    flags = shlex.split(f"{SHAPE} {COMMON} {NO_DROPOUT} {PARALLEL[gpus]} --eval-interval 1000 --eval-iters 0")
    return [*flags, "--log-interval", "2", "--train-iters", str(steps), "--data-path", str(documents)]


def lines_of(ran: Mapping[str, Ran], seen: Mapping[str, Mapping[str, Any]], steps: int) -> list[list[str]]:
    """A line a run: its time beside eager, how far its losses are from eager's, and what graphs hold of a step.

    Args:
        ran: what each run did.
        seen: what torch's profiler saw of a step of each.
        steps: steps of each run.
    """
    head = ["run", "exit code", f"ms a step (steps {WARM + 1} to {steps})", "of eager", "largest difference of losses"]
    head += ["replayed, eager", "kernels of a step: in graphs, all", "their GPU ms", "waits for the host, ms", ""]
    lines = [head]
    eager = ran.get("eager (unchanged)")
    base = eager.step_ms(after=WARM) if eager is not None and eager.code == 0 else None
    for name, one in ran.items():
        ms = one.step_ms(after=WARM) if one.code == 0 else None
        replayed = max(one.scalars.get("thdprof/replayed", {0: 0}).values())
        by_itself = sum(max(v.values()) for k, v in one.scalars.items() if k.startswith("thdprof/eager/"))
        lines.append(
            [
                name,
                str(one.code),
                f"{ms:.1f}" if ms else "-",
                f"{ms / base:.3f}" if ms and base else "-",
                largest(one, eager),
                f"{replayed:.0f}, {by_itself:.0f}" if replayed else "-",
                *of_profile(seen.get(name, {})),
                one.error if one.code else "",
            ]
        )
    return lines


def largest(one: Ran, eager: Ran | None) -> str:
    """The largest relative difference of a step's loss from that of the eager run, and the steps that differ."""
    if eager is None or one is eager:
        return "-"
    ours, theirs = (run.scalars.get("lm loss", {}) for run in (one, eager))
    both = [(ours[step], theirs[step]) for step in ours if step in theirs]
    differ, steps = different_steps(one, eager, "lm loss")
    return f"{max((abs(a - b) / b for a, b in both), default=0):.1e} ({differ} of {steps})"


def of_profile(told: Mapping[str, Any]) -> list[str]:
    """Cells of what the profiler saw of a run."""
    if "graphs" not in told:
        return [str(told.get("failed", "-")), "-", "-"]
    graphs = told["graphs"]
    return [
        f"{graphs['kernels']} of {told['kernels']}",
        f"{graphs['ms']:.1f} of {told['busy_ms']:.1f}",
        f"{told['step_ms'] - told['busy_ms']:.1f}",
    ]
