"""How far runs of one micro-batch lie from each other: reduced where the tensors are, then read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_PIECE = 2**22
"""Elements that are compared at a time: the comparison's own memory is some tens of bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How one tensor of a run lies to that of a reference run. Only what was added to earlier values counts."""

    unequal: int
    """Number of values that differ; NaN equals NaN."""
    squared: float
    """Sum of the squared differences; infinite where one value alone is NaN or infinite, or where shapes differ."""
    largest: float
    """Largest absolute difference."""
    size: float
    """Sum of squares of the reference; only finite values count."""
    scale: float
    """Largest absolute value of the reference; only finite values count."""
    slope: float
    """The multiple of the reference that comes nearest to the run: 1 where they are equal; NaN where the reference is
    zero.
    """


def find_unequal(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> list[int]:
    """Positions of the pairs that are not equal bit for bit, or hold NaN; waits for the device.

    Args:
        ours: tensors of one run, of any shape, dtype and device; None counts as zeros.
        theirs: the same tensors of a reference run.
    """
    pairs = [_with_zeros(one, other) for one, other in zip(ours, theirs, strict=True)]
    marks = [(one != other).any() if one.shape == other.shape else torch.tensor(True) for one, other in pairs]
    return [position for position, (is_unequal,) in enumerate(_read([mark[None] for mark in marks])) if is_unequal]


def measure_distances(
    ours: Sequence[torch.Tensor | None],
    theirs: Sequence[torch.Tensor | None],
    before: Sequence[torch.Tensor | None],
) -> list[Distance]:
    """The distance of each pair of tensors; waits for the device.

    Args:
        ours: tensors of one run, of any shape, dtype and device; None counts as zeros.
        theirs: the same tensors of a reference run.
        before: what both runs have added their values to; None: zeros.
    """
    triples = zip(ours, theirs, before, strict=True)
    return [
        Distance(
            unequal=round(unequal),
            squared=squared,
            largest=largest,
            size=size,
            scale=scale,
            slope=dot / size if size else float("nan"),
        )
        for unequal, squared, largest, size, scale, dot in _read([_reduce(*triple) for triple in triples])
    ]


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


def _reduce(one: torch.Tensor | None, other: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor:
    """The fields of a Distance in their order, with the scalar product in place of the slope: shape [6], float64."""
    ours, theirs = _with_zeros(one, other)
    total = torch.zeros(6, dtype=torch.float64, device=theirs.device)
    if ours.shape != theirs.shape:
        total[0], total[1:3] = max(ours.numel(), theirs.numel()), float("inf")
        return total
    starts = [None] * len(_pieces(ours)) if before is None else _pieces(before)
    for a, b, start in zip(_pieces(ours), _pieces(theirs), starts, strict=True):
        same = (a == b) | ((a != a) & (b != b))
        a, b = a.double(), b.double()
        by = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
        if start is not None:
            a, b = a - start, b - start
        finite = a.isfinite() & b.isfinite()
        a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
        total[0] += (~same).sum()
        total[1] += by.square().sum()
        total[2] = torch.maximum(total[2], by.amax())
        total[3] += b.square().sum()
        total[4] = torch.maximum(total[4], b.abs().amax())
        total[5] += (a * b).sum()
    return total


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().reshape(-1).split(_PIECE) if tensor.numel() else ()
