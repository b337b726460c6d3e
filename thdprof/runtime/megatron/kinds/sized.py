"""Graphs of micro-batches of several context-parallel sizes."""

from __future__ import annotations

from dataclasses import replace

import torch

from thdprof.dispatch import Shape
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.megatron.kinds.chunk import ChunkGraphs
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs


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
        args, kwargs = call.substitute((zeros, *rest), call.packed)
        return replace(call, args=tuple(args), kwargs=kwargs, tensors=(zeros, *rest))


class SizedChunkGraphs(SizedGraphs, ChunkGraphs):
    """Chunk graphs of several context-parallel sizes."""


class SizedLayerGraphs(SizedGraphs, LayerGraphs):
    """Graphs of single layers for several context-parallel sizes."""
