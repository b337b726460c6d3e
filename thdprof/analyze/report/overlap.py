"""The sentence on data-parallel communication that graphs of a few layers hide."""

from __future__ import annotations

from thdprof.analyze.times.overlap import Overlap


def overlap_sentence(overlap: Overlap) -> str:
    """What graphs of a few layers save of a step, by what and at which cost; or that whole chunks are as good."""
    communication = f"{overlap.communication_ms:.1f} ms of data-parallel communication"
    bandwidth = f"at {overlap.gbps:.0f} GB/s {_basis(overlap)}"
    if overlap.layers_per_graph is None:
        return (
            f"overlap: {communication} a step, {bandwidth}; cutting chunks into graphs of fewer layers would not pay "
            "(modelled)"
        )
    layers = "1 layer" if overlap.layers_per_graph == 1 else f"{overlap.layers_per_graph} layers"
    return (
        f"overlap: with --impl chunk, graphs of {layers} save about {overlap.gained_ms:.1f} ms a step (modelled): "
        f"{overlap.hidden_ms:.1f} of {communication} hide behind computing, and launching costs at most "
        f"{overlap.cost_ms:.1f} ms; {bandwidth}"
    )


def _basis(overlap: Overlap) -> str:
    """Where the bandwidth comes from, and how another one is given."""
    if overlap.gbps_given:
        return "(data_parallel_gbps)"
    links = "of each GPU between hosts" if overlap.across_hosts else "between the GPUs of a host"
    return f"{links} (assumed; data_parallel_gbps in --settings gives another)"
