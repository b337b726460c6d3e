"""Megatron-Bridge's own `pretrain` by a plan, beside the same without thdprof: step times, losses, gradient norms.

    python benchmarks/bridge.py --out benchmarks/results/bridge.md
    python benchmarks/bridge.py --tiny --deterministic          # 4 layers, 512 tokens: every bit must be equal

A GPT of random weights in the shape of Qwen3-0.6B trains on one GPU on rows that Bridge's own writer packed, through
Bridge's own dataset, sampler and collate_fn; nothing is downloaded. Every variant is a process of its own:

    eager            pretrain(config, forward_step): Bridge alone
    replayed         the same line with callbacks=[ThdprofCallback(plan)]
    padded eager     with ThdprofCallback(plan, replay=False): what the replayed losses must equal
    resumed          replayed, ended in the middle by train.exit_interval with an asynchronous checkpoint, and resumed
                     in a second process: what an uninterrupted replayed run must equal
    stock SETTING    without thdprof, by Bridge's own model.cuda_graph_impl (local, transformer_engine or
                     full_iteration), with boundaries padded to one length by pad_cu_seqlens, as it asks for

The last two run only if --variants names them. With --adapters the model is frozen and its adapters train: Bridge loads
the weights from a checkpoint, which a run of one step makes first.

Bridge imports packages for images that this training does not use; where they are missing, bridge_standins.py stands
in for them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # megatron.py beside this is no package

import numpy as np  # noqa: E402

ROOT = HERE.parent
VOCABULARY = 32_000
MICROBATCHES = 8
"""Of a step."""
VARIANTS = ("eager", "replayed", "padded eager")
PRETRAINED = "pretrained"
"""The run of one step, and its folder, whose checkpoint has the weights below adapters."""
STOCK = "stock "
"""In names of variants with Bridge's own graphs."""
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "nvidia-modelopt")
WARM_UP = 5
"""First steps that are left out of the times: kernels are chosen and graphs are captured in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model and its micro-batches."""

    layers: int = 28
    hidden: int = 1024
    ffn: int = 3072
    heads: int = 16
    groups: int = 8
    kv_channels: int = 128
    tokens: int = 4096
    """Of a micro-batch."""


TINY = Shape(layers=4, hidden=256, ffn=512, heads=4, groups=2, kv_channels=64, tokens=512)


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


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of numbered words, so that nothing is downloaded; Bridge's datasets ask it for its end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1, **{str(number): number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>", bos_token="<eos>"
    )
    fast.save_pretrained(str(directory))


