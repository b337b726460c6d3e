"""Megatron-Bridge's own `pretrain` by a plan, beside the same without thdprof: step times, losses, gradient norms.

    python benchmarks/bridge.py --out benchmarks/results/bridge.md
    python benchmarks/bridge.py --tiny --deterministic          # 4 layers, 512 tokens: every bit must be equal

A GPT of random weights in the shape of Qwen3-0.6B trains on one GPU on rows that Bridge's own writer packed, through
Bridge's own dataset, sampler and collate_fn; nothing is downloaded. Every variant is a process of its own:

    eager            pretrain(config, forward_step): Bridge alone
    replayed         the same line with callbacks=[ThdprofCallback(plan)]
    padded eager     with ThdprofCallback(plan, replay=False): what the replayed losses must equal

Bridge imports packages for images that this training does not use; where they are missing, bridge_standins.py stands
in for them.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_lm as lm
import numpy as np
from support import bridge_standins, conversations

VOCABULARY = 32_000
MICROBATCHES = 8
"""Of a step."""
VARIANTS = ("eager", "replayed", "padded eager")
WARM_UP = 5
"""First steps that are left out of the times: kernels are chosen and graphs are captured in them."""
SHAPE = {
    "num_layers": 28,
    "hidden_size": 1024,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 128,
    "seq_length": 4096,
}
TINY = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "seq_length": 512,
}
"""Fields of GPTModelProvider; `seq_length` is tokens of a micro-batch."""


# --- data and plan --------------------------------------------------------------------------------------------------


def write_rows(path: Path, *, tokens: int, rows: int) -> None:
    """Rows of documents, each stored document one token longer than it trains, as Bridge's packing writes them."""
    from megatron.bridge.data.packing.parquet import write_packed_parquet

    random = np.random.default_rng(1234)
    content = []
    for _ in range(rows):
        lengths: list[int] = []
        while (free := tokens - sum(lengths)) > 0:
            drawn = int(np.clip(np.rint(random.lognormal(np.log(tokens / 32), 1.0)), 8, tokens))
            if drawn > free:
                if len(lengths) > 1 and free < 64:
                    break  # collate_fn makes the rest a tail
                drawn = free
            lengths.append(drawn)
        stored = np.array(lengths) + 1
        content.append(
            {
                "input_ids": random.integers(1, VOCABULARY, int(stored.sum())).tolist(),
                "loss_mask": [1] * int(stored.sum()),
                "seq_start_id": (np.cumsum(stored) - stored).tolist(),
            }
        )
    write_packed_parquet(content, path)
    starts = [np.array([*row["seq_start_id"], len(row["input_ids"])]) for row in content]
    entry = {
        "dataset_max_seqlen": max(int(np.diff(row).max()) - 1 for row in starts),
        "max_samples_per_bin": max(len(row) - 1 for row in starts),
        "min_packed_seqlen": min(int(row[-1]) - len(row) + 1 for row in starts),
    }
    path.with_name("metadata.jsonl").write_text(json.dumps([entry]), encoding="utf-8")


def write_plan(data: Path, plan: Path, *, tokens: int, steps: int) -> str:
    """The plan of `thdprof analyze` for the run; returns the command."""
    command = ["analyze", str(data), "--output", str(plan)]
    command += ["--seq-length", str(tokens), "--global-batch-size", str(MICROBATCHES)]
    command += ["--loader", "batch", "--pad-to-max-length", "--train-samples", str(steps * MICROBATCHES)]
    lm.run_thdprof(command)
    return f"thdprof {shlex.join(command)}".replace(f"{data.parent}/", "")


# --- one variant: Bridge's own recipe and loop ----------------------------------------------------------------------


