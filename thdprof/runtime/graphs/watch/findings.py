"""Whether a replay is wrong: how far runs of one micro-batch lie from each other, and what that shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch

from thdprof.dispatch import Bucket

ROUNDS = 16
"""Most runs of each kind, the first replay and the first eager run included."""
FAR = 4.0
"""A replay is apart where it lies so many times as far from the first eager run as any later eager run does."""
SLOPE = 0.1
"""A gradient is off where the nearest multiple of the eager one is so far from 1. Sound runs differ in all directions
at once, which leaves this multiple where it is.
"""
ROUNDINGS = 4.0
"""A gradient is apart where it lies so many rounding errors from the eager one, as a share of its size. Sound runs of
28 layers lay up to 1.2 of them apart in bf16 and in FP8 (benchmarks/results/watch.md).
"""
APART = 0.004
"""Outputs and state are apart by this share. Eager runs repeat them bit for bit with the kernels that were tried."""
FAINT = 0.01
"""A gradient whose values are so small beside the largest of all that differ may be made of rounding errors alone."""
_SHOWN = 3


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the runs of one micro-batch show about one tensor, measured from the first eager run."""

    name: str
    """What the tensor is, such as `output 0` or `gradient of linear.weight`."""
    elements: int
    replay: Distance
    """Where the first replay lies."""
    is_gradient: bool = False
    """Whether eager runs may differ in it: gradients are added up in no fixed order."""
    apart: float = APART
    """Share of its size from which on it is apart; 0 where replays and eager runs must be equal bit for bit."""
    least: float = 0.0
    """Least size for which a single replay is believed to be wrong: sum of squares."""
    eager: list[Distance] = field(default_factory=list)
    """Where each later eager run lies."""
    replayed: list[Distance] = field(default_factory=list)
    """Where each later replay lies."""

    @property
    def is_open(self) -> bool:
        """Whether the runs so far leave it open, or have shown, that the replay is wrong.

        It is wrong where it lies apart from all eager runs. It is also wrong by less, where each further replay is
        wrong as well: what happens by chance does not happen every time.
        """
        single = self._is_apart(self.replay, max(self.replay.size, self.least))
        if self.eager and not self.replayed:
            return single  # it cannot be replayed again
        return single or all(self._is_off(one) for one in (self.replay, *self.replayed))

    @property
    def spread(self) -> float:
        """Largest squared distance of an eager run from the first one."""
        return max((one.squared for one in self.eager), default=0.0)

    def _is_off(self, run: Distance) -> bool:
        if self._is_apart(run, self.replay.size):
            return True
        if not self.is_gradient:
            return run.unequal > 0 and self.spread == 0
        turned = max((abs(one.slope - 1) for one in self.eager), default=0.0)
        return abs(run.slope - 1) > max(SLOPE, FAR * turned)

    def _is_apart(self, run: Distance, size: float) -> bool:
        return run.squared > self.apart**2 * size and run.squared > FAR**2 * self.spread


@dataclass(slots=True, kw_only=True)
class Finding:
    """What was found so far of one verified micro-batch, each of whose parts has graphs and a backward of its own."""

    number: int
    """The micro-batch's number among the module's calls, from 0."""
    bucket: Bucket
    """The bucket that it replayed."""
    slot: int
    """Number of the slot in which it did, from 0."""
    left: int = 1
    """Number of parts whose backward has not ended."""
    was_suspicious: bool = False
    compared: list[str] = field(default_factory=list)
    wrong: list[Evidence] = field(default_factory=list)
    """The tensors that are wrong, those of the first part first; the last part's backward comes first."""

    def describe(self) -> str:
        """The mismatch in words, with its numbers."""
        bucket = self.bucket
        context = f", context-parallel size {bucket.cp_size}" if bucket.cp_size > 1 else ""
        named = "; ".join(_describe(one) for one in self.wrong[:_SHOWN])
        more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
        return (
            f"micro-batch {self.number}, replayed in slot {self.slot} by the graphs for {bucket.max_seqs} documents of "
            f"{bucket.max_seqlen} tokens{context}, differs from the same micro-batch run eagerly in {len(self.wrong)} "
            f"of {len(self.compared)} tensors: {named}{more}"
        )


def _describe(one: Evidence) -> str:
    replay, spread = one.replay, sqrt(one.spread)
    size = sqrt(replay.size) or 1.0
    worse = sum(other.squared > one.spread for other in one.replayed)
    replays = (
        f"{worse} of {len(one.replayed)} further replays differ more" if one.replayed else "it is not replayed again"
    )
    return (
        f"{one.name}: {replay.unequal:,} of {one.elements:,} values, by up to {replay.largest:.3g} (largest value "
        f"{replay.scale:.3g}), together {sqrt(replay.squared) / size:.2g} of its size, where {len(one.eager) + 1} "
        f"eager runs differ by {spread / size:.2g} of it; {replays}"
    )


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
    size: float
    """Sum of squares of the reference; only finite values count."""
    scale: float
    """Largest absolute value of the reference; only finite values count."""
    slope: float
    """The multiple of the reference that comes nearest to the run; NaN where the reference is zero."""


def find_unequal(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> list[int]:
    """Positions of the pairs that are not equal bit for bit, or hold NaN; waits for the device. They are tensors of a
    run and of a reference run, of any shape, dtype and device; None counts as zeros.
    """
    pairs = [_with_zeros(one, other) for one, other in zip(ours, theirs, strict=True)]
    marks = [(one != other).any() if one.shape == other.shape else torch.tensor(True) for one, other in pairs]
    return [position for position, (is_unequal,) in enumerate(_read([mark[None] for mark in marks])) if is_unequal]


def measure_distances(
    ours: Sequence[torch.Tensor | None],
    theirs: Sequence[torch.Tensor | None],
    before: Sequence[torch.Tensor | None],
) -> list[Distance]:
    """The distance of each pair of `find_unequal`, to which both runs added to `before`; waits for the device."""
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
