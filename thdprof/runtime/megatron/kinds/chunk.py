"""`graphs.impl: chunk`: every model chunk's decoder is replayed from the bank, whole or in groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from thdprof.dispatch import Bucket, Shape
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.decoder_surroundings import gather_parameters, generators, run_gathering_hooks
from thdprof.runtime.megatron.refusals import SettingsError


class LayerGroups(NamedTuple):
    """The layers of a decoder in groups, each of which has graphs of its own; empty where all layers are one group."""

    cuts: tuple[nn.Module, ...] = ()
    """The first layer of every group but the first."""
    parts: tuple[tuple[nn.Module, ...], ...] = ()
    """The modules that run in each group, in the decoder's order: the layers and all inside them; in the last group
    also the decoder itself and what it runs after its layers.
    """


def layer_groups(block: Any, layers_per_graph: int) -> LayerGroups:
    """The layers of `block` in groups of `layers_per_graph`; the last group may have fewer.

    Raises:
        SettingsError: two groups share a parameter.
    """
    layers = tuple(block.layers)
    if layers_per_graph >= len(layers):
        return LayerGroups()
    groups = [layers[begin : begin + layers_per_graph] for begin in range(0, len(layers), layers_per_graph)]
    parts = [tuple(part for layer in group for part in layer.modules()) for group in groups]
    inside = {id(part) for group in parts for part in group}
    parts[-1] += tuple(part for part in block.modules() if id(part) not in inside)
    owned = [{id(p) for part in group for p in part.parameters(recurse=False)} for group in parts]
    if len(set().union(*owned)) < sum(map(len, owned)):
        raise SettingsError(
            f"graphs.layers_per_graph is {layers_per_graph}, and layers of two graphs share a parameter: their "
            "gradients would be added up in another order than eagerly; set it to null"
        )
    return LayerGroups(cuts=tuple(group[0] for group in groups[1:]), parts=tuple(parts))


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank of graphs. Megatron's parameter gathering and gradient reduction go on around it.

    With `layers_per_graph` they go on between its layers, too: before the graph of a group of layers only the group's
    own parameters are waited for, and after the graph of its backward the reduction of its gradients can start.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], *, layers_per_graph: int | None = None, **options: Any
    ) -> None:
        """Graphs of a Decoder, with `layers_per_graph` layers each; without it the decoder is one graph, and may be
        another module that calls a decoder.

        Raises:
            SettingsError: layers of two graphs share a parameter.
            ValueError: as `GraphedModule`, which takes the `options`.
        """
        groups = LayerGroups() if layers_per_graph is None else layer_groups(module.block, layers_per_graph)
        super().__init__(module, buckets, cuts=groups.cuts, **options)
        self._groups = groups

    def _find_generators(self) -> Sequence[torch.Generator]:
        return generators()  # loading a checkpoint replaces them

    def _open(self, call: Call) -> None:
        self._generators = generators()
        if not self._opening_ahead:  # before training all parameters are whole, and hooks must not begin to gather
            gather_parameters(self.module)
        super()._open(call)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        if not self._groups.cuts:
            gather_parameters(self.module)
        return super()._replay(bucket, call)

    def _before_piece(self, piece: int) -> None:
        run_gathering_hooks(self._groups.parts[piece])

    def _as_now(self) -> Callable[[], AbstractContextManager[None]]:
        return self.module.as_now() if isinstance(self.module, Decoder) else super()._as_now()

    def close(self) -> None:
        """Free all graphs; the decoder runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        for parameter in self.module.parameters():
            vars(parameter).pop("_cudagraph_wgrad_ready_event", None)


class SizedGraphs(DispatchedModule):
    """What graphs of several context-parallel sizes have in common, of chunks or of single layers.

    At the first micro-batch in training, whatever its shape, every rank captures all sizes in the same order: ranks of
    a group communicate in a capture, and the ranks' first micro-batches are of different sizes.
    """

    decides_jointly = False  # ranks that capture together run micro-batches of several sizes

    def _opens_at(self, shape: Shape) -> bool:
        return bool(self._buckets) and self._options.capture == "startup"

    def _opening(self, call: Call) -> Call:
        """The call that shows shapes to the captures: `call`, with hidden states of the buckets' size."""
        hidden, rest = call.tensors[0], call.tensors[1:]
        tokens = self._buckets[0].n_tokens // self._options.token_shards
        if hidden.shape[self._options.token_dim] == tokens:
            return call
        shape = [*hidden.shape]
        shape[self._options.token_dim] = tokens
        zeros = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device, requires_grad=hidden.requires_grad)
        return call.with_tensors((zeros, *rest))


class SizedChunkGraphs(SizedGraphs, ChunkGraphs):
    """Chunk graphs of several context-parallel sizes."""
