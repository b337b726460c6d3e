"""How many layers fit on the GPU, estimated from the arguments before anything is built."""

from __future__ import annotations

from typing import Any

_USABLE = 0.8
"""Share of the GPU's memory that a measurement plans to fill."""
_LIVE_PASSES = 2.2
"""Activations of so many micro-batches are alive at most: a slot's, and one eager pass beside it."""


def layers_that_fit(args: Any, *, vocabulary: int, memory_bytes: int, data_parallel: int, wanted: int) -> int:
    """Layers, at least 1 and at most `wanted`, that train on a GPU of `memory_bytes` by an estimate.

    Args:
        args: parsed arguments.
        vocabulary: rows of the embedding.
        memory_bytes: memory of the GPU that is free.
        data_parallel: ranks that share the optimizer's state where it is distributed.
        wanted: layers of the stage.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    tokens = args.seq_length * args.micro_batch_size // context
    # weights in 2 bytes, main gradients and the master copy with both moments in 4 each
    weight = 2 + 4 + 12 / (data_parallel if args.use_distributed_optimizer else 1)
    tables = 2 if args.untie_embeddings_and_output_weights else 1
    outside = tables * vocabulary * args.hidden_size / tensor * weight + tokens * vocabulary / tensor * 12
    layer = parameters_of_layer(args) * weight + _LIVE_PASSES * saved_bytes_of_layer(args, tokens)
    return max(1, min(wanted, int((memory_bytes * _USABLE - outside) / layer)))


def parameters_of_layer(args: Any) -> float:
    """Parameters of the largest layer on one rank, estimated."""
    hidden, tensor = args.hidden_size, args.tensor_model_parallel_size
    queries, keys = _attention_widths(args)
    gate = 3 if args.swiglu else 2
    attention = hidden * (2 * queries + 2 * keys)
    dense = gate * hidden * _ffn(args)
    if not args.num_experts:
        return float((attention + dense) / tensor)
    width = args.moe_ffn_hidden_size or _ffn(args)
    ranks = (args.expert_model_parallel_size or 1) * (args.expert_tensor_parallel_size or tensor)
    experts = args.num_experts * gate * hidden * width / ranks
    shared = gate * hidden * (args.moe_shared_expert_intermediate_size or 0) / tensor
    return float(attention / tensor + max(dense / tensor, experts + shared))


def saved_bytes_of_layer(args: Any, tokens: int) -> float:
    """Bytes that one layer saves for its backward pass on one rank, estimated."""
    hidden, tensor = args.hidden_size, args.tensor_model_parallel_size
    if args.recompute_granularity == "full" or args.checkpoint_activations:
        return float(2.0 * tokens * 2 * hidden)
    queries, keys = _attention_widths(args)
    gate = 3 if args.swiglu else 2
    wide = 2 * queries + 2 * keys + gate * _ffn(args)
    if args.num_experts:
        width = args.moe_ffn_hidden_size or _ffn(args)
        copies = args.moe_router_topk * (args.moe_expert_capacity_factor or 1.0)
        wide = 2 * queries + 2 * keys + copies * tensor * (gate * width + 3 * hidden)
    narrow = 8 * hidden / (tensor if args.sequence_parallel else 1)
    return float(2.0 * tokens * (narrow + wide / tensor))


def _attention_widths(args: Any) -> tuple[int, int]:
    """Widths of queries and of keys over all heads."""
    heads = args.num_attention_heads
    if args.multi_latent_attention:
        width = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
        return width, heads * args.v_head_dim
    head = args.kv_channels or args.hidden_size // heads
    groups = args.num_query_groups if args.group_query_attention else heads
    return heads * head, groups * head


def _ffn(args: Any) -> int:
    given = args.ffn_hidden_size
    if given is not None:
        return int(given)
    return int(args.hidden_size * (8 / 3 if args.swiglu else 4))
