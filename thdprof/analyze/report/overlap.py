"""The sentence on data-parallel communication that graphs of a few layers hide."""

from __future__ import annotations

from thdprof.analyze.times.overlap import Overlap


def overlap_sentence(overlap: Overlap) -> str:
    """What hides behind graphs of a few layers, at which cost; or that whole chunks are as good."""
    communication = f"{overlap.communication_ms:.1f} ms of data-parallel communication a step"
    if overlap.layers_per_graph is None:
        return f"overlap: {communication}; cutting chunks into graphs of fewer layers would not pay (modelled)"
    layers = "1 layer" if overlap.layers_per_graph == 1 else f"{overlap.layers_per_graph} layers"
    return (
        f"overlap: with --impl chunk, graphs of {layers} hide {overlap.hidden_ms:.1f} of {communication}, and "
        f"launching them costs {overlap.cost_ms:.1f} ms (modelled)"
    )