def write_plan(data: Path, plan: Path, *, shape: Shape, steps: int) -> str:
    """The plan of `thdprof analyze` for the run; returns the command."""
    command = [sys.executable, "-m", "thdprof", "analyze", str(data), "--output", str(plan)]
    command += ["--seq-length", str(shape.tokens), "--global-batch-size", str(MICROBATCHES)]
    command += ["--loader", "batch", "--pad-to-max-length", "--train-samples", str(steps * MICROBATCHES)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{shlex.join(command)}:\n{run.stdout}\n{run.stderr}")
    return shlex.join(["python", *command[1:]]).replace(f"{data.parent}/", "")


# --- one variant: Bridge's own recipe and loop ----------------------------------------------------------------------


def recipe(
    work: Path,
    *,
    shape: Shape,
    steps: int,
    evaluate: bool,
    deterministic: bool,
    until: int | None = None,
    peft: Any = None,
) -> Any:
    """The ConfigContainer that every variant trains by; with `until` it saves there, and resumes what was saved; with
    `peft` it trains adapters over the weights in `work / PRETRAINED`.
    """
    import torch.nn.functional as F
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
    from megatron.bridge.training import config

    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=2, max_lr=1e-4, min_lr=1e-5)
    rows = str(work / "rows.idx.parquet")
    return config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_query_groups=shape.groups,
            kv_channels=shape.kv_channels,
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
            seq_length=shape.tokens,
            vocab_size=VOCABULARY,
            gradient_accumulation_fusion=False,
            cross_entropy_loss_fusion=not deterministic,
            use_te_rng_tracker=True,
        ),
        train=config.TrainingConfig(
            train_iters=steps, global_batch_size=MICROBATCHES, micro_batch_size=1, exit_interval=until
        ),
        validation=config.ValidationConfig(
            eval_interval=max(1, steps // 2) if evaluate else None, eval_iters=2 if evaluate else 0
        ),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=config.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        dataset=GPTSFTDatasetConfig(
            dataset_root=str(work),
            seq_length=shape.tokens,
            seed=1234,
            enable_offline_packing=True,
            offline_packing_specs=PackedSequenceSpecs(
                packed_sequence_size=shape.tokens, packed_train_data_path=rows, packed_val_data_path=rows
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
        checkpoint=config.CheckpointConfig(
            save=str(work / "checkpoints") if until else None,
            load=str(work / "checkpoints") if until else None,
            save_interval=until,
            async_save=until is not None,
            ckpt_format="torch_dist",
            pretrained_checkpoint=str(work / PRETRAINED) if peft is not None else None,
        ),
        peft=peft,
        rng=config.RNGConfig(seed=1234, te_rng_tracker=True),
        mixed_precision="bf16_mixed",
    )


def with_own_graphs(configuration: Any, setting: str, metadata: Path) -> None:
    """Let Bridge capture graphs itself, with what its checks ask for."""
    configuration.model.cuda_graph_impl = setting
    specs = configuration.dataset.offline_packing_specs
    specs.pad_cu_seqlens, specs.packed_metadata_path = True, str(metadata)
    configuration.rerun_state_machine.check_for_nan_in_loss = setting != "full_iteration"
    configuration.ddp.check_for_nan_in_grad = setting != "full_iteration"


def adapters(kind: str) -> Any:
    """Bridge's adapters of a kind; their second matrix is not zero at the start, so that both get a gradient."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    kinds = {"lora": LoRA, "dora": DoRA, "canonical": CanonicalLoRA}
    return kinds[kind](dim=8, dropout=0.1, lora_B_init_method="xavier")


def stand_in() -> list[str]:
    """Stand in for missing packages; returns their names."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import bridge_standins

    return bridge_standins.stand_in()


def train(variant: str, work: Path, arguments: argparse.Namespace) -> None:
    """Train in this process and write what every step gave."""
    stand_in()
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    resumes, kept = variant == "resumed", work / f"steps {variant}.json"
    steps: list[dict[str, float]] = json.loads(kept.read_text()) if resumes and kept.exists() else []

    class Recorder(Callback):
        """Keeps every step's loss and gradient norm, exactly."""

        def on_train_step_end(self, context: Any) -> None:
            """Keep them: the loss leaves the GPU here, once a step, in every variant."""
            loss = context.loss_dict["lm loss"]
            steps.append({"loss": float(loss), "grad_norm": float(context.grad_norm)})

    callbacks: list[Any] = [Recorder()]
    if variant not in ("eager", PRETRAINED) and not variant.startswith(STOCK):
        from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

        stats = work / f"stats {variant}.jsonl"
        callbacks.append(ThdprofCallback(work / "plan.yaml", replay=variant != "padded eager", stats=stats))
    shape = TINY if arguments.tiny else Shape()
    until = max(1, arguments.steps // 2) if resumes else 1 if variant == PRETRAINED else None
    configuration = recipe(
        work,
        shape=shape,
        steps=arguments.steps,
        evaluate=not arguments.no_evaluation,
        deterministic=arguments.deterministic,
        until=until,
        peft=adapters(arguments.adapters) if arguments.adapters and variant != PRETRAINED else None,
    )
    if variant == PRETRAINED:
        configuration.checkpoint.save, configuration.checkpoint.load = str(work / PRETRAINED), None
        configuration.checkpoint.async_save = False
    if variant.startswith(STOCK):
        with_own_graphs(configuration, variant.removeprefix(STOCK), work / "metadata.jsonl")
    try:
        pretrain(configuration, forward_step, callbacks=callbacks)
    finally:
        kept.write_text(json.dumps(steps), encoding="utf-8")


# --- all variants, and the report -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one variant's process gave."""

    variant: str
    code: int
    step_ms: list[float]
    """Of every step, as Bridge's own log line says."""
    steps: list[dict[str, float]]
    stats: str
    """The last line of its statistics file."""
    tail: str
    """Last lines of its output, where it failed."""

    @property
    def error(self) -> str:
        """The error that ended it, as far as its last lines tell."""
        errors = re.findall(r"^(?:\[rank0\]: )?(\w*(?:Error|Exception)\b.*)$", self.tail, re.MULTILINE)
        return errors[-1].replace("|", "/")[:200] if errors else "see its output"


def run_variant(variant: str, work: Path, argv: list[str], *, deterministic: bool) -> Ran:
    """One process for one variant; its output goes to a file."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1", "RANK": "0"}
    environment |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": str(29600 + len(variant))}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if deterministic:
        environment |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment["NCCL_ALGO"] = "Ring"
    log = work / f"log {variant}.txt"
    command = [sys.executable, "-W", "ignore", __file__, "--variant", variant, "--work", str(work), *argv]
    code = 0
    with log.open("w", encoding="utf-8") as out:
        for _ in range(2 if variant == "resumed" else 1):
            code = (
                code
                or subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=work).returncode
            )
    text = log.read_text(encoding="utf-8", errors="replace")
    steps_file, stats_file = work / f"steps {variant}.json", work / f"stats {variant}.jsonl"
    return Ran(
        variant=variant,
        code=code,
        step_ms=[float(found) for found in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)],
        steps=json.loads(steps_file.read_text()) if steps_file.exists() else [],
        stats=stats_file.read_text().strip().splitlines()[-1] if stats_file.exists() else "",
        tail="" if code == 0 else "\n".join(text.splitlines()[-40:]),
    )


def differing(one: Ran, other: Ran) -> str:
    """How the losses and gradient norms of two variants differ, in words."""
    if not one.steps or len(one.steps) != len(other.steps):
        return f"{len(one.steps)} and {len(other.steps)} steps, which cannot be compared"
    pairs = list(zip(one.steps, other.steps, strict=True))
    unequal = [step for step, (a, b) in enumerate(pairs, 1) if a != b]
    if not unequal:
        return f"equal bit for bit in all {len(pairs)} steps"
    largest = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    return f"{len(unequal)} of {len(pairs)} steps differ, first step {unequal[0]}; losses by {largest:.1e} at most"


def report(ran: list[Ran], *, shape: Shape, arguments: argparse.Namespace, analyzed: str) -> str:
    """The Markdown page."""
    import torch

    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [
        "# Megatron-Bridge's pretrain by a plan",
        "",
        f"{datetime.date.today()}, one {gpu}, Python {sys.version.split()[0]}, {versions}.",
        f"Command: `{shlex.join(['python', 'benchmarks/bridge.py', *sys.argv[1:]])}`",
        "",
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.tokens} tokens a micro-batch, {MICROBATCHES} "
        f"micro-batches a step, bf16, {'deterministic kernels, ' if arguments.deterministic else ''}random weights"
        f"{f', frozen below adapters ({arguments.adapters})' if arguments.adapters else ''}. "
        f"The plan: `{analyzed}`",
        "",
        "| Variant | Steps | Median ms a step | Fastest | First step | Last loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in ran:
        timed = one.step_ms[WARM_UP:]
        if one.code or not timed:
            lines.append(f"| {one.variant} | exit code {one.code} after {len(one.steps)} steps: {one.error} | | | | |")
            continue
        lines.append(
            f"| {one.variant} | {len(one.step_ms)} | {statistics.median(timed):.1f} | {min(timed):.1f} | "
            f"{one.step_ms[0]:.0f} | {one.steps[-1]['loss']!r} |"
        )
    by_name = {one.variant: one for one in ran}
    lines.append("")
    if {"replayed", "padded eager"} <= set(by_name):
        told = differing(by_name["replayed"], by_name["padded eager"])
        lines.append(f"Losses and gradient norms, replayed beside padded eager: {told}.")
    if {"replayed", "resumed"} <= set(by_name):
        lines.append(f"Resumed beside uninterrupted: {differing(by_name['resumed'], by_name['replayed'])}.")
    if {"eager", "padded eager"} <= set(by_name):
        lines.append(f"Padded eager beside eager: {differing(by_name['padded eager'], by_name['eager'])}.")
    lines += ["", *(f"Counters of {one.variant}: `{one.stats}`" for one in ran if one.stats)]
    return "\n".join(lines) + "\n"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def parser() -> argparse.ArgumentParser:
    """The options."""
    of_benchmark = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_benchmark.add_argument("--tiny", action="store_true", help="4 layers and 512 tokens")
    of_benchmark.add_argument("--steps", type=int, default=40)
    of_benchmark.add_argument("--deterministic", action="store_true", help="deterministic kernels only")
    of_benchmark.add_argument("--no-evaluation", action="store_true", help="no evaluation amid training")
    of_benchmark.add_argument(
        "--adapters", choices=("lora", "dora", "canonical"), help="freeze the model, and train these over it"
    )
    of_benchmark.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    of_benchmark.add_argument("--out", type=Path, help="write the page here, too")
    of_benchmark.add_argument("--variant", help=argparse.SUPPRESS)
    of_benchmark.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return of_benchmark


def main() -> int:
    """Run every variant, or, in its process, one."""
    arguments = parser().parse_args()
    if arguments.variant:
        train(arguments.variant, arguments.work, arguments)
        return 0
    shape = TINY if arguments.tiny else Shape()
    flags = ["--steps", str(arguments.steps)]
    flags += [
        f"--{name}" for name in ("tiny", "deterministic", "no-evaluation") if vars(arguments)[name.replace("-", "_")]
    ]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        print(f"stood in for: {', '.join(stand_in()) or 'nothing'}", flush=True)
        write_rows(work / "rows.idx.parquet", tokens=shape.tokens, rows=max(200, arguments.steps * MICROBATCHES))
        write_tokenizer(work / "tokenizer")
        analyzed = write_plan(work / "rows.idx.parquet", work / "plan.yaml", shape=shape, steps=arguments.steps)
        ran = []
        if arguments.adapters:
            flags += ["--adapters", arguments.adapters]
            before = run_variant(PRETRAINED, work, flags, deterministic=arguments.deterministic)
            print(f"{PRETRAINED}: exit code {before.code}\n{before.tail}", flush=True)
        for variant in arguments.variants.split(","):
            ran.append(run_variant(variant, work, flags, deterministic=arguments.deterministic))
            times = [round(ms) for ms in ran[-1].step_ms]
            print(f"{variant}: exit code {ran[-1].code}, ms a step {times}\n{ran[-1].tail}", flush=True)
            for number, step in enumerate(ran[-1].steps, 1):
                print(f"  {variant} step {number}: loss {step['loss']!r} grad norm {step['grad_norm']!r}")
        page = report(ran, shape=shape, arguments=arguments, analyzed=analyzed)
    print(page)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    return 1 if any(one.code for one in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
