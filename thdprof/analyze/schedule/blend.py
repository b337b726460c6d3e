"""Megatron's blends of several datasets: how many samples each gives, and in which order.

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
"""Megatron builds this share more samples of each dataset than the blend should draw (mid_level_dataset_surplus)."""


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1, rounded as Megatron rounds them."""
    values = np.array(weights, dtype=np.float64)
    normalized: list[float] = (values / np.sum(values)).tolist()
    return normalized


def drawn_and_built(weights: Sequence[float], size: int) -> list[tuple[int, int]]:
    """Per dataset of normalized `weights`: samples that the blend is sized for, and samples that are built."""
    drawn = [math.ceil(size * w) for w in weights]
    return [(d, math.ceil(d * (1 + SURPLUS))) for d in drawn]


def blend_order(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Index of the dataset that gives each of `size` samples, int16, shape [size]; each gives its own in order.

    `weights` are normalized here once more, as BlendedDataset does.
    """
    order = np.empty(size, dtype=np.int16)
    parts = np.array(normalize(weights), dtype=np.float64)
    filled: NDArray[np.int16] = compiled.run(_fill_order, size * len(parts), order, parts, np.zeros(len(parts)))
    return filled


def exhaustive_order(sizes: Sequence[int]) -> NDArray[np.int16]:
    """The same for a blend that draws all `sizes` samples of its datasets."""
    counts = np.array(sizes, dtype=np.int64)
    total = int(counts.sum())
    order = np.empty(total, dtype=np.int16)
    parts = counts / float(total)
    filled: NDArray[np.int16] = compiled.run(
        _fill_exhaustive, total * len(parts), order, parts, np.zeros(len(parts)), counts
    )
    return filled


def check_draws(order: NDArray[np.int16], sizes: Sequence[int], names: Sequence[str]) -> None:
    """Refuse a blend that draws more samples of a dataset than it has, as Megatron does.

    Raises:
        DataError: naming the dataset and both numbers.
    """
    for drawn, size, name in zip(np.bincount(order, minlength=len(sizes)), sizes, names, strict=True):
        if drawn > size:
            raise DataError(
                f"{name}: the blend draws {drawn} samples of its {size}; Megatron stops on this: "
                "change --weights, or raise its mid_level_dataset_surplus"
            )


def _fill_order(order: Any, parts: Any, counts: Any) -> Any:
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
