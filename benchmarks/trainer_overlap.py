"""Graphs of a few layers beside whole chunks where data-parallel communication counts: DP 2, one micro-batch a step."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_lm import COMMON, NO_DROPOUT, Ran, largest_difference, plan_of, script_run, without, write_documents

SHAPE = (
    "--num-layers 12 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)
"""2.4 billion parameters in layers, and few tokens: as much communication as computing."""
GPUS = 2
RUNS: dict[str, int | str | None] = {
    "eager (unchanged)": None,
    "chunk, whole": "all",
    "chunk, 4 layers a graph": 4,
    "chunk, 2 layers a graph": 2,
    "chunk, 1 layer a graph": 1,
}
"""Name of each run, and its layers_per_graph; None: no plan."""
WARM = 10


def overlap_lines(
    script: Path, directory: Path, *, steps: int, names: Sequence[str], connections: int = 1, more: Sequence[str] = ()
) -> tuple[list[list[str]], str]:
    """Lines of the table, the first of which is its head, and what `analyze` would choose.

    Args:
        script: pretrain_gpt.py.
        directory: folder for data, plans and logs.
        steps: steps of each run.
        names: runs of RUNS, among them "chunk, whole".
        connections: value of CUDA_DEVICE_MAX_CONNECTIONS.
        more: further arguments of the script.
    """
    write_documents(directory / "documents", tokens=400_000, mean=90)
    flags = [*overlap_flags(directory / "documents", steps), *more]
    chosen = plan_of(flags, directory, "chosen", gpus=GPUS)
    ran: dict[str, Ran] = {}
    for name, layers in ((name, RUNS[name]) for name in names):
        plan = (
            None if layers is None else plan_of(flags, directory, f"plan-{layers}", gpus=GPUS, layers_per_graph=layers)
        )
        ran[name] = script_run(
            script,
            flags,
            plan=plan,
            stats=None if plan is None else directory / f"stats-{layers}.jsonl",
            gpus=GPUS,
            tensorboard=directory / f"tensorboard-{layers}",
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)},
            limit=150,
            log=directory / f"run-{layers}.log",
        )
        print(name, ran[name].code, ran[name].step_ms(after=WARM), ran[name].error, flush=True)
    return lines_of(ran, steps), f"`analyze` chooses layers_per_graph {layers_of(chosen)}."


def overlap_flags(documents: Path, steps: int) -> list[str]:
    """Megatron's arguments of all runs."""
    flags = without(shlex.split(COMMON), "--global-batch-size")
    flags += shlex.split(f"{SHAPE} {NO_DROPOUT} --global-batch-size {GPUS} --eval-interval 1000 --eval-iters 0")
    return [*flags, "--log-interval", "5", "--train-iters", str(steps), "--data-path", str(documents)]


def lines_of(ran: dict[str, Ran], steps: int) -> Sequence[list[str]]:
    """A line a run, with its time beside that of whole chunks, and how far its losses are from theirs."""
    whole = ran["chunk, whole"]
    lines = [["run", "exit code", f"ms a step (steps {WARM + 1} to {steps})", "of whole chunks",
              "losses from whole chunks'", "replayed, eager", ""]]  # fmt: skip
    base = whole.step_ms(after=WARM) if whole.code == 0 else None
    for name, one in ran.items():
        ms = one.step_ms(after=WARM) if one.code == 0 else None
        apart = largest_difference(one, whole, "lm loss")
        replayed = max(one.scalars.get("thdprof/replayed", {0: 0}).values())
        eager = sum(max(v.values()) for k, v in one.scalars.items() if k.startswith("thdprof/eager/"))
        lines.append(
            [
                name,
                str(one.code),
                f"{ms:.1f}" if ms else "-",
                f"{ms / base:.3f}" if ms and base else "-",
                f"{apart:.1e} at most",
                f"{replayed:.0f}, {eager:.0f}",
                one.error if one.code else "",
            ]
        )
    return lines


def layers_of(plan: Path) -> str:
    """The plan's graphs.layers_per_graph, in words."""
    from thdprof.plan import load_plan

    layers = load_plan(plan).graphs.layers_per_graph
    return "all (whole chunks)" if layers is None else str(layers)
