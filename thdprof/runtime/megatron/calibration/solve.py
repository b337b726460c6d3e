"""From measured times of whole steps to the times of a cost table: pure arithmetic.

A step of K micro-batches is taken to last K x (decoder + outside) + optimizer. Two steps of different K tell the
optimizer's part from a micro-batch's; the decoder alone, replayed, tells the decoder's from what is around it. What
eager steps take more is counted to their decoder, so that the sum is the measured step again. Layers of multi-token
prediction are as many whatever layers were built: what they take longer eagerly is measured apart, and not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_USABLE = 0.8
"""Share of the GPU's memory that a measurement plans to fill."""
_LIVE_PASSES = 2.2
"""Activations of so many micro-batches are alive at most: a slot's, and one eager pass beside it."""


def layers_that_fit(args: Any, *, vocabulary: int, memory_bytes: int, data_parallel: int, wanted: int) -> int:
    """Layers, at least 1 and at most `wanted`, that train on a GPU with `memory_bytes` free, by an estimate.

    `data_parallel` ranks share the optimizer's state where it is distributed; `vocabulary` is the embedding's rows.
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
    return int(args.hidden_size * (8 / 3 if args.swiglu else 4) if given is None else given)


_LEAST_MS = 1e-3
_BOUND_BY_GPU = 1.1
"""An eager micro-batch that takes at most so many times its replay waits for the GPU, as a replay does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of one measurement, of the layers that were built. Times are in milliseconds."""

    microbatches: int
    """Micro-batches of a step."""
    eager_step_ms: Mapping[int, float]
    """Eager steps by their micro-batches' number of documents."""
    replay_step_ms: Mapping[int, float]
    """Replayed steps by the cap."""
    typical_cap: int
    """The cap of the figures below."""
    few_microbatches: int
    """Micro-batches of the short steps, fewer than `microbatches`."""
    few_step_ms: float
    """Replayed steps of few micro-batches."""
    decoder_ms: float
    """One replay of the decoder alone, several queued back to back."""
    eager_squared_tokens: Mapping[int, float]
    """Mean sum of squared document lengths of the eager micro-batches."""
    replay_squared_tokens: Mapping[int, float]
    """Mean sum of squared document lengths of the replayed micro-batches."""
    long_step_ms: float = 0.0
    """Replayed steps of micro-batches with one long document."""
    equal_step_ms: float = 0.0
    """Replayed steps of micro-batches with as many documents of equal length."""
    long_squared_tokens: float = 0.0
    """Sum of squared document lengths of a micro-batch with one long document."""
    equal_squared_tokens: float = 0.0
    """Sum of squared document lengths of a micro-batch with documents of equal length."""
    half_layers: int | None = None
    """Layers of the second measurement of the decoder alone; None where there was none."""
    half_decoder_ms: float = 0.0
    """One replay of `half_layers` layers."""
    eager_predictions_ms: Mapping[int, float] = field(default_factory=dict)
    """What eager steps take longer, by their micro-batches' number of documents, where multi-token prediction is not
    replayed either; `eager_step_ms` then are of steps in which it is."""
    eager_decoder_ms: float = 0.0
    """The decoder alone, eagerly."""
    half_eager_decoder_ms: float = 0.0
    """`half_layers` layers alone, eagerly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The layers and parameters that a table is for, beside those that were measured."""

    measured_layers: int
    """Layers that were built."""
    layers: int
    """Layers of the stage."""
    measured_parameters: int
    """Parameters of one rank that were built."""
    parameters: int
    """Parameters of one rank with all layers of the stage."""
    prediction_layers: int = 0
    """Layers of multi-token prediction, as many whatever layers were built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The times of a cost table, in milliseconds."""

    eager_ms: dict[int, float] = field(default_factory=dict)
    """The decoder of an eager micro-batch, with what is slower around it, by the number of documents."""
    replay_ms: dict[int, float] = field(default_factory=dict)
    """The decoder of a replayed micro-batch, by the cap."""
    outside_ms: float = 0.0
    """Embedding, output layer, loss and replayed layers of multi-token prediction of a micro-batch, with the waits
    around a replay."""
    optimizer_ms: float = 0.0
    """What a step takes besides its micro-batches."""
    ms_per_squared_token: float = 0.0
    """What a micro-batch takes longer for each unit of its sum of squared document lengths."""
    squared_tokens: float = 0.0
    """The sum of squared document lengths that the times are of."""


def solve(measured: Measured, scale: Scale) -> Solved:
    """The times of the stage's layers."""
    count, few, cap = measured.microbatches, measured.few_microbatches, measured.typical_cap
    step = measured.replay_step_ms[cap]
    one = max(_LEAST_MS, (step - measured.few_step_ms) / (count - few))
    one = min(one, step / count)  # else the optimizer would take less than nothing
    optimizer = step - count * one
    outside = max(0.0, one - measured.decoder_ms)
    more = measured.long_squared_tokens - measured.equal_squared_tokens
    squared = max(0.0, (measured.long_step_ms - measured.equal_step_ms) / count / more) if more > 0 else 0.0
    typical = measured.replay_squared_tokens[cap]

    def decoder(step_ms: float) -> float:
        return (step_ms - optimizer) / count - outside

    replay = {
        n: decoder(ms) - squared * (measured.replay_squared_tokens[n] - typical)
        for n, ms in measured.replay_step_ms.items()
    }
    eager = {n: decoder(ms) for n, ms in measured.eager_step_ms.items()}
    for n, ms in eager.items():
        as_typical = ms - squared * (measured.eager_squared_tokens[n] - typical)
        if as_typical + outside <= _BOUND_BY_GPU * (replay[cap] + outside):
            eager[n] = as_typical
    fixed_replay, fixed_eager = _fixed(measured, scale)
    factor = scale.layers / scale.measured_layers
    return Solved(
        eager_ms={
            n: max(_LEAST_MS, fixed_eager + (ms - fixed_eager) * factor)
            + max(0.0, measured.eager_predictions_ms.get(n, 0.0)) / count
            for n, ms in eager.items()
        },
        replay_ms={n: max(_LEAST_MS, fixed_replay + (ms - fixed_replay) * factor) for n, ms in replay.items()},
        outside_ms=outside,
        optimizer_ms=optimizer * scale.parameters / scale.measured_parameters,
        ms_per_squared_token=squared
        * (scale.layers + scale.prediction_layers)
        / (scale.measured_layers + scale.prediction_layers),
        squared_tokens=typical,
    )


def _fixed(measured: Measured, scale: Scale) -> tuple[float, float]:
    """What a replay and an eager pass of the decoder take whatever its layers; 0 where it was not measured."""
    if measured.half_layers is None or scale.layers == scale.measured_layers:
        return 0.0, 0.0

    def at_zero(whole: float, half: float) -> float:
        layers = scale.measured_layers
        a_layer = (whole - half) / (layers - measured.half_layers) if measured.half_layers else 0.0
        return min(max(0.0, whole - a_layer * layers), half)

    return (
        at_zero(measured.decoder_ms, measured.half_decoder_ms),
        at_zero(measured.eager_decoder_ms, measured.half_eager_decoder_ms),
    )
