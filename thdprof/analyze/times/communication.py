"""Times of communication between the GPUs of a host, by its bandwidth. They were not compared with measured ones."""

from __future__ import annotations

from thdprof.analyze.times.device import Kernels
from thdprof.analyze.times.gpus import Gpu

_LATENCY_US = 15.0
_EFFICIENCY = 0.7
"""Share of a link's bandwidth that collectives of many megabytes reach."""
_NETWORK_GBPS = 50.0
"""Bandwidth of one GPU to other hosts, in GB/s and one direction: one adapter of 400 Gb/s a GPU, as is usual."""
GPUS_A_HOST = 8
"""GPUs of one host, as is usual."""


class Links:
    """The links of one GPU to the others of its host, or to other hosts."""

    def __init__(self, gpu: Gpu, *, across_hosts: bool = False, gbps: float | None = None) -> None:
        """The links of `gpu`.

        Args:
            gpu: the GPU.
            across_hosts: whether ranks communicate over the network between hosts.
            gbps: what collectives of many megabytes reach, in GB/s of one GPU and one direction; None: a share of the
                links' bandwidth.
        """
        by_sheet = min(gpu.link_gbps, _NETWORK_GBPS) if across_hosts else gpu.link_gbps
        self.gbps = by_sheet * _EFFICIENCY if gbps is None else gbps
        """Bandwidth of one GPU in collectives of many megabytes, in GB/s and one direction."""
        self._megabytes_a_us = self.gbps * 1e-3

    def _collective(self, megabytes: float, ranks: int) -> Kernels:
        """An all-gather, reduce-scatter or all-to-all of `megabytes` over all ranks."""
        us = _LATENCY_US + megabytes * (ranks - 1) / ranks / self._megabytes_a_us
        return Kernels(kind="communication", us=us)

    def data_parallel_ms(self, nbytes: float, ranks: int) -> float:
        """Milliseconds of a reduce-scatter or all-gather of `nbytes` over the ranks that hold the same weights."""
        return 0.0 if ranks == 1 else self._collective(nbytes * 1e-6, ranks).us / 1000

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
