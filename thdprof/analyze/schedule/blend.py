"""Megatron's blends of several datasets: how many samples each dataset gives, and in which order.

Rules: megatron-core 0.19, `datasets/blended_megatron_dataset_builder.py`, `blended_dataset.py`, `helpers.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled
from thdprof.errors import DataError

SURPLUS = 0.005
"""Share of samples that Megatron builds of each dataset beyond those that the blend should draw
(mid_level_dataset_surplus)."""


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale weights so that they add up to 1, with the rounding of Megatron's float64 arithmetic."""
    values = np.array(weights, dtype=np.float64)
    normalized: list[float] = (values / np.sum(values)).tolist()
    return normalized


def drawn_and_built(weights: Sequence[float], size: int) -> list[tuple[int, int]]:
    """Two numbers for each dataset: samples that the blend of `size` samples counts on, and samples that are built.

    `weights` hold one normalized weight for each dataset.
    """
    drawn = [math.ceil(size * w) for w in weights]
    return [(d, math.ceil(d * (1 + SURPLUS))) for d in drawn]


def blend_order(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Index of the dataset that gives each sample of a blend, int16, shape [size].

    Every dataset gives its samples in its own order. `weights` are normalized once more, as in BlendedDataset.
    """
    order = np.empty(size, dtype=np.int16)
    parts = np.array(normalize(weights), dtype=np.float64)
    filled: NDArray[np.int16] = compiled.run(_fill_order, size * len(parts), order, parts, np.zeros(len(parts)))
    return filled


def exhaustive_order(sizes: Sequence[int]) -> NDArray[np.int16]:
    """Index of the dataset that gives each sample of a blend that uses up every dataset, int16, shape [sum of sizes].

    `sizes` are the samples of each dataset.
    """
    counts = np.array(sizes, dtype=np.int64)
    total = int(counts.sum())
    order = np.empty(total, dtype=np.int16)
    parts = counts / float(total)
    filled: NDArray[np.int16] = compiled.run(
        _fill_exhaustive, total * len(parts), order, parts, np.zeros(len(parts)), counts
    )
    return filled


def check_draws(order: NDArray[np.int16], sizes: Sequence[int], names: Sequence[str]) -> None:
    """Refuse a blend that draws more samples from a dataset than the dataset has, as Megatron does.

    Args:
        order: index of the dataset that gives each sample, shape [samples of the blend].
        sizes: samples of each dataset.
        names: name of each dataset, for the error.

    Raises:
        DataError: a dataset has too few samples; the error names it and gives both numbers.
    """
    for drawn, size, name in zip(np.bincount(order, minlength=len(sizes)), sizes, names, strict=True):
        if drawn > size:
            raise DataError(
                f"{name}: the blend draws {drawn} samples, but the dataset has {size}, and Megatron stops on this: "
                "change --weights, or raise mid_level_dataset_surplus in Megatron"
            )


def _fill_order(order: Any, parts: Any, counts: Any) -> Any:
    """Fill `order` sample by sample with the dataset that lags furthest behind its share in `parts`.

    `counts` starts as zeros and counts the samples of each dataset. Of equal datasets the first gives the sample.
    """
    for i in range(len(order)):
        position = float(max(i, 1))
        best = 0
        error = parts[0] * position - counts[0]
        for j in range(1, len(parts)):
            candidate = parts[j] * position - counts[j]
            if candidate > error:
                best, error = j, candidate
        order[i] = best
        counts[best] += 1.0
    return order


def _fill_exhaustive(order: Any, parts: Any, counts: Any, sizes: Any) -> Any:
    """Fill `order` as `_fill_order` does, without the datasets that have given all of their `sizes` samples."""
    for i in range(len(order)):
        position = float(max(i, 1))
        best = -1
        error = 0.0
        for j in range(len(parts)):
            if counts[j] >= sizes[j]:
                continue
            candidate = parts[j] * position - counts[j]
            if best < 0 or candidate > error:
                best, error = j, candidate
        order[i] = best
        counts[best] += 1.0
    return order
