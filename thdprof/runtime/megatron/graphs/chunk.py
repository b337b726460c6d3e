"""`graphs.impl: chunk`: every model chunk's decoder is replayed from the bank, whole or in groups of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.graphs.layer_groups import WHOLE, layer_groups
from thdprof.runtime.megatron.surroundings import gather_parameters, generators, run_gathering_hooks


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank of graphs. Megatron's parameter gathering and gradient reduction go on around it.

    With `layers_per_graph` they go on between its layers, too: before the graph of a group of layers only the group's
    own parameters are waited for, and after the graph of its backward the reduction of its gradients can start.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], *, layers_per_graph: int | None = None, **options: Any
    ) -> None:
        """Graphs of a decoder.

        Args:
            module: a Decoder; without `layers_per_graph` also another module that calls a decoder.
            buckets: the shapes to capture.
            layers_per_graph: layers of one graph; None: the decoder is one graph.
            options: further arguments of GraphedModule.

        Raises:
            SettingsError: layers of two graphs share a parameter.
            ValueError: as `GraphedModule`.
        """
        groups = WHOLE if layers_per_graph is None else layer_groups(module.block, layers_per_graph)
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
