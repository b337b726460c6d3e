"""Data-parallel ranks whose captured passes share collectives, by Megatron's order of ranks."""

from __future__ import annotations

from math import lcm


def shared_capture_ranks(
    *,
    data_parallel_size: int,
    tensor_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    global_aux_loss: bool = False,
) -> int:
    """Number of neighbouring data-parallel ranks that communicate inside captured layers whose experts are padded.

    A pipeline stage's ranks are numbered in blocks of tensor x context parallel size, which share a micro-batch, and
    in blocks of expert-tensor x expert parallel size, which share experts. Ranks are joined as far as the blocks
    overlap. 1 where the sizes do not fit the number of ranks, which Megatron refuses.

    Args:
        data_parallel_size: ranks that train on micro-batches of their own.
        tensor_model_parallel_size: ranks that share each layer's weights.
        context_parallel_size: ranks that share a micro-batch's tokens.
        expert_model_parallel_size: ranks that share the experts.
        expert_tensor_parallel_size: ranks that share one expert; None: tensor_model_parallel_size.
        global_aux_loss: whether routers add up their loads over all data-parallel ranks.
    """
    if global_aux_loss:
        return data_parallel_size
    replica = tensor_model_parallel_size * context_parallel_size
    experts = (expert_tensor_parallel_size or tensor_model_parallel_size) * expert_model_parallel_size
    ranks = lcm(replica, experts) // replica
    return ranks if data_parallel_size % ranks == 0 else 1
