"""`graphs.impl: chunk`: every model chunk's decoder is one graph pair per bucket and slot, replayed from the bank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from thdprof.dispatch import Bucket
from thdprof.runtime.call import Call
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.surroundings import gather_parameters, generators


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank of graphs. Megatron's parameter gathering and gradient reduction go on around it."""

    def _open(self, call: Call) -> None:
        self._generators = generators()
        gather_parameters(self.module)
        super()._open(call)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        gather_parameters(self.module)
        return super()._replay(bucket, call)

    def _as_now(self) -> Callable[[], AbstractContextManager[None]]:
        return self.module.as_now() if isinstance(self.module, Decoder) else super()._as_now()

    def close(self) -> None:
        """Free all graphs; the decoder runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        for parameter in self.module.parameters():
            vars(parameter).pop("_cudagraph_wgrad_ready_event", None)
