"""What happens behind refusals: settings that `install` refuses, run all the same with the refusals lifted.

    python benchmarks/refused.py --megatron-lm ~/Megatron-LM --out benchmarks/results/refused.md

Each case is trained three times by Megatron-LM's own script: by itself, padded eagerly by a plan, and replayed. A case
that does not differ from padded eager may be served; the last column says why another one is refused.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lm import (
    COMMON,
    EXACT,
    NO_DROPOUT,
    SMALL,
    Ran,
    different_steps,
    plan_of,
    script_run,
    without,
    write_documents,
)
from trainer_exact import CAPS

KINDS = ("unchanged", "off", "on")
"""The runs of a case: the script alone, padded eagerly by a plan, and replayed."""
LAUNCHER = Path(__file__).parent / "lifted_run.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One setting that is refused, with the arguments that it needs."""

    name: str
    flags: str
    """Megatron's arguments beside those of all cases."""
    unplanned: tuple[str, ...] = ()
    """Those of them that the plan is made without, because `analyze` refuses them."""
    gpus: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of all cases."""
    alone: bool = False
    """Run the script by itself alone: it is not known to get as far as a plan."""


_EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2"
)
_FSDP = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
_STASH = "--moe-paged-stash --moe-expert-rank-capacity-factor 1.5 --moe-token-dispatcher-type flex"
_MANY = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
_FUSED = {**_MANY, "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
"""Without the latter megatron-core takes no fused operations for gated experts."""
CASES = (
    *(
        Case(
            name=f"Megatron-FSDP, {strategy}",
            flags=f"{_FSDP} {strategy}",
            unplanned=("--use-megatron-fsdp", "--ckpt-format", "--data-parallel-sharding-strategy"),
            environment=_MANY,
        )
        for strategy in ("optim", "optim_grads_params")
    ),
    *(
        Case(
            name=f"paged stash, {backend}",
            flags=f"{_EXPERTS} {_STASH} --moe-flex-dispatcher-backend {backend} --use-transformer-engine-op-fuser",
            alone=True,
            environment=_FUSED,
        )
        for backend in ("hybridep", "ncclep")
    ),
)


def flags_of(case: Case, data: Path, steps: int) -> list[str]:
    """Megatron's arguments of a case."""
    flags = shlex.split(f"{SMALL} {COMMON} {NO_DROPOUT} {case.flags}")
    flags += ["--train-iters", str(steps), "--log-interval", "10", "--eval-interval", "1000", "--eval-iters", "1"]
    return [*flags, "--data-path", str(data / "documents")]


def line_of(case: Case, scripts: Path, directory: Path, args: argparse.Namespace) -> list[str]:
    """The line of a case."""
    steps, limit = args.steps, args.limit
    folder = directory / "".join(c if c.isalnum() else "-" for c in case.name)
    folder.mkdir()
    flags = flags_of(case, directory / "data", steps)
    kinds = [kind for kind in KINDS if kind in args.kinds.split(",") and (kind == "unchanged" or not case.alone)]
    planned = without(flags, *case.unplanned)
    plan = None if case.alone else plan_of(planned, folder, "plan", gpus=case.gpus, caps=CAPS, layers_per_graph="all")

    def ran(name: str) -> Ran:
        return script_run(
            scripts / "pretrain_gpt.py",
            flags,
            plan=None if name == "unchanged" else plan,
            replay=name == "on",
            stats=None if name == "unchanged" else folder / f"{name}.jsonl",
            gpus=case.gpus,
            tensorboard=folder / name,
            environment={**EXACT, **case.environment},
            limit=limit,
            log=folder / f"{name}.log",
            by=LAUNCHER,
        )

    with ThreadPoolExecutor(args.at_once) as pool:
        return [case.name, *cells(**dict(zip(kinds, pool.map(ran, kinds), strict=True)))]


def cells(*, unchanged: Ran | None = None, off: Ran | None = None, on: Ran | None = None) -> list[str]:
    """Exit codes, differing steps, micro-batches and the last errors; a dash for a run that was not asked for."""
    runs = (on, off, unchanged)
    told = [", ".join("-" if ran is None else str(ran.code) for ran in runs)]
    for one, other in ((on, off or unchanged), (off, unchanged)):
        counts = [different_steps(one, other, name) for name in ("lm loss", "grad-norm")] if one and other else []
        told.append("; ".join(f"{differ} of {steps}" for differ, steps in counts) or "-")
    seen = on.scalars if on is not None else {}
    replayed = max(seen.get("thdprof/replayed", {0: 0}).values())
    eager = sum(max(v.values()) for name, v in seen.items() if name.startswith("thdprof/eager/"))
    return [*told, f"{replayed:.0f}, {eager:.0f}", " / ".join("-" if ran is None else ran.error or "-" for ran in runs)]


def main() -> None:
    """Run the cases and write their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="a checkout of Megatron-LM, or its scripts")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--keep", type=Path, help="folder to keep logs in")
    parser.add_argument("--cases", default="", help="words out of names of cases, separated by commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=110, help="seconds that a run may take")
    parser.add_argument("--jobs", type=int, default=len(CASES), help="cases at a time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="runs of each case, separated by commas")
    parser.add_argument("--at-once", type=int, default=len(KINDS), help="runs of a case at a time")
    args = parser.parse_args()
    words = [word for word in args.cases.split(",") if word]
    cases = [case for case in CASES if not words or any(word in case.name for word in words)]
    with tempfile.TemporaryDirectory() as temporary:
        directory = (args.keep or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        write_documents(directory / "data" / "documents", tokens=max(200_000, 20_000 * args.steps), mean=90)
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [pool.submit(line_of, case, args.megatron_lm, directory, args) for case in cases]
            lines = []
            for job in jobs:
                lines.append(job.result())
                print(" | ".join(lines[-1]), flush=True)
    head = [
        "case",
        "exit codes (on, off, unchanged)",
        "losses; norms differ, on from off (unchanged without it)",
        "off from unchanged",
    ]
    head += ["micro-batches replayed, eager", "last errors (on / off / unchanged)"]
    rows = [head, ["---"] * len(head), *lines]
    args.out.write_text("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    sys.exit(main())
