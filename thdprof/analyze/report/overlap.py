"""The sentence on data-parallel communication that graphs of a few layers hide."""

from __future__ import annotations

from thdprof.analyze.predictions import Overlap


def overlap_sentence(overlap: Overlap) -> str:
    """What graphs of a few layers save of a step; or that whole chunks are as good."""
    communication = (
        f"{overlap.communication_ms:.1f} ms of data-parallel communication at {overlap.gbps:.0f} GB/s {_basis(overlap)}"
    )
    if overlap.layers_per_graph is None:
        return (
            "overlap: cutting chunks into graphs of fewer layers would not pay (modelled), out of a step's "
            f"{communication}"
        )
    layers = "1 layer" if overlap.layers_per_graph == 1 else f"{overlap.layers_per_graph} layers"
    return f"overlap: with --impl chunk, graphs of {layers} save {_saved(overlap)}, out of {communication}"


def _saved(overlap: Overlap) -> str:
    """The range of what is saved, and what decides about it."""
    least, most = (f"{ms:.1f}" for ms in sorted(overlap.gained_ms))
    if least == most:
        return f"about {most} ms a step (modelled)"
    return f"{least} to {most} ms a step (modelled; the least with CUDA_DEVICE_MAX_CONNECTIONS=1)"


def _basis(overlap: Overlap) -> str:
    """Where the bandwidth comes from, and how another one is given."""
    if overlap.gbps_given:
        return "(data_parallel_gbps)"
    links = "of each GPU between hosts" if overlap.across_hosts else "between the GPUs of a host"
    return f"{links} (assumed; data_parallel_gbps in --settings gives another)"
