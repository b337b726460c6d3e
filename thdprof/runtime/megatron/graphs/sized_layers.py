"""Layer graphs of dynamic context parallelism."""

from __future__ import annotations

from thdprof.runtime.megatron.graphs.sized import SizedGraphs
from thdprof.runtime.megatron.graphs.transformer_engine import LayerGraphs


class SizedLayerGraphs(SizedGraphs, LayerGraphs):
    """Graphs of single layers for several context-parallel sizes."""
