"""How far eager runs of PP 2 x EP 2 differ from each other, and a replayed run from them: losses and gradient norms.

    python benchmarks/eager_spread.py --megatron-lm ~/Megatron-LM --out benchmarks/results/eager-spread.md

12 layers of hidden 1024 with 8 experts padded to capacity, 4,096 tokens, with the default, not deterministic kernels,
on 4 GPUs, or with two ranks on each of 2: so many runs of the plan with --replay off and one that replays, on the same
data. A difference is the largest over all steps, relative to the first run's value. The exit code is 1 where the
replayed run is further from the eager ones than any two of them are from each other, or its counts are not as
predicted.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

from megatron_lm import COMMON, NO_DROPOUT, Ran, environment_here, plan_of, run, script_run, write_documents
from trainer import heading, table

RANKS, CAPS = 4, (0.94,)
MODEL = (
    "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 8 "
    "--moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.25 "
    "--moe-pad-expert-input-to-capacity --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
MEASURES = ("lm loss", "grad-norm")


def relative(one: Ran, other: Ran, name: str, steps: int) -> float:
    """The largest relative difference of `name` in a step; infinite where a run did not log all steps."""
    ours, theirs = one.scalars.get(name, {}), other.scalars.get(name, {})
    if len(ours) < steps or ours.keys() != theirs.keys():
        return float("inf")
    return max(abs(theirs[step] - value) / abs(value) for step, value in ours.items())


def spread(values: Sequence[float]) -> list[str]:
    """Least, median and largest."""
    return [f"{value:.1e}" for value in (min(values), statistics.median(values), max(values))]


def compare(eager: Sequence[Ran], replayed: Ran, steps: int) -> tuple[list[list[str]], bool]:
    """Lines of the table, and whether the replayed run is among the eager ones."""
    lines = [["measure", "runs", "pairs", "least", "median", "largest"]]
    among = True
    for name in MEASURES:
        apart = [relative(one, other, name, steps) for one, other in combinations(eager, 2)]
        ours = [relative(one, replayed, name, steps) for one in eager]
        lines.append([name, "eager, eager", str(len(apart)), *spread(apart)])
        lines.append([name, "eager, replayed", str(len(ours)), *spread(ours)])
        among &= statistics.median(ours) <= max(apart) < float("inf")
    return lines, among


def main() -> int:
    """Run all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--runs", type=int, default=5, help="eager runs [5]")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run [100]")
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=4, help="GPUs of this host [4]")
    parser.add_argument("--jobs", type=int, default=6, help="runs at once [6]")
    parser.add_argument("--limit", type=float, default=300, help="seconds of each run [300]")
    parser.add_argument("--keep", type=Path, help="folder for data, plans and logs [a temporary one]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep.resolve() if args.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "documents"
        write_documents(data, tokens=4_000_000, mean=95)
        flags = shlex.split(f"{MODEL} {COMMON} {NO_DROPOUT}")
        flags += shlex.split(f"--train-iters {args.steps} --log-interval 10 --eval-interval 1000 --eval-iters 1")
        flags += ["--data-path", str(data)]
        plan = plan_of(flags, folder, "plan", gpus=RANKS, caps=CAPS)

        def train(name: str) -> Ran:
            ran = script_run(
                args.megatron_lm.resolve() / "pretrain_gpt.py",
                flags,
                plan=plan,
                replay=name == "replayed",
                stats=folder / f"{name}.jsonl",
                gpus=args.gpus,
                hosts=RANKS // args.gpus,
                tensorboard=folder / name,
                limit=args.limit,
                log=folder / f"{name}.log",
            )
            print(f"{name}: exit code {ran.code}, {ran.seconds:.0f} s {ran.error}", flush=True)
            return ran

        names = ["replayed", *(f"eager-{number}" for number in range(args.runs))]
        with ThreadPoolExecutor(args.jobs) as pool:  # nothing but their numbers counts
            ran = list(pool.map(train, names))
        lines, among = compare(ran[1:], ran[0], args.steps)
        counts, code = run(
            [sys.executable, "-m", "thdprof", "compare", str(plan), str(folder / "replayed.jsonl")],
            environment_here(),
            limit=60,
        )
    told = [*heading("PP 2 x EP 2, eager runs beside a replayed one"), *table(lines), "", "```", counts.rstrip(), "```"]
    text = "\n".join(told).replace("benchmarks/trainer.py", "benchmarks/eager_spread.py") + "\n"
    args.out.write_text(text)
    print(text)
    exits = [one.code for one in ran]
    print(f"replayed among eager: {among}; counts as predicted: {code == 0}; exit codes {exits}")
    return 0 if among and code == 0 and not any(exits) else 1


if __name__ == "__main__":
    sys.exit(main())
