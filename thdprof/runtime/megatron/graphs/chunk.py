"""`graphs.impl: chunk`: every model chunk's decoder is one graph pair per bucket and slot, replayed from the bank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thdprof.dispatch import Bucket
from thdprof.runtime.call import Call
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.megatron.surroundings import gather_parameters, generators


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank of graphs. Megatron's parameter gathering and gradient reduction go on around it."""

    def _find_generators(self) -> Sequence[torch.Generator]:
        return generators()  # loading a checkpoint replaces them

    def _open(self, call: Call) -> None:
        self._generators = generators()
        if not self._opening_ahead:  # before training all parameters are whole, and hooks must not begin to gather
            gather_parameters(self.module)
        super()._open(call)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        gather_parameters(self.module)
        return super()._replay(bucket, call)

    def close(self) -> None:
        """Free all graphs; the decoder runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        for parameter in self.module.parameters():
            vars(parameter).pop("_cudagraph_wgrad_ready_event", None)
