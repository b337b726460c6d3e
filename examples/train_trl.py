"""Fine-tunes by a plan with TRL's SFTTrainer, on rows that TRL has packed; the weights are random and tokens made up.

thdprof demo demo
thdprof analyze demo/trl --loader trainer --gradient-accumulation 4 --train-iters 20 -o plan.yaml
python examples/train_trl.py --plan plan.yaml --stats stats.jsonl demo/trl/packed.parquet
thdprof compare plan.yaml stats.jsonl

Without a GPU the same run is eager: `compare` tells what would have been replayed, and exits with 3. On several GPUs
start it with `torchrun --nproc-per-node N`, and analyse with `--data-parallel-size N`. `--replay off` pads as the plan
says but runs eagerly, for a run to compare with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from thdprof.errors import ThdprofError
from thdprof.plan import Plan, load_plan
from thdprof.transformers import PlanCallback

FAMILIES = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="parquet of packed rows, with input_ids and seq_lengths")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--stats", type=Path, help="append the counters to this file")
    parser.add_argument("--replay", choices=("on", "off"), default="on")
    parser.add_argument("--attention", choices=("auto", "flash_attn", "torch", "transformer_engine"), default="auto")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--output", type=Path, default=Path("trl_output"))
    return parser.parse_args(argv)


def make_model(options: argparse.Namespace, vocabulary: int, longest: int) -> torch.nn.Module:
    """A small model with random weights; a real run loads one by its name, in bfloat16."""
    config = AutoConfig.for_model(
        options.family,
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 2),
        max_position_embeddings=longest,
        **({} if options.family == "qwen2" else {"head_dim": options.hidden // options.heads}),
    )
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of numbers, of which TRL needs the special tokens alone: the rows hold tokens already."""
    words = Tokenizer(WordLevel({str(n): n for n in range(vocabulary)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def trainer_arguments(options: argparse.Namespace, plan: Plan) -> SFTConfig:
    """The arguments of the run that the plan was made for. Rows that are packed already are not packed again."""
    run = plan.training
    return SFTConfig(
        output_dir=str(options.output),
        padding_free=True,
        packing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=run.num_microbatches,
        max_steps=-1 if run.train_samples is None else run.train_samples // run.global_batch_size,
        num_train_epochs=run.train_epochs or 1,
        data_seed=run.seed,
        dataloader_drop_last=run.drop_last,
        gradient_checkpointing=options.checkpointing,
        bf16=torch.cuda.is_available(),
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )


def train(options: argparse.Namespace) -> None:
    """Train, and print what was observed."""
    plan, rows = load_plan(options.plan), Dataset.from_parquet(str(options.data))
    vocabulary = 1 + max(max(row) for row in rows["input_ids"])
    more: dict[str, Any] = {}
    if options.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    callback = PlanCallback(plan, replay=options.replay == "on", stats=options.stats, attention=options.attention)
    trainer = SFTTrainer(
        make_model(options, vocabulary, plan.training.seq_length), args=trainer_arguments(options, plan),
        train_dataset=rows, processing_class=make_tokenizer(vocabulary), callbacks=[callback], **more,
    )  # fmt: skip
    trainer.train()
    print(callback.last)


def main(argv: list[str] | None = None) -> None:
    """Train; an error that the user can mend ends it in one line."""
    try:
        train(arguments(argv))
    except ThdprofError as error:
        print(f"train_trl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