def recipe(work: Path, arguments: argparse.Namespace) -> Any:
    """The ConfigContainer that every variant trains by."""
    import torch.nn.functional as F
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
    from megatron.bridge.training import config

    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=2, max_lr=1e-4, min_lr=1e-5)
    rows, evaluate = str(work / "rows.idx.parquet"), not arguments.no_evaluation
    shape = TINY if arguments.tiny else SHAPE
    tokens = shape["seq_length"]
    return config.ConfigContainer(
        model=GPTModelProvider(
            **shape,
            qk_layernorm=True,
            normalization="RMSNorm",
            activation_func=F.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            position_embedding_type="rope",
            apply_rope_fusion=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
            share_embeddings_and_output_weights=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            vocab_size=VOCABULARY,
            gradient_accumulation_fusion=False,
            cross_entropy_loss_fusion=not arguments.deterministic,
            use_te_rng_tracker=True,
        ),
        train=config.TrainingConfig(train_iters=arguments.steps, global_batch_size=MICROBATCHES, micro_batch_size=1),
        validation=config.ValidationConfig(
            eval_interval=max(1, arguments.steps // 2) if evaluate else None, eval_iters=2 if evaluate else 0
        ),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=config.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        dataset=GPTSFTDatasetConfig(
            dataset_root=str(work),
            seq_length=tokens,
            seed=1234,
            enable_offline_packing=True,
            offline_packing_specs=PackedSequenceSpecs(
                packed_sequence_size=tokens, packed_train_data_path=rows, packed_val_data_path=rows
            ),
            dataset_kwargs={"pad_to_max_length": True},
            do_validation=evaluate,
            do_test=False,
            num_workers=2,
        ),
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=str(work / "tensorboard")),
        tokenizer=config.TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(work / "tokenizer")
        ),
        checkpoint=config.CheckpointConfig(save=None, load=None, ckpt_format="torch_dist"),
        rng=config.RNGConfig(seed=1234, te_rng_tracker=True),
        mixed_precision="bf16_mixed",
    )


def train(variant: str, work: Path, arguments: argparse.Namespace) -> None:
    """Train in this process and write what every step gave."""
    bridge_standins.stand_in()
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    steps: list[dict[str, float]] = []

    class Recorder(Callback):
        """Keeps every step's loss and gradient norm, exactly."""

        def on_train_step_end(self, context: Any) -> None:
            """Keep them: the loss leaves the GPU here, once a step, in every variant."""
            loss = context.loss_dict["lm loss"]
            steps.append({"loss": float(loss), "grad_norm": float(context.grad_norm)})

    callbacks: list[Any] = [Recorder()]
    if variant != "eager":
        from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

        stats = work / f"stats {variant}.jsonl"
        callbacks.append(ThdprofCallback(work / "plan.yaml", replay=variant != "padded eager", stats=stats))
    try:
        pretrain(recipe(work, arguments), forward_step, callbacks=callbacks)
    finally:
        (work / f"steps {variant}.json").write_text(json.dumps(steps), encoding="utf-8")


# --- all variants, and the report -----------------------------------------------------------------------------------


