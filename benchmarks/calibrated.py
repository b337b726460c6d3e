"""Step times that a calibrated table predicts, beside measured ones, through Megatron-LM's own training loop.

    python benchmarks/calibrated.py --megatron-lm ~/Megatron-LM --out benchmarks/results/calibrated.md

For each model a launch script is written. `thdprof calibrate --megatron-args` measures its model, `thdprof analyze`
makes a plan of demo data with that table, and Megatron-LM's own pretrain_gpt.py, unchanged, trains the script by the
plan, and then without it. Predicted and measured step times stand side by side. No table was tuned on any model.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import (
    COMMON,
    NO_DROPOUT,
    SHAPES,
    file_name,
    heading,
    launcher,
    plan_of,
    run_thdprof,
    script_run,
    table,
    with_caps,
    without,
)

STEPS, WARM = 26, 4
"""Steps of a run, and first steps that are not counted: they compile, capture, or begin anew."""
TOKENS = 4096
MICROBATCHES = 8
_DENSE = "--seq-length 4096 --max-position-embeddings 4096"
MODELS: Mapping[str, str] = {
    "Qwen3 0.6B": f"{SHAPES['qwen3-0.6b']} --vocab-size 32000",
    "12 layers, hidden 1024, 8 experts padded to capacity": "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 "
    "--num-attention-heads 16 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --moe-router-load-balancing-type "
    f"none --vocab-size 50304 {_DENSE}",
    "4 layers of Llama 3 8B": "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"--group-query-attention --num-query-groups 8 --vocab-size 128256 {_DENSE}",
}
"""Megatron-LM's flags of each model."""


def row_of(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Calibrate, analyze and train one model.

    Raises:
        RuntimeError: a command or a run failed.
    """
    import yaml

    from thdprof.plan import load_plan

    stem = file_name(name)
    script, costs, log = (directory / f"{stem}{end}" for end in (".sh", ".costs.yaml", ".log"))
    flags = [*without(shlex.split(COMMON), "--vocab-size"), *shlex.split(f"{MODELS[name]} {NO_DROPOUT}")]
    flags += shlex.split(f"--train-iters {STEPS} --eval-interval 1000 --eval-iters 1 --log-interval 1")
    flags += ["--data-path", str(directory / "demo" / "megatron" / "documents")]
    script.write_text(f"torchrun --nproc-per-node 1 pretrain_gpt.py {shlex.join(flags)}\n")
    calibrate = ["calibrate", "--megatron-args", str(script), "-o", str(costs), "--seconds", str(args.seconds)]
    began = time.perf_counter()
    _, rank = launcher(1)
    print(run_thdprof(calibrate, {**rank, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})[-1500:], file=sys.stderr)
    seconds = time.perf_counter() - began
    plan = plan_of(flags, directory, stem, more=["--cost-table", str(costs)])
    chosen = load_plan(plan)
    if not chosen.graphs.buckets:  # analyze says that graphs do not pay: the table is tried with a bucket all the same
        with_caps(plan, plan.with_suffix(".parquet"), [1.0])
    own, measured = args.megatron_lm.resolve() / "pretrain_gpt.py", {}
    for kind, followed in (("replayed", plan), ("eager", None)):
        folder = directory / f"{stem}-{kind}"
        ran = script_run(own, flags, plan=followed, tensorboard=folder, log=log)
        if ran.code:
            raise RuntimeError(f"{kind}: exit code {ran.code}: {ran.error}")
        measured[f"{kind}_ms"] = ran.step_ms(after=WARM)
        if followed:
            measured |= {"replays": ran.replayed, "fallbacks": ran.eager}
    followed, costs_table = load_plan(plan), yaml.safe_load(costs.read_text())
    said = {"replayed_ms": chosen.predictions.step_ms, "eager_ms": chosen.predictions.eager_step_ms}
    return {
        "model": name,
        "table": costs_table,
        "calibrated_in_s": seconds,
        "predicted": said if chosen.graphs.buckets else predicted(followed, costs_table),
        "measured": measured,
        "caps": [bucket.max_seqs for bucket in followed.graphs.buckets],
    }


def predicted(plan: Any, table: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a mean step by the table alone, for a plan that analyze did not advise."""
    from thdprof.analyze.buckets.cost_table import CostTable

    costs = CostTable.model_validate(table)
    around = (costs.outside_ms or 0.0), (costs.optimizer_ms or 0.0)
    eager = statistics.fmean(point.ms for point in costs.eager)
    count = plan.training.global_batch_size // plan.training.micro_batch_size
    shares = [(bucket.share, costs.replay_ms(bucket.max_seqs, bucket.max_seqlen)) for bucket in plan.graphs.buckets]
    left = 1 - sum(share for share, _ in shares)
    one = sum(share * ms for share, ms in shares) + left * eager
    return {
        "replayed_ms": count * (one + around[0]) + around[1],
        "eager_ms": count * (eager + around[0]) + around[1],
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The results as markdown."""
    steps = [["model", "step", "predicted ms", "measured ms", "predicted / measured", "buckets", "calibrated in"]]
    parts = [["model", "decoder replayed ms", "outside ms", "optimizer ms", "micro-batches replayed, eager"]]
    for row in rows:
        for kind, name in (("replayed_ms", "by the plan"), ("eager_ms", "eager")):
            said, measured = row["predicted"][kind], row["measured"][kind]
            caps = ", ".join(map(str, row["caps"])) if kind == "replayed_ms" else ""
            cells = [
                f"{said:.1f}",
                f"{measured:.1f}",
                f"{said / measured:.3f}",
                caps,
                f"{row['calibrated_in_s']:.0f} s",
            ]
            steps.append([row["model"], name, *cells])
        ratios = [row[who]["replayed_ms"] / row[who]["eager_ms"] for who in ("predicted", "measured")]
        cells = [f"{one:.3f}" for one in (*ratios, ratios[0] / ratios[1])]
        steps.append([row["model"], "by the plan / eager", *cells, "", ""])
        costs, counts = row["table"], row["measured"]
        replay = ", ".join(f"{point['max_seqs']}: {point['ms']:.1f}" for point in costs["replay"])
        around = [f"{costs[name]:.1f}" for name in ("outside_ms", "optimizer_ms")]
        parts.append([row["model"], replay, *around, f"{counts['replays']}, {counts['fallbacks']}"])
    lines = [
        *heading("Steps that a calibrated table predicts, beside measured ones"),
        f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens, {MICROBATCHES} micro-batches a step, demo data; mean of "
        f"{STEPS - WARM} steps of each kind, in a process of its own.",
    ]
    return "\n".join([*lines, "", *table(steps), "", *table(parts)]) + "\n"


def main() -> int:
    """Run the models, and write the report after each; a model that fails does not end the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--seconds", type=float, default=55, help="of each calibration")
    parser.add_argument("--models", default="", help="models whose name has this [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    args = parser.parse_args()
    names = [name for name in MODELS if args.models in name]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run_thdprof(["demo", str(directory / "demo"), "--force"])
        for name in names:
            try:
                rows.append(row_of(name, args, directory))
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            args.out.write_text(report(rows))
            print(report(rows), flush=True)
    return 0 if len(rows) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
