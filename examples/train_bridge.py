"""Trains a small GPT with Megatron-Bridge on packed rows by a plan: one callback more than without.

    thdprof demo demo
    thdprof analyze demo/bridge --seq-length 2048 --global-batch-size 8 --train-iters 50 --pad-to-max-length -o p.yaml
    torchrun --nproc-per-node 1 examples/train_bridge.py --data demo/bridge --plan p.yaml --stats stats.jsonl
    thdprof compare p.yaml stats.jsonl

Nothing is downloaded: the weights are random, and the tokenizer is made here, because Bridge's packed dataset asks it
for the token that ends a document. `--replay off` pads micro-batches as the plan says and runs them eagerly, for a run
to compare with; without `--plan` the run is Bridge's own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch.nn.functional as F
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

PACK_TOKENS = 2048
"""Tokens of a packed row of the demo's data."""
VOCABULARY = 256


def write_tokenizer(directory: Path) -> Path:
    """A tokenizer of numbered words, whose word 0 ends documents."""
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="1")),
        eos_token="0",
        pad_token="0",
        bos_token="0",
        unk_token="1",
    )
    tokenizer.save_pretrained(str(directory))
    return directory


def recipe(data: Path, tokenizer: Path, steps: int) -> ConfigContainer:
    """Bridge's own recipe of a GPT, with a small model and packed rows."""
    config = vanilla_gpt_pretrain_config()
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads = 12, 1024, 16
    model.activation_func, model.gated_linear_unit, model.ffn_hidden_size = F.silu, True, 2816
    model.normalization, model.add_bias_linear, model.position_embedding_type = "RMSNorm", False, "rope"
    model.hidden_dropout = model.attention_dropout = 0.0
    model.seq_length, model.vocab_size, model.gradient_accumulation_fusion = PACK_TOKENS, VOCABULARY, False
    rows = str(next(data.glob("*.parquet")))
    config.dataset = GPTSFTDatasetConfig(
        dataset_root=str(data),
        seq_length=PACK_TOKENS,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=PACK_TOKENS, packed_train_data_path=rows, packed_val_data_path=rows
        ),
        dataset_kwargs={"pad_to_max_length": True},
        do_test=False,
    )
    config.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer))
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = steps, 8, 1
    config.validation.eval_interval, config.validation.eval_iters = max(1, steps // 2), 2
    config.scheduler.lr_warmup_iters = 2
    config.checkpoint.save = config.logger.tensorboard_dir = None
    config.rng.te_rng_tracker = True  # random states that graphs can hold
    return config


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with packed rows")
    parser.add_argument("--plan", type=Path, help="plan to follow; without one, the run is Bridge's own")
    parser.add_argument("--replay", choices=("on", "off"), default="on")
    parser.add_argument("--stats", type=Path, help="file to append the counters to")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    callbacks = []
    if options.plan is not None:
        callbacks.append(ThdprofCallback(options.plan, replay=options.replay == "on", stats=options.stats))
    with tempfile.TemporaryDirectory() as directory:
        config = recipe(options.data, write_tokenizer(Path(directory)), options.steps)
        pretrain(config, forward_step, callbacks=callbacks)


if __name__ == "__main__":
    sys.exit(main())