def run_variant(variant: str, work: Path, *, deterministic: bool) -> lm.Ran:
    """One process for one variant."""
    start, rank = lm.launcher(1)
    environment = {**lm.environment_here(), **rank, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {**lm.EXACT, "NCCL_ALGO": "Ring"} if deterministic else {}
    command = [*start, __file__, *sys.argv[1:], "--variant", variant, "--work", str(work)]
    log, code = lm.run(command, environment, limit=1800)
    kept = work / f"steps {variant}.json"
    steps = json.loads(kept.read_text()) if kept.exists() else []
    scalars = {name: {n: step[name] for n, step in enumerate(steps, 1)} for name in ("loss", "grad_norm")}
    return lm.Ran(code=code, log=log, seconds=0.0, scalars=scalars)


def step_ms(ran: lm.Ran) -> list[float]:
    """Milliseconds of every step, as Bridge logs them."""
    return [float(found) for found in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", ran.log)]


def differing(one: lm.Ran, other: lm.Ran) -> str:
    """How the losses and gradient norms of two variants differ, in words."""
    (losses, steps), (norms, _) = (lm.different_steps(one, other, name) for name in ("loss", "grad_norm"))
    if not steps:
        return "no steps, which cannot be compared"
    if not losses and not norms:
        return f"equal bit for bit in all {steps} steps"
    largest = lm.largest_difference(one, other, "loss")
    return f"{losses} losses and {norms} norms of {steps} steps differ; losses by {largest:.1e} at most"


def report(ran: Mapping[str, lm.Ran], work: Path, arguments: argparse.Namespace, analyzed: str) -> str:
    """The Markdown page."""
    shape = TINY if arguments.tiny else SHAPE
    lines = [["Variant", "Steps", "Median ms a step", "Fastest", "First step", "Last loss"]]
    for name, one in ran.items():
        times, losses = step_ms(one), [*one.scalars["loss"].values()]
        if one.code or not times[WARM_UP:]:
            lines.append([name, f"exit code {one.code} after {len(losses)} steps: {one.error}", "", "", "", ""])
            continue
        middle, least = statistics.median(times[WARM_UP:]), min(times[WARM_UP:])
        lines.append([name, str(len(times)), f"{middle:.1f}", f"{least:.1f}", f"{times[0]:.0f}", repr(losses[-1])])
    sentences = []
    for one, other, words in (
        ("replayed", "padded eager", "Losses and gradient norms, replayed beside padded eager"),
        ("padded eager", "eager", "Padded eager beside eager"),
    ):
        if {one, other} <= {*ran}:
            sentences.append(f"{words}: {differing(ran[one], ran[other])}.")
    counters = [path for name in ran if (path := work / f"stats {name}.jsonl").exists()]
    page = [
        *lm.heading("Megatron-Bridge's pretrain by a plan", "megatron-bridge", "transformers"),
        f"{shape['num_layers']} layers, hidden {shape['hidden_size']}, {shape['seq_length']} tokens, {MICROBATCHES} "
        f"micro-batches a step, bf16, {'deterministic kernels, ' if arguments.deterministic else ''}random weights. "
        f"The plan: `{analyzed}`",
        *("", *lm.table(lines), "", *sentences, ""),
        *(f"Counters of {path.stem}: `{path.read_text().strip().splitlines()[-1]}`" for path in counters),
    ]
    return "\n".join(page) + "\n"


def main() -> int:
    """Run every variant, or, in its process, one."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tiny", action="store_true", help="4 layers and 512 tokens")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--deterministic", action="store_true", help="deterministic kernels only")
    options.add_argument("--no-evaluation", action="store_true", help="no evaluation amid training")
    options.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    options.add_argument("--out", type=Path, help="write the page here, too")
    options.add_argument("--variant", help=argparse.SUPPRESS)
    options.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.variant:
        train(arguments.variant, arguments.work, arguments)
        return 0
    tokens = (TINY if arguments.tiny else SHAPE)["seq_length"]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        print(f"stood in for: {', '.join(bridge_standins.stand_in()) or 'nothing'}", flush=True)
        write_rows(work / "rows.idx.parquet", tokens=tokens, rows=max(200, arguments.steps * MICROBATCHES))
        conversations.write_tokenizer(work / "tokenizer", pad_token="</s>")
        analyzed = write_plan(work / "rows.idx.parquet", work / "plan.yaml", tokens=tokens, steps=arguments.steps)
        ran = {}
        for variant in arguments.variants.split(","):
            ran[variant] = run_variant(variant, work, deterministic=arguments.deterministic)
            tail = "\n".join(ran[variant].log.splitlines()[-40:]) if ran[variant].code else ""
            print(f"{variant}: exit code {ran[variant].code}, ms a step {step_ms(ran[variant])}\n{tail}", flush=True)
            print(f"  {ran[variant].scalars}", flush=True)
        page = report(ran, work, arguments, analyzed)
    print(page)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    return 1 if any(one.code for one in ran.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
