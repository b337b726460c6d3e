"""Pretrains a model of Megatron's own arguments through `megatron.training.pretrain`, as Megatron-LM's scripts do.

    python -m thdprof.run --plan plan.yaml tests/support/pretrain.py --record run.jsonl MEGATRON'S ARGUMENTS

It calls what pretrain_gpt.py and pretrain_hybrid.py of Megatron-LM call, in their order, and imports the functions that
form a micro-batch by name as they do. The last rank records every step's loss and gradient norm, exactly, with digests
of what the step left behind, and at the end what the run's graphs hold.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

sys.path.append(str(Path(__file__).resolve().parents[1]))

from support.adapters import KINDS, adapters
from thdprof.runtime.megatron import Installation

KEYS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask")
KEYS += ("max_seqlen", "position_ids", "tokens")
"""Names of a micro-batch's parts in Megatron."""


def get_batch(batches: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> dict[str, Any]:
    """The next micro-batch on the GPU: this rank's share of the tokens, and the boundaries of all of them."""
    args, batch = get_args(), {}
    tp_rank = groups.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert batches is not None
        batch = next(batches)
        for key in KEYS:
            batch[key] = batch[key].cuda(non_blocking=True) if batch.get(key) is not None else None
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=groups.get_tensor_model_parallel_src_rank(),
        broadcast_group=groups.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),  # on the one stage that such a run has here
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=groups.is_pipeline_first_stage(),
        is_pipeline_last_stage=groups.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not is_first_or_last_pipeline_stage(vp_stage):
        boundaries = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return {key: batch[key] if key in boundaries else None for key in KEYS}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=groups.get_context_parallel_group(),
        use_per_sequence_balancing=True,
    )


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """The forward pass of a micro-batch, and what makes the loss of its output."""
    args, batch = get_args(), get_batch(batches, get_attr_wrapped_model(model, "vp_stage"))
    boundaries = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(boundaries)
    longest = int(batch["max_seqlen"].item())
    metadata = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=args.seq_length,
        total_tokens=int(boundaries[-1].item()) if args.hybrid_layer_pattern else None,
    )
    mask = batch["loss_mask"]
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask, packed_seq_params=metadata
    )
    return output, partial(token_loss, mask)


def token_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The summed loss, the tokens that count, and both for the log, after Megatron's check of the loss."""
    counted = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * counted)
    num_tokens = counted.sum().clone().detach().to(torch.int)
    for wrong in (torch.isnan, torch.isinf):
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=wrong, message=f"{wrong.__name__} of the loss", tolerance=0.0, fatal=True
        )
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def datasets(numbers: list[int | None], vp_stage: int | None = None) -> list[Any]:
    """Megatron's datasets for training, validation and test, with masks between documents."""
    args = get_args()
    blend, of_splits = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=of_splits,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    reads = groups.get_tensor_model_parallel_rank() == 0
    wanted = reads and is_first_or_last_pipeline_stage(vp_stage)
    return BlendedMegatronDatasetBuilder(GPTDataset, numbers, lambda: wanted, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def record(path: Path) -> None:
    """Write a line for every step of this process's training, and one for its graphs before they are closed."""
    sys.path.append(str(Path(__file__).parent))
    from training_states import digests

    step_of, close = training.train_step, Installation.close

    def write(**told: Any) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")

    def train_step(*args: Any, **kwargs: Any) -> Any:
        told = step_of(*args, **kwargs)
        loss = float(told[0]["lm loss"]).hex() if told[0] else None
        write(loss=loss, grad_norm=float(told[5]).hex(), states=digests(args[2]))
        return told

    def close_installation(self: Installation) -> None:
        names = ("pool_bytes", "host_bytes", "offload_freed_bytes")
        sizes = {name: getattr(self, name)() for name in names}
        behind = self.prediction_stats()
        captures = sum(stats.captures for stats in (self.stats(), *behind))
        predicting = [stats.replays.total() for stats in behind]
        peak_bytes = torch.cuda.max_memory_reserved()
        write(captures=captures, predicting=predicting, peak_bytes=peak_bytes, **sizes)
        close(self)

    training.train_step, Installation.close = train_step, close_installation  # type: ignore[method-assign]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's own arguments."""
    parser.add_argument("--record", type=Path, help="file for a JSON line of every step")
    parser.add_argument("--adapters", choices=KINDS, help="freeze the model, and train Megatron-Bridge's adapters")
    parser.add_argument("--adapters-dropout", type=float, default=0.0, help="dropout of the adapters [0]")
    parser.add_argument("--switch-on", nargs="+", default=[], help="fields of TransformerConfig without an argument")
    return parser


def main() -> None:
    """Train by the command line."""
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    if args.record is not None:
        record(args.record)
    # the wheel of megatron-core has its helpers compiled and no Makefile; the cores of a machine are its owner's
    dataset_utils.compile_helpers = lambda: None
    pipeline_utils.set_ideal_affinity_for_current_gpu = lambda: None
    model = (hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args)(args)
    for field in args.switch_on:
        assert getattr(model.transformer, field) is False, field
        setattr(model.transformer, field, True)
    if args.adapters is not None:
        peft = adapters(args.adapters, dim=8, dropout=args.adapters_dropout, lora_B_init_method="normal")
        model.pre_wrap_hooks.append(partial(peft, training=True))
    pretrain(pretrain_cfg_container_from_args(args, model), datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
