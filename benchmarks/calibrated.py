"""Step times that a calibrated table predicts, beside measured ones, through Megatron-LM's own training loop.

    python benchmarks/calibrated.py --megatron-lm ~/Megatron-LM --out benchmarks/results/calibrated.md

For each model a launch script is written. `thdprof calibrate --megatron-args` measures its model, `thdprof analyze`
makes a plan of demo data with that table, and Megatron-LM's own pretrain_gpt.py, unchanged, trains the script by the
plan, and then without it. Predicted and measured step times stand side by side. No table was tuned on any model.
"""

from __future__ import annotations

import argparse
import datetime
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
    environment_here,
    file_name,
    launcher,
    run,
    script_run,
    table,
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


def run_logged(command: Sequence[str], log: Path, *, limit: float) -> float:
    """Seconds that a command took; its output goes to `log`.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    _, alone = launcher(1)
    began = time.perf_counter()
    printed, code = run(command, {**environment_here(), **alone, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, limit=limit)
    log.write_text(printed)
    if code:
        tail = "\n".join(printed.splitlines()[-25:])
        raise RuntimeError(f"{shlex.join(command)[:200]}: exit code {code}\n{tail}")
    return time.perf_counter() - began


def row_of(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Calibrate, analyze and train one model."""
    import yaml

    from thdprof.plan import load_plan

    stem = file_name(name)
    script, costs, plan, log = (directory / f"{stem}{end}" for end in (".sh", ".costs.yaml", ".yaml", ".log"))
    flags = [*without(shlex.split(COMMON), "--vocab-size"), *shlex.split(f"{MODELS[name]} {NO_DROPOUT}")]
    flags += shlex.split(f"--train-iters {STEPS} --eval-interval 1000 --eval-iters 1 --log-interval 1")
    flags += ["--data-path", str(directory / "demo" / "megatron" / "documents")]
    script.write_text(f"torchrun --nproc-per-node 1 pretrain_gpt.py {shlex.join(flags)}\n")
    thdprof, given = [sys.executable, "-m", "thdprof"], ["--megatron-args", str(script)]
    calibrate = [*thdprof, "calibrate", *given, "-o", str(costs), "--seconds", str(args.seconds)]
    seconds = run_logged(calibrate, log, limit=200)
    print(log.read_text()[-1500:], file=sys.stderr)
    run_logged([*thdprof, "analyze", *given, "--cost-table", str(costs), "-o", str(plan)], log, limit=100)
    chosen = load_plan(plan)
    chunked = chosen.model_copy(update={"graphs": chosen.graphs.model_copy(update={"impl": "chunk"})})
    if not chosen.graphs.buckets:  # analyze says that graphs do not pay: the table is tried with a bucket all the same
        chunked = with_bucket(chunked)
    chunked.save(plan, force=True)
    own, measured = args.megatron_lm.resolve() / "pretrain_gpt.py", {}
    for kind, followed in (("replayed", plan), ("eager", None)):
        folder = directory / f"{stem}-{kind}"
        ran = script_run(own, flags, plan=followed, tensorboard=folder, log=log)
        if ran.code:
            raise RuntimeError(f"{kind}: exit code {ran.code}: {ran.error}")
        measured[f"{kind}_ms"] = ran.step_ms(after=WARM)
        if followed:
            measured |= {"replays": ran.replayed, "fallbacks": ran.eager}
    costs_table = yaml.safe_load(costs.read_text())
    said = {"replayed_ms": chosen.predictions.step_ms, "eager_ms": chosen.predictions.eager_step_ms}
    return {
        "model": name,
        "table": costs_table,
        "calibrated_in_s": seconds,
        "predicted": said if chosen.graphs.buckets else predicted(chunked, costs_table),
        "measured": measured,
        "caps": [bucket.max_seqs for bucket in chunked.graphs.buckets],
    }


def with_bucket(plan: Any) -> Any:
    """The plan with one bucket that holds every micro-batch."""
    from thdprof.plan import BucketPart

    bucket = BucketPart(max_seqs=plan.microbatches.n_seqs.max, max_seqlen=TOKENS, share=1.0)
    graphs = plan.graphs.model_copy(update={"buckets": [bucket]})
    return plan.model_copy(update={"graphs": graphs})


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
    stamp = rows[0]["table"]["stamp"]
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
        "# Steps that a calibrated table predicts, beside measured ones",
        "",
        f"{stamp['gpu']}, {stamp['processor']}; torch {stamp['torch']}, Transformer Engine "
        f"{stamp['transformer_engine']}, cuDNN {stamp['cudnn']}, megatron-core {stamp['megatron_core']}; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/calibrated.py {shlex.join(sys.argv[1:])}`",
        "",
        f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens, {MICROBATCHES} micro-batches a step, demo data; mean of "
        f"{STEPS - WARM} steps of each kind, in a process of its own.",
    ]
    return "\n".join([*lines, "", *table(steps), "", *table(parts)]) + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--seconds", type=float, default=55, help="of each calibration")
    parser.add_argument("--models", default="", help="models whose name has this [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    return parser.parse_args()


def main() -> int:
    """Run the models, and write the report after each; a model that fails does not end the others."""
    args = arguments()
    names = [name for name in MODELS if args.models in name]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        demo = [sys.executable, "-m", "thdprof", "demo", str(directory / "demo"), "--force"]
        run_logged(demo, directory / "demo.log", limit=100)
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
