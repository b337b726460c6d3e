"""Times TRL's SFTTrainer on packed rows: eager, by torch.compile, and by a plan, with the same attention kernels.

    python benchmarks/transformers_sft.py --shape 0.6b --modes eager,compile,plan --steps 30 --out results.jsonl
    python benchmarks/transformers_sft.py --shape moe --lora --modes eager,plan,fused-plan --out results.jsonl

Modes are `eager`; `compile` (SFTConfig's torch_compile); `plan`; `padded`, which pads as the plan says but replays
nothing; `fused-plan` and `fused-padded`, the same two with `PlanCallback(compile=True)`; `start` and `fused-start`,
whose callback has no plan: it makes one, or takes that of an earlier call in --directory. Each runs in a process of its
own, or in one of each GPU of --gpus, on the same made-up documents and random weights; nothing is downloaded. A line of
JSON for each has the median seconds of a step without the first four, the peak of GPU memory, what captures took, what
`thdprof analyze` had predicted, and the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from megatron_lm import learned_documents, run_thdprof

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "head_dim": 8,
        "vocab_size": 512,
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
SAME = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1e6,
        "max_position_embeddings": 40960}  # fmt: skip
ROW = 4096
WARMUP = 4
PLANNED = ("plan", "padded", "fused-plan", "fused-padded")
STARTS = ("start", "fused-start")


def write_rows(
    path: Path, rng: np.random.Generator, lengths: np.ndarray, *, row: int, vocabulary: int, rows: int | None = None
) -> None:
    """Rows as TRL packs `learned_documents` of these lengths; the first ones of them, or all."""
    from datasets import Dataset
    from trl import pack_dataset

    made = learned_documents(rng, min(vocabulary, 1500))
    documents = [made(int(n)).tolist() for n in lengths]
    packed = pack_dataset(Dataset.from_dict({"input_ids": documents}), row, "bfd")
    packed.select(range(len(packed) if rows is None else rows)).to_parquet(str(path))


def write_plan(options: argparse.Namespace) -> None:
    """Write the plan that `thdprof analyze` makes of the packed rows, and its report beside it."""
    directory, report = options.directory, options.directory / "analysis.txt"
    config, settings = directory / "config.json", directory / "settings.yaml"
    config.write_text(json.dumps({**SAME, **SHAPES[options.shape], "tie_word_embeddings": options.shape != "8b"}))
    of_model = {"lora_dim": 16} if options.lora else {}
    if options.lora and options.shape == "moe":
        of_model["lora_target_modules"] = "[linear_qkv, linear_proj]"
    if options.checkpointing:
        of_model |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings.write_text("".join(f"{name}: {value}\n" for name, value in of_model.items()))
    command = [
        *("analyze", directory / "packed.parquet", "--loader", "trainer", "--seed", 42, "--micro-batch-size", 1),
        *("--data-parallel-size", options.gpus, "--seq-length", ROW, "--train-iters", options.steps),
        *("--gradient-accumulation", options.accumulation, "--model", config, "--settings", settings),
        *("--gpu", options.gpu, "-o", directory / "plan.yaml"),
    ]
    report.write_text(run_thdprof([str(word) for word in command]))


def run_mode(options: argparse.Namespace, mode: str) -> dict:
    """Train in this process; what the mode's line of JSON has."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from datasets import Dataset
    from support.trl_training import tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from thdprof.plan import load_plan
    from thdprof.transformers import PlanCallback, attention

    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    kind = {**SAME, **SHAPES[options.shape]}
    directory, processes = options.directory, options.gpus
    rows = Dataset.from_parquet(str(directory / "packed.parquet"))
    config = AutoConfig.for_model(kind.pop("model_type"), **kind, tie_word_embeddings=options.shape != "8b")
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    began, seconds, firsts = [0.0], [], []

    class Clock(TrainerCallback):
        """Keeps the seconds of every step, the GPU waited for at its end."""

        def on_step_begin(self, *args, **kwargs) -> None:
            began[0] = began[0] or time.perf_counter()
            firsts.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs) -> None:
            if gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - began[0])
            began[0] = now

    stats, is_fused = directory / f"{mode}.stats.jsonl", mode.startswith("fused")
    plan, how = None, {"stats": stats, "attention": options.attention, "compile": is_fused}
    if mode in PLANNED:
        plan = load_plan(directory / "plan.yaml")
        # Verified micro-batches also run eagerly, so that timed runs have none
        plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"verify": options.verify})})
        how["replay"] = mode.endswith("plan")
    plan_callback = PlanCallback(plan, **how) if mode in (*PLANNED, *STARTS) else None
    if plan_callback is None:
        attention.register(options.attention)
        model.config._attn_implementation = attention.IMPLEMENTATION
    peft_config = None
    if options.lora:
        from peft import LoraConfig

        adapted = ["q_proj", "k_proj", "v_proj", "o_proj"] if options.shape == "moe" else "all-linear"
        peft_config = LoraConfig(r=16, target_modules=adapted, lora_dropout=0.0)
    arguments = SFTConfig(
        output_dir=str(directory / mode), report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
        max_length=None, padding_free=True, packing=False, dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=1, gradient_accumulation_steps=options.accumulation, max_steps=options.steps,
        gradient_checkpointing=options.checkpointing, bf16=gpu, learning_rate=options.learning_rate,
        torch_compile=mode == "compile",
        train_sampling_strategy=options.sampling, dataloader_drop_last=False, max_grad_norm=1.0,
        use_cpu=not gpu, ddp_backend="gloo" if processes > 1 and not gpu else None,
        dataloader_num_workers=2,
    )  # fmt: skip
    trainer = SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer(),
                         callbacks=[*filter(None, [Clock(), plan_callback])], peft_config=peft_config)  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    counted, last = seconds[WARMUP:] or seconds, plan_callback and plan_callback.last
    if mode in STARTS and last:
        plan = load_plan(directory / mode / "thdprof-plan.yaml")
    predictions = plan.predictions.model_dump(mode="json") if last else {}
    predicted = ("verdict", "times", "step_ms", "eager_step_ms", "peak_memory_bytes", "graph_memory_bytes")
    asked = ("shape", "lora", "checkpointing", "accumulation", "deterministic", "attention")
    return {
        "mode": mode,
        **{name: getattr(options, name) for name in asked},
        "processes": processes,
        "step_s": median(counted),
        "step_s_min": min(counted),
        "step_s_max": max(counted),
        "before_first_step_s": firsts[0] - started,
        "first_step_s": seconds[0],
        "steps": len(seconds),
        "seconds": seconds,
        "total_s": time.perf_counter() - started,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
        "stats": last and {**last.to_dict(), "capture_s": last.capture_s},
        "predicted": plan_callback and {name: predictions.get(name) for name in (*predicted, "capture_seconds")},
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def run_modes(argv: Sequence[str]) -> list[dict]:
    """Run every mode, or, in its process, one; the lines of JSON of those that did not fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--modes", default="eager,compile,plan", help=f"of eager, compile, {', '.join(PLANNED)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--sampling", default="random", help="order in which rows are read, or sequential [random]")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--verify", help="micro-batches of a plan to verify, such as 1/64 [none]")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--gpus", type=int, default=1, help="ranks that train together [1]")
    parser.add_argument("--gpu", default="h200", help="the GPU that is predicted for [h200]")
    parser.add_argument("--directory", type=Path, default=Path("transformers_sft"), help="data and plan are kept here")
    parser.add_argument("--out", type=Path, help="append the lines here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        found = run_mode(options, options.one)
        if int(os.environ.get("RANK", 0)) == 0:
            print("RESULT " + json.dumps(found), flush=True)
        return [found]
    options.directory.mkdir(parents=True, exist_ok=True)
    if not (options.directory / "packed.parquet").exists():
        rng, rows = np.random.default_rng(0), options.steps * options.accumulation * options.gpus + 8
        lengths = np.clip(rng.lognormal(5.5, 1.0, rows * 12).astype(int), 30, ROW)  # half of them shorter than 240
        path, vocabulary = options.directory / "packed.parquet", {**SAME, **SHAPES[options.shape]}["vocab_size"]
        write_rows(path, rng, lengths, row=ROW, vocabulary=vocabulary, rows=rows)
    if {*PLANNED} & {*options.modes.split(",")} and not (options.directory / "plan.yaml").exists():
        write_plan(options)
    launch = [sys.executable]
    if options.gpus > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    results = []
    for mode in options.modes.split(","):
        done = subprocess.run([*launch, __file__, *argv, "--one", mode], capture_output=True, text=True)
        line = next((n for n in done.stdout.splitlines() if n.startswith("RESULT ")), None)
        if line is None:
            print(f"{mode}: failed\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}", flush=True)
            continue
        found = json.loads(line.removeprefix("RESULT "))
        results.append(found)
        print(*(text for text in done.stderr.splitlines() if "thdprof" in text), sep="\n", flush=True)
        shown = {k: v for k, v in found.items() if k not in ("losses", "seconds")}
        print(json.dumps({**shown, "last_loss": found["losses"][-1]}), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return results


def main() -> None:
    """Run what the command line names."""
    run_modes(sys.argv[1:])


if __name__ == "__main__":
    main()
