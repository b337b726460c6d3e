"""Small runs of TRL's SFTTrainer on made-up documents: nothing is downloaded."""

from __future__ import annotations

import numpy as np
from datasets import Dataset

VOCABULARY = 64


def documents(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Documents of 1 to `longest` tokens, most of them short."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.12, count) + 1, longest)
    return [rng.integers(1, VOCABULARY, n).tolist() for n in lengths]


def dataset_of(rows: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"input_ids": rows})


def tokenizer():
    """A tokenizer of words "0", "1", ..., of which TRL needs the special tokens alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def small_model(family: str = "qwen3", *, layers: int = 2, seed: int = 0, **changes):
    """A model of a family with random weights, small enough for a processor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if family != "qwen2":
        sizes["head_dim"] = 8
    if family in ("olmoe", "qwen3_moe"):
        sizes |= {"num_experts": 6, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def trainer(
    model,
    train_dataset,
    output_dir,
    *,
    callbacks=(),
    eval_dataset=None,
    peft_config=None,
    processing_class=None,
    **arguments,
):
    """TRL's trainer of `model` with packing, silent, on a processor where there is no GPU."""
    import torch
    from trl import SFTConfig, SFTTrainer

    usual = {
        "output_dir": str(output_dir),
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "packing": True,
        "max_length": 64,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "learning_rate": 1e-3,
    }
    return SFTTrainer(
        model,
        args=SFTConfig(**{**usual, **arguments}),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class or tokenizer(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def losses(run) -> list[float]:
    """The losses that a trainer has logged, one a step."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]
