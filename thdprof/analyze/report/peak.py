"""The sentences on a run's peak memory and on the time of its captures."""

from __future__ import annotations

from thdprof.analyze.predictions import Capture, Memory
from thdprof.analyze.report.words import counted, listed, memory_size


def memory_sentence(memory: Memory) -> str:
    """The peak, its moment and its parts."""
    parts = {
        "weights, gradients and optimizer": memory.state_bytes,
        "graphs": memory.graph_bytes,
        "static buffers": memory.static_bytes,
        beside_slots(memory): memory.eager_bytes,
        "experts behind graphs": memory.experts_bytes,
        "outside the decoder": memory.outside_bytes,
    }
    shown = [f"{memory_size(size / 2**30)} {name}" for name, size in parts.items() if size]
    moments = {
        "training": "in the worst step",
        "capture": "at the last capture, before the optimizer's step",
        "verification": "where a micro-batch is verified",
    }
    return (
        f"peak memory: about {memory_size(memory.peak_bytes / 2**30)} on pipeline rank {memory.pipeline_rank}, "
        f"{moments[memory.moment]}: {listed(shown)}"
    )


def beside_slots(memory: Memory) -> str:
    """What runs eagerly beside the slots at the moment of the peak."""
    if memory.moment == "capture":
        return "a warm-up pass"
    if memory.moment == "verification":
        return "eager run and compared gradients"
    return f"{counted(memory.eager_in_flight, 'eager micro-batch', 'eager micro-batches')} in flight"


def capture_sentence(capture: Capture) -> str:
    """How long the captures take, and of what."""
    low, high = (f"{seconds:.1f}" for seconds in capture.seconds)
    seconds = low if low == high else f"{low} to {high}"
    graphs = counted(capture.graphs, "graph", "graphs")
    return f"capture: {graphs} in {seconds} s, {capture.passes:,} forward and backward passes, once in the run"
