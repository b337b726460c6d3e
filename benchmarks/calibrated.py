"""Step times that a calibrated table predicts, beside measured ones, through Megatron-LM's own training loop.

    python benchmarks/calibrated.py --megatron-lm ~/Megatron-LM --out benchmarks/results/calibrated.md

For each model a launch script is written. `thdprof calibrate --megatron-args` measures its model, `thdprof analyze`
makes a plan of demo data with that table, and Megatron-LM's own pretrain_gpt.py, unchanged, trains the script: first by
the plan, then eagerly in the same process. Predicted and measured step times stand side by side. No table was tuned on
any of the models. One GPU; about two minutes a model.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPLAYED, EAGER = 26, 11
"""Steps by the plan, and eager steps after them."""
WARM = 4
"""First steps of each kind that are not counted: they compile, capture, or begin anew."""
TOKENS = 4096
MICROBATCHES = 8
SCRIPT = """#!/bin/bash
# {name}
GPUS_PER_NODE=1
NUM_NODES=1
MODEL_ARGS=({model})
TRAINING_ARGS=(--seq-length {tokens} --max-position-embeddings {tokens} --micro-batch-size 1 --global-batch-size {batch}
  --train-iters {steps} --eval-interval 1000 --eval-iters 1 --log-interval 10 --lr 1e-5 --min-lr 1e-6
  --lr-decay-style constant --bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion
  --te-rng-tracker --attention-dropout 0 --hidden-dropout 0)
DATA_ARGS=(--tokenizer-type NullTokenizer --data-path {data} --split 90,5,5 --num-workers 2
  --dataloader-inter-document-masking --no-create-attention-mask-in-dataloader)
