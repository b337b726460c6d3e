"""Step times of a run that a table of other runs predicts, through Megatron-LM's own training loop.

    python benchmarks/calibrated.py --megatron-lm ~/Megatron-LM --out benchmarks/results/calibrated.md

Each model is trained on the documents of `thdprof demo` by three buckets, and by the script alone. `thdprof calibrate
--stats` makes a cost table of both. With it `thdprof analyze` makes a plan of other, shorter documents, on which
Megatron-LM's own pretrain_gpt.py, unchanged, trains by the plan, and then without it. Predicted and measured step times
stand side by side. No table was tuned on any model.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lm import (
    COMMON,
    NO_DROPOUT,
    SHAPES,
    file_name,
    heading,
    plan_of,
    run_thdprof,
    script_run,
    table,
    with_caps,
    without,
    write_documents,
)

FIRST_CAPS = (0.3, 0.8, 1.0)
"""Shares of micro-batches at which the first run has buckets."""
STEPS, WARM = 22, 10
"""Steps of a run, and first steps that are not counted: they compile, or verify micro-batches."""
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
    """Train, calibrate, analyze and train one model.

    Raises:
        RuntimeError: a command or a run failed.
    """
    import yaml

    from thdprof.plan import load_plan

    stem, script = file_name(name), args.megatron_lm.resolve() / "pretrain_gpt.py"
    shared = [*without(shlex.split(COMMON), "--vocab-size"), *shlex.split(f"{MODELS[name]} {NO_DROPOUT}")]
    shared += shlex.split(f"--train-iters {STEPS} --eval-interval 1000 --eval-iters 1 --log-interval 1")
    flags, other = (
        [*shared, "--data-path", str(data)]
        for data in (directory / "demo" / "megatron" / "documents", directory / "short" / "documents")
    )
    first = plan_of(flags, directory, f"{stem}-first", caps=FIRST_CAPS)
    costs, stats = directory / f"{stem}.yaml", directory / f"{stem}.jsonl"
    ran = {}

    def train(kind: str, words: Sequence[str], **how: Any) -> float:
        output = {"tensorboard": directory / f"{stem}-{kind}", "log": directory / f"{stem}-{kind}.log"}
        ran[kind] = script_run(script, words, **output, **how)
        ms = ran[kind].step_ms(after=WARM)
        print(name, kind, ran[kind].code, ms, file=sys.stderr, flush=True)
        if ran[kind].code or not ms:
            raise RuntimeError(f"{kind}: exit code {ran[kind].code}: {ran[kind].error}")
        return ms

    train("first", flags, plan=first, stats=stats)
    eager = f"--eager-step-ms={train('first-eager', flags)}"
    run_thdprof(["calibrate", f"--stats={stats}", eager, "-o", str(costs), "--force"])
    plan = plan_of(other, directory, f"{stem}-second", more=["--cost-table", str(costs)])
    chosen = load_plan(plan)
    if not chosen.graphs.buckets:  # analyze says that graphs do not pay: the table is tried with a bucket all the same
        with_caps(plan, plan.with_suffix(".parquet"), [0.97])
    measured = {"replayed_ms": train("replayed", other, plan=plan), "eager_ms": train("eager", other)}
    measured |= {"replays": ran["replayed"].replayed, "fallbacks": ran["replayed"].eager}
    followed, costs_table = load_plan(plan), yaml.safe_load(costs.read_text())
    said = {"replayed_ms": chosen.predictions.step_ms, "eager_ms": chosen.predictions.eager_step_ms}
    if not chosen.graphs.buckets:
        said["replayed_ms"] = predicted(followed, costs_table)["replayed_ms"]
    return {
        "model": name,
        "table": costs_table,
        "first_caps": [bucket.max_seqs for bucket in load_plan(first).graphs.buckets],
        "predicted": said,
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
    steps = [["model", "step", "predicted ms", "measured ms", "predicted / measured", "buckets", "of the table"]]
    parts = [["model", "decoder replayed ms", "outside ms", "decoder eager ms", "micro-batches replayed, eager"]]
    for row in rows:
        for kind, name in (("replayed_ms", "by the plan"), ("eager_ms", "eager")):
            said, measured = row["predicted"][kind], row["measured"][kind]
            caps = ", ".join(map(str, row["caps"])) if kind == "replayed_ms" else ""
            cells = [
                f"{said:.1f}",
                f"{measured:.1f}",
                f"{said / measured:.3f}",
                caps,
                ", ".join(map(str, row["first_caps"])),
            ]
            steps.append([row["model"], name, *cells])
        ratios = [row[who]["replayed_ms"] / row[who]["eager_ms"] for who in ("predicted", "measured")]
        cells = [f"{one:.3f}" for one in (*ratios, ratios[0] / ratios[1])]
        steps.append([row["model"], "by the plan / eager", *cells, "", ""])
        costs, counts = row["table"], row["measured"]
        replay = ", ".join(f"{point['max_seqs']}: {point['ms']:.1f}" for point in costs["replay"])
        around = [f"{costs['outside_ms']:.1f}", f"{costs['eager'][0]['ms']:.1f}"]
        parts.append([row["model"], replay, *around, f"{counts['replays']}, {counts['fallbacks']}"])
    lines = [
        *heading("Steps that a table of other runs predicts, beside measured ones"),
        f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens, {MICROBATCHES} micro-batches a step, short documents; "
        f"mean of {STEPS - WARM} steps of each kind, in a process of its own.",
    ]
    return "\n".join([*lines, "", *table(steps), "", *table(parts)]) + "\n"


def main() -> int:
    """Run the models, and write the report after each; a model that fails does not end the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--models", default="", help="models whose name has this [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    args = parser.parse_args()
    names = [name for name in MODELS if args.models in name]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run_thdprof(["demo", str(directory / "demo"), "--force"])
        if not (directory / "short").exists():
            write_documents(directory / "short" / "documents", tokens=2_000_000, mean=150)
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
