"""The forward pass of a micro-batch, with the copies, waits and checks of Megatron-LM's own pretraining scripts.

Those scripts read the longest document back from the GPU and look at the loss of every micro-batch, so that the host
waits for the GPU in places. A step's time depends on these waits as much as on the layers, above all with graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_FIELDS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "max_seqlen", "position_ids")
FIELDS = (*_FIELDS, "tokens", "hybrid_cp_group", "local_cp_size")
"""Names that a micro-batch may hold in Megatron-LM."""

ForwardStep = Callable[[Iterator[dict[str, torch.Tensor]], Any], tuple[torch.Tensor, Any]]


def forward_step_of(args: Any, *, hybrid: bool) -> ForwardStep:
    """The function that Megatron's schedules call for each micro-batch.

    Args:
        args: Megatron's arguments.
        hybrid: whether the model's layers need the document of every token.
    """

    def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = _batch_of_this_rank(args, batches)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=_metadata(args, batch, hybrid=hybrid),
        )
        return output, partial(_loss, args, batch["loss_mask"])

    return forward_step


def _batch_of_this_rank(args: Any, batches: Iterator[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The next micro-batch on the GPU, with this context-parallel rank's share of the tokens."""
    from megatron.core import parallel_state
    from megatron.core.utils import (
        flatten_batch_for_packed_sequences,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(args)  # the scripts make a configuration for every micro-batch; it takes time
    batch: dict[str, Any] = {}
    rank = parallel_state.get_tensor_model_parallel_rank()
    if rank == 0:
        host = next(batches)
        batch = {name: host[name].cuda(non_blocking=True) if name in host else None for name in FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=1,
        is_pipeline_first_stage=True,
        is_pipeline_last_stage=True,
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return dict(
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    )


def _metadata(args: Any, batch: dict[str, Any], *, hybrid: bool) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    valid = batch["cu_seqlens"].squeeze(0)
    padded = batch.get("cu_seqlens_padded")
    padded = None if padded is None else padded.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(valid)
    boundaries = valid if padded is None else padded
    more = {"total_tokens": int(boundaries[-1].item())} if hybrid else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(batch["max_seqlen"].item()),
        max_seqlen_kv=int(batch["max_seqlen"].item()),
        tokens_per_sample=args.seq_length,
        **more,
    )


def _loss(args: Any, mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The summed loss, the number of tokens that count, and both for the log."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    counted = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * counted)
    num_tokens = counted.sum().clone().detach().to(torch.int)
    told = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    if args.check_for_nan_in_loss_and_grad:
        for wrong, message in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=wrong, message=f"the loss is {message}", tolerance=0.0, fatal=True
            )
    return loss, num_tokens, told
