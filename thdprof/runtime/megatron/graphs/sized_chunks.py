"""Chunk graphs of dynamic context parallelism."""

from __future__ import annotations

from thdprof.runtime.megatron.graphs.chunk import ChunkGraphs
from thdprof.runtime.megatron.graphs.sized import SizedGraphs


class SizedChunkGraphs(SizedGraphs, ChunkGraphs):
    """Chunk graphs of several context-parallel sizes."""
