"""Times of single GPU kernels: matrix products, kernels bound by memory, attention.

Constants are microseconds and rates on an H200 with torch 2.11, cuDNN 9.19 and Transformer Engine 2.20, fitted on half
of the rows of benchmarks/results/decoder-times.md. Other GPUs are scaled by their rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thdprof.analyze.times.gpus import GPUS, Gpu

GAP_US = 0.55
"""Time between two kernels of a graph."""
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (320, 128, 1.0), (192, 128, 0.97), (128, 192, 0.97), (128, 128, 0.93),
          (128, 64, 0.78), (64, 128, 0.78), (64, 64, 0.6), (64, 32, 0.4))  # fmt: skip
"""Tiles of an output that one multiprocessor computes, and their efficiency beside the largest."""
_BASE = GPUS["h200"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Some kernels of one kind, in one pass of one layer."""

    kind: str
    """products, attention, norms, elementwise, experts, adapters, state space, quantization or communication."""
    us: float
    """Time of all of them on the GPU, in microseconds, gaps included."""
    launches: float = 1.0
    """Launches that the host makes for them one by one, each from Python."""
    light_launches: float = 0.0
    """Launches that one call makes in a row, without Python between them."""


class Device:
    """Kernel times on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._slower = 1 / gpu.other_kernels

    def product(
        self, m: int, n: int, k: int, *, fp8: bool = False, accumulates: bool = False, kind: str = "products"
    ) -> Kernels:
        """A matrix product of shapes [m, k] and [k, n].

        Args:
            m: rows of the output.
            n: columns of the output.
            k: length of the sums.
            fp8: whether operands are in FP8.
            accumulates: whether the output is added to a matrix in fp32, as for weight gradients in main_grad.
            kind: kind of the kernels.
        """
        return Kernels(kind=kind, us=self.product_us(m, n, k, fp8=fp8, accumulates=accumulates) + GAP_US)

    def product_us(self, m: int, n: int, k: int, *, fp8: bool = False, accumulates: bool = False) -> float:
        """Microseconds of `product`, without the gap."""
        rate = self.gpu.fp8_tflops if fp8 and self.gpu.fp8_tflops else self.gpu.bf16_tflops
        flops = 2.0 * m * n * k
        share = max(_occupied(m, n, rows, columns, self.gpu.multiprocessors) * worth for rows, columns, worth in _TILES)
        boost = 1.0 + _BOOST * math.exp(-flops / _HEAT_FLOPS)  # short products run before the clock drops
        full = flops / (rate * 1e6 * _AT_BEST[fp8] * boost)
        output = m * n * (8.0 if accumulates else 2.0)
        operands = (m * k + n * k) * (1.0 if fp8 else 2.0)
        memory = (output + operands) / (self.gpu.memory_tbps * 0.8 * 1e6)
        return _PRODUCT_US + max(
            full / math.pow(share, _QUANTIZATION) + _OUTPUT * output / (self.gpu.memory_tbps * 1e6), memory
        )

    def moves(self, megabytes: float, tbps: float, *, kind: str = "elementwise", launches: float = 1.0) -> Kernels:
        """Kernels that read and write `megabytes` in all, at `tbps` TB/s on an H200."""
        return Kernels(
            kind=kind,
            us=self.memory_us(megabytes, tbps) + launches * (_MOVE_US + GAP_US),
            launches=launches,
        )

    def memory_us(self, megabytes: float, tbps: float) -> float:
        """Microseconds of moving `megabytes` at `tbps` TB/s on an H200; what fits the cache takes no memory."""
        beyond = megabytes / (megabytes + self.gpu.cache_mib * 4.0)
        slower = (1 - beyond) * self._slower + beyond * _BASE.memory_tbps / self.gpu.memory_tbps
        return megabytes / tbps * slower

    def scaled(self, us: float) -> float:
        """`us` of arithmetic on an H200, on this GPU."""
        return us * self._slower

    def tiny(self, count: float, us: float = 1.3, *, kind: str = "elementwise", light: bool = True) -> Kernels:
        """`count` kernels that do next to nothing."""
        return Kernels(
            kind=kind,
            us=count * (us + GAP_US),
            launches=0.0 if light else count,
            light_launches=count if light else 0.0,
        )


_PRODUCT_US = 1.5
_MOVE_US = 1.0
_AT_BEST = {False: 1.03, True: 1.06}
_BOOST = 0.12
_HEAT_FLOPS = 8e10
_QUANTIZATION = 0.5
_OUTPUT = 0.25


def _occupied(m: int, n: int, rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that computes output, if every tile has `rows` x `columns` elements."""
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors)
    return m * n / (waves * processors * rows * columns)
