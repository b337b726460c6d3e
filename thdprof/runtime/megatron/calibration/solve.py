"""From measured times of whole steps to the times of a cost table: pure arithmetic.

A step of K micro-batches is taken to last K x (decoder + outside) + optimizer. Two steps of different K tell the
optimizer's part from a micro-batch's; the decoder alone, replayed, tells the decoder's from what is around it. What
eager steps take more is counted to their decoder, so that the sum is the measured step again. Layers of multi-token
prediction are as many whatever layers were built: what they take longer eagerly is measured apart, and not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    squared = _ms_per_squared_token(measured)
    typical = measured.replay_squared_tokens[cap]

    def decoder(step_ms: float) -> float:
        return (step_ms - optimizer) / count - outside

    replay = {
        n: decoder(ms) - squared * (measured.replay_squared_tokens[n] - typical)
        for n, ms in measured.replay_step_ms.items()
    }
    eager = {n: decoder(ms) for n, ms in measured.eager_step_ms.items()}
    for n, ms in eager.items():
        alike = ms - squared * (measured.eager_squared_tokens[n] - typical)
        if alike + outside <= _BOUND_BY_GPU * (replay[cap] + outside):
            eager[n] = alike
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


def _ms_per_squared_token(measured: Measured) -> float:
    more = measured.long_squared_tokens - measured.equal_squared_tokens
    if more <= 0:
        return 0.0
    return max(0.0, (measured.long_step_ms - measured.equal_step_ms) / measured.microbatches / more)


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
