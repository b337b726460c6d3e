"""How far runs of one micro-batch lie from each other: reduced where the tensors are, then read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECE = 2**22
"""Elements that are compared at a time: the comparison's own memory is some tens of bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far one tensor of one run lies from that of another."""

    unequal: int
    """Number of values that differ; NaN equals NaN."""
    squared: float
    """Sum of the squared differences; infinite where one value alone is NaN or infinite, or where shapes differ."""
    largest: float
    """Largest absolute difference."""


def find_unequal(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> list[int]:
    """Positions of the pairs that are not equal bit for bit, or hold NaN; waits for the device.

    Args:
        ours: tensors of one run, of any shape, dtype and device; None counts as zeros.
        theirs: the same tensors of another run.
    """
    pairs = [_with_zeros(one, other) for one, other in zip(ours, theirs, strict=True)]
    marks = [(one != other).any() if one.shape == other.shape else torch.tensor(True) for one, other in pairs]
    return [position for position, (is_unequal,) in enumerate(_read([mark[None] for mark in marks])) if is_unequal]


def measure_distances(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> list[Distance]:
    """The distance of each pair of tensors; waits for the device.

    Args:
        ours: tensors of one run, of any shape, dtype and device; None counts as zeros.
        theirs: the same tensors of another run.
    """
    pairs = [_with_zeros(one, other) for one, other in zip(ours, theirs, strict=True)]
    return [
        Distance(unequal=round(unequal), squared=squared, largest=largest)
        for unequal, squared, largest in _read([_reduce_difference(*pair) for pair in pairs])
    ]


def measure_sizes(values: Sequence[torch.Tensor | None], before: Sequence[torch.Tensor | None]) -> list[list[float]]:
    """Of each tensor the sum of squares, and the largest absolute value; only finite values count.

    Args:
        values: tensors of one run; None counts as zeros.
        before: what the run has added its values to; None: zeros.
    """
    return _read([_reduce_size(value, start) for value, start in zip(values, before, strict=True)])


def _with_zeros(one: torch.Tensor | None, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if one is None:
        one = torch.zeros(1) if other is None else torch.zeros_like(other)
    return one, torch.zeros_like(one) if other is None else other


def _read(rows: Sequence[torch.Tensor]) -> list[list[float]]:
    """The rows on the host, with one copy for all that are on the same device."""
    found: list[list[float]] = [[] for _ in rows]
    for device in {row.device for row in rows}:
        places = [i for i, row in enumerate(rows) if row.device == device]
        for place, values in zip(places, torch.stack([rows[i] for i in places]).tolist(), strict=True):
            found[place] = values
    return found


def _reduce_difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor of shape [3], float64: number of unequal values, sum of squared differences, largest difference."""
    if one.shape != other.shape:
        return torch.tensor([max(one.numel(), other.numel()), float("inf"), float("inf")], dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64, device=one.device)
    for ours, theirs in zip(_pieces(one), _pieces(other), strict=True):
        same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
        by = (ours.double() - theirs.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
        by = torch.where(same, 0.0, by)
        total[0] += (~same).sum()
        total[1] += by.square().sum()
        total[2] = torch.maximum(total[2], by.amax())
    return total


def _reduce_size(value: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor:
    """A tensor of shape [2], float64: sum of squares, and largest absolute value, of what was added to `before`."""
    if value is None:
        return torch.zeros(2, dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64, device=value.device)
    starts = [None] * len(_pieces(value)) if before is None else _pieces(before)
    for piece, start in zip(_pieces(value), starts, strict=True):
        added = piece.double() if start is None else piece.double() - start.double()
        added = torch.where(added.isfinite(), added.abs(), 0.0)
        total[0] += added.square().sum()
        total[1] = torch.maximum(total[1], added.amax())
    return total


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().reshape(-1).split(_PIECE) if tensor.numel() else ()
