"""Layers of a decoder that run eagerly between the graphs of the others, and are recomputed one by one.

megatron-core's full recompute runs whole layers again in the backward, several of them together where it is told so.
Layers that are graphs keep their activations and are called once each (`recompute.layer_by_layer`); those between them
are recomputed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron import recompute
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.graphs.layer_capture import layers_run


class EagerLayers:
    """The layers outside of graphs that the model recomputes whole."""

    def __init__(self, decoder: Decoder, graphed: Sequence[nn.Module]) -> None:
        """The recomputed layers of `decoder` that are not `graphed`; none where the model recomputes no whole layers.

        Args:
            decoder: the decoder.
            graphed: its layers that are captured.
        """
        self._layers = tuple(layer for layer in recomputed_whole(decoder) if layer not in graphed)
        self._own: tuple[Callable[..., Any], ...] = tuple(layer.forward for layer in self._layers)

    def recomputed(self) -> AbstractContextManager[None]:
        """Inside the block, each of these layers keeps its input alone, and runs again in its backward."""
        return layers_run(self._layers, self._run)

    def _run(self, number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
        own = self._own[number]
        if not hidden.requires_grad:  # a recomputation would then give parameters no gradients
            return own(hidden_states=hidden, **constants)
        return recompute.checkpointed(self._layers[number], lambda given: own(hidden_states=given, **constants), hidden)


def recomputed_whole(decoder: Decoder) -> Sequence[nn.Module]:
    """The layers of a decoder that full recompute runs again: all of them, or the first few by the method `block`."""
    config: Any = getattr(decoder.block, "config", None)
    if not recompute.is_full(config):
        return ()
    layers = decoder.layers
    return layers[: config.recompute_num_layers] if config.recompute_method == "block" else layers
