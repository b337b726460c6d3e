"""The memory that a forward and a backward of some layers reserve, by the model of torch's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from thdprof.analyze.buckets.saved_tensors import Saved
from thdprof.offload.allocator import Gradients, Segments, reserved


def pass_bytes(layers: Sequence[Sequence[Saved]], n_tokens: int) -> int:
    """Bytes that one forward and backward of `layers` reserve: saved tensors, and gradients during the backward.

    Args:
        layers: what each layer saves.
        n_tokens: tokens of the micro-batch on one context-parallel rank.
    """
    return reserved(partial(_reserved, [_bytes(layer, n_tokens) for layer in layers]))


def saved_bytes(layers: Sequence[Sequence[Saved]], n_tokens: int) -> int:
    """Bytes that `layers` keep between the forward and the backward of a micro-batch."""
    return sum(nbytes for layer in layers for nbytes, recomputed in _bytes(layer, n_tokens) if not recomputed)


def _bytes(layer: Sequence[Saved], n_tokens: int) -> list[tuple[int, bool]]:
    return [(round(one.bytes_per_token * n_tokens), one.recomputed) for one in layer]


def _reserved(layers: Sequence[Sequence[tuple[int, bool]]], shared: bool) -> int:
    """Bytes that the allocator reserves.

    Args:
        layers: size of each storage of each layer, and whether the backward makes it again.
        shared: whether requests share segments (see `Segments`).
    """
    segments = Segments(shared=shared)
    gradients = Gradients(segments)

    def take(layer: int) -> list[int]:
        """Allocate what the layer keeps no longer than its own pass; returns these positions."""
        made = [place for place, (_, recomputed) in enumerate(layers[layer]) if recomputed]
        for place in made:
            segments.take((layer, place), layers[layer][place][0])
        return made

    for number, layer in enumerate(layers):
        for place, (nbytes, recomputed) in enumerate(layer):
            if not recomputed:
                segments.take((number, place), nbytes)
        for place in take(number):
            segments.give_back((number, place))
    for number in reversed(range(len(layers))):
        take(number)
        for place in reversed(range(len(layers[number]))):
            gradients.take(layers[number][place][0])
            segments.give_back((number, place))
    return segments.reserved_bytes
