"""Times of communication between the GPUs of a host, by its bandwidth. Only data-parallel ones were measured."""

from __future__ import annotations

from thdprof.analyze.times.device import Kernels
from thdprof.analyze.times.gpus import Gpu

_LATENCY_US = 15.0
_EFFICIENCY = 0.7
"""Share of a link's bandwidth that collectives of many megabytes reach."""
_REDUCED = 0.53
"""Share of the links' bandwidth that reductions and gathers of data-parallel buckets reach inside a host: 238 GB/s were
measured between two H200s (benchmarks/results/overlap-times.md).
"""
_NETWORK_GBPS = 50.0
"""Bandwidth of one GPU to other hosts, in GB/s and one direction: one adapter of 400 Gb/s a GPU, as is usual."""
GPUS_A_HOST = 8
"""GPUs of one host, as is usual."""


def data_parallel_gbps(gpu: Gpu, *, across_hosts: bool) -> float:
    """GB/s of one GPU in reductions and gathers over the ranks that hold the same weights, as they are assumed."""
    return min(gpu.link_gbps, _NETWORK_GBPS) * _EFFICIENCY if across_hosts else gpu.link_gbps * _REDUCED


def data_parallel_ms(nbytes: float, ranks: int, gbps: float) -> float:
    """Milliseconds of a reduce-scatter or all-gather of `nbytes` over the ranks that hold the same weights."""
    return 0.0 if ranks == 1 else _LATENCY_US / 1000 + nbytes * (ranks - 1) / ranks / (gbps * 1e6)


class Links:
    """The links of one GPU to the others of its host, or to other hosts."""

    def __init__(self, gpu: Gpu) -> None:
        """The links of `gpu`."""
        self._megabytes_a_us = gpu.link_gbps * 1e-3 * _EFFICIENCY

    def _collective(self, megabytes: float, ranks: int) -> Kernels:
        """An all-gather, reduce-scatter or all-to-all of `megabytes` over all ranks."""
        us = _LATENCY_US + megabytes * (ranks - 1) / ranks / self._megabytes_a_us
        return Kernels(kind="communication", us=us)

    def tensor_parallel(
        self, megabytes: float, ranks: int, sequence_parallel: bool
    ) -> tuple[list[Kernels], list[Kernels]]:
        """What goes before a column-parallel and after a row-parallel product, for `megabytes` of hidden states."""
        if ranks == 1:
            return [], []
        one = self._collective(megabytes, ranks)
        return ([one], [one]) if sequence_parallel else ([], [one, one])

    def context_parallel(self, megabytes: float, ranks: int) -> list[Kernels]:
        """The exposed part of the ring over which ranks pass `megabytes` of keys and values on."""
        if ranks == 1:
            return []
        return [Kernels(kind="communication", us=(ranks - 1) * _LATENCY_US + 0.2 * megabytes * (ranks - 1)
                        / self._megabytes_a_us, launches=4.0 * (ranks - 1))]  # fmt: skip

    def expert_parallel(self, megabytes: float, ranks: int) -> list[Kernels]:
        """One exchange of `megabytes` of tokens between expert-parallel ranks."""
        return [] if ranks == 1 else [self._collective(megabytes, ranks)]