python pretrain_gpt.py ${{MODEL_ARGS[@]}} ${{TRAINING_ARGS[@]}} ${{DATA_ARGS[@]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of the benchmark."""

    name: str
    """For the table."""
    flags: str
    """Megatron-LM's flags of the model."""


_COMMON = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
_COMMON += "--untie-embeddings-and-output-weights"
MODELS = (
    Model(
        name="Qwen3 0.6B",
        flags=f"--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
        f"--group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --vocab-size 32000 {_COMMON}",
    ),
    Model(
        name="12 layers, hidden 1024, 8 experts padded to capacity",
        flags="--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 --num-experts 8 "
        "--moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.25 "
        f"--moe-pad-expert-input-to-capacity --moe-router-load-balancing-type none --vocab-size 50304 {_COMMON}",
    ),
    Model(
        name="4 layers of Llama 3 8B",
        flags="--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        f"--group-query-attention --num-query-groups 8 --vocab-size 128256 {_COMMON}",
    ),
)


# --- training, in a process of its own ------------------------------------------------------------------------------


class Clock:
    """Counts the training steps of Megatron's loop, installs the plan before them, and times both kinds of step."""

    def __init__(self, plan: Path, replayed: int, eager: int) -> None:
        self.plan, self.replayed, self.eager = plan, replayed, eager
        self.step = 0
        self.marks: dict[str, float] = {}
        self.installation: Any = None
        self.counts: dict[str, int] = {}

    def mark(self, name: str) -> None:
        """Note the time after the GPU has ended all that was queued."""
        import torch

        torch.cuda.synchronize()
        self.marks[name] = time.perf_counter()

    def before_step(self) -> None:
        """Called before every step."""
        if self.step == WARM:
            self.mark("replayed from")
        if self.step == self.replayed:
            self.mark("replayed to")
            stats = self.installation.stats()
            self.counts = {"replays": stats.replays.total(), "fallbacks": stats.fallbacks.total()}
            self.counts["pool_bytes"] = self.installation.pool_bytes()
            self.installation.close()
        if self.step == self.replayed + WARM:
            self.mark("eager from")
        self.step += 1

    def result(self) -> dict[str, Any]:
        """Milliseconds of a step of each kind, and counts."""
        self.mark("eager to")
        at = self.marks
        return {
            "replayed_ms": (at["replayed to"] - at["replayed from"]) * 1000 / (self.replayed - WARM),
            "eager_ms": (at["eager to"] - at["eager from"]) * 1000 / (self.eager - WARM),
            **self.counts,
        }


def train(plan: Path, result: Path, script: Path, arguments: Sequence[str]) -> int:
    """Run the pretraining script with its own arguments, by the plan first and then eagerly."""
    sys.path[:0] = [str(script.parent)]
    from megatron.core.utils import get_model_config
    from megatron.training import training

    from thdprof.plan import load_plan
    from thdprof.runtime.megatron import install

    clock = Clock(plan, REPLAYED, EAGER)
    own_setup, own_step, own_train = training.setup_model_and_optimizer, training.train_step, training.train

    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = own_setup(*args, **kwargs)
        clock.installation = install(model, load_plan(plan), get_model_config(model[0]))
        return model, optimizer, scheduler

    def step(*args: Any, **kwargs: Any) -> Any:
        clock.before_step()
        return own_step(*args, **kwargs)

    def whole(*args: Any, **kwargs: Any) -> Any:
        told = own_train(*args, **kwargs)
        result.write_text(json.dumps(clock.result()))
        return told

    training.setup_model_and_optimizer, training.train_step, training.train = setup, step, whole
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    return 0


# --- the benchmark --------------------------------------------------------------------------------------------------


def run(command: Sequence[str], log: Path, *, limit: float) -> float:
    """Seconds that a command took; its output goes to `log`.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=limit,
            cwd=ROOT,
            env={**os.environ, **alone, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{shlex.join(command)[:200]}: exit code {done.returncode}\n{tail}")
    return time.perf_counter() - began


def row_of(model: Model, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Calibrate, analyze and train one model."""
    import yaml

    from thdprof.analyze.settings.launch_script import read_launch
    from thdprof.analyze.settings.shell import read_script
    from thdprof.plan import load_plan

    stem = model.name.lower().replace(" ", "-").replace(",", "")
    script, costs, plan, result = (directory / f"{stem}{end}" for end in (".sh", ".costs.yaml", ".yaml", ".json"))
    text = SCRIPT.format(
        name=model.name,
        model=model.flags,
        tokens=TOKENS,
        batch=MICROBATCHES,
        steps=REPLAYED + EAGER,
        data=directory / "demo" / "megatron" / "documents",
    )
    script.write_text(text)
    assert read_launch(read_script(text, where=str(script))).settings["seq_length"] == TOKENS
    thdprof = [sys.executable, "-m", "thdprof"]
    log = directory / f"{stem}.log"
    seconds = run(
        [*thdprof, "calibrate", "--megatron-args", str(script), "-o", str(costs), "--seconds", str(args.seconds)],
        log,
        limit=200,
    )
    print(log.read_text(errors="replace")[-1500:], file=sys.stderr)
    run(
        [*thdprof, "analyze", "--megatron-args", str(script), "--cost-table", str(costs), "-o", str(plan)],
        log,
        limit=100,
    )
    chosen = load_plan(plan)
    chunked = chosen.model_copy(update={"graphs": chosen.graphs.model_copy(update={"impl": "chunk"})})
    if not chosen.graphs.buckets:  # analyze says that graphs do not pay: the table is tried with a bucket all the same
        chunked = with_bucket(chunked, costs)
    chunked.save(plan, force=True)
    flags = [flag for name in ("MODEL_ARGS", "TRAINING_ARGS", "DATA_ARGS") for flag in _array(text, name)]
    command = [sys.executable, "-W", "ignore", __file__, "--train", str(plan), str(result)]
    run([*command, str(args.megatron_lm.resolve() / "pretrain_gpt.py"), *flags], log, limit=240)
    table = yaml.safe_load(costs.read_text())
    said = {"replayed_ms": chosen.predictions.step_ms, "eager_ms": chosen.predictions.eager_step_ms}
    return {
        "model": model.name,
        "table": table,
        "calibrated_in_s": seconds,
        "predicted": said if chosen.graphs.buckets else predicted(chunked, table),
        "measured": json.loads(result.read_text()),
        "caps": [bucket.max_seqs for bucket in chunked.graphs.buckets],
    }


def with_bucket(plan: Any, costs: Path) -> Any:
    """The plan with one bucket that holds every micro-batch."""
    from thdprof.plan import BucketPart

    bucket = BucketPart(max_seqs=plan.microbatches.n_seqs.max, max_seqlen=TOKENS, share=1.0)
    graphs = plan.graphs.model_copy(update={"buckets": [bucket]})
    return plan.model_copy(update={"graphs": graphs})


def _array(text: str, name: str) -> list[str]:
    return shlex.split(text.partition(f"{name}=(")[2].partition(")")[0])


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


def report(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The results as markdown."""
    stamp = rows[0]["table"]["stamp"]
    lines = [
        "# Steps that a calibrated table predicts, beside measured ones",
        "",
        f"{stamp['gpu']}, {stamp['processor']}; torch {stamp['torch']}, Transformer Engine "
        f"{stamp['transformer_engine']}, cuDNN {stamp['cudnn']}, megatron-core {stamp['megatron_core']}; thdprof "
        f"{importlib.metadata.version('thdprof') if _is_installed() else 'from its tree'}; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/calibrated.py {shlex.join(sys.argv[1:])}`",
        "",
        f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens, {MICROBATCHES} micro-batches a step, demo data; mean of "
        f"{REPLAYED - WARM} replayed and {EAGER - WARM} eager steps of one process.",
        "",
        "| model | step | predicted ms | measured ms | predicted / measured | buckets | calibrated in |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for kind, name in (("replayed_ms", "by the plan"), ("eager_ms", "eager")):
            said, seen = row["predicted"][kind], row["measured"][kind]
            caps = ", ".join(map(str, row["caps"])) if kind == "replayed_ms" else ""
            lines.append(
                f"| {row['model']} | {name} | {said:.1f} | {seen:.1f} | {said / seen:.3f} | {caps} | "
                f"{row['calibrated_in_s']:.0f} s |"
            )
        ratios = [row[who]["replayed_ms"] / row[who]["eager_ms"] for who in ("predicted", "measured")]
        lines.append(
            f"| {row['model']} | by the plan / eager | {ratios[0]:.3f} | {ratios[1]:.3f} | {ratios[0] / ratios[1]:.3f} "
            "| | |"
        )
    lines += ["", "| model | decoder replayed ms | outside ms | optimizer ms | micro-batches replayed, eager |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        table, seen = row["table"], row["measured"]
        replay = ", ".join(f"{point['max_seqs']}: {point['ms']:.1f}" for point in table["replay"])
        lines.append(
            f"| {row['model']} | {replay} | {table['outside_ms']:.1f} | {table['optimizer_ms']:.1f} | "
            f"{seen['replays']}, {seen['fallbacks']} |"
        )
    return "\n".join(lines) + "\n"


def _is_installed() -> bool:
    try:
        importlib.metadata.version("thdprof")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--seconds", type=float, default=55, help="of each calibration")
    parser.add_argument("--models", default="", help="numbers of the models to run, from 1: 1,3 [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    return parser.parse_args()


def main() -> int:
    """Run the models, and write the report after each; a model that fails does not end the others."""
    here = Path(__file__).resolve().parent  # its megatron.py would hide the package of that name
    sys.path[:] = [str(ROOT), *(folder for folder in sys.path if Path(folder).resolve() != here)]
    if sys.argv[1:2] == ["--train"]:
        plan, result, script, *flags = sys.argv[2:]
        return train(Path(plan), Path(result), Path(script), flags)
    args = arguments()
    numbers = [int(n) for n in args.models.split(",")] if args.models else range(1, len(MODELS) + 1)
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "thdprof", "demo", str(directory / "demo")], directory / "demo.log", limit=100)
        for number in numbers:
            try:
                rows.append(row_of(MODELS[number - 1], args, directory))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"{MODELS[number - 1].name}: {error}", file=sys.stderr, flush=True)
                continue
            args.out.write_text(report(rows, args))
            print(report(rows, args), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
