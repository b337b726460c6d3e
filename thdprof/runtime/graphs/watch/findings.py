"""Whether a replay is wrong: the decision alone, on distances between runs of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt

from thdprof.dispatch import Bucket

ROUNDS = 16
"""Most runs of each kind. Samples of 15 further replays and 15 further eager runs that are drawn alike lie on two sides
of any line with a probability of 1 in 155,117,520, the number of ways to choose 15 of 30.
"""
FAR = 4.0
"""A replay lies apart from all eager runs where its distance from the nearest is so many times their own spread."""
_SHOWN = 3
"""Most tensors that a message names."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the runs of one micro-batch show about one tensor.

    The first replay and the first eager run are landmarks. Every later run lies nearer to one of them.
    """

    name: str
    """What the tensor is, such as `output 0` or `gradient of linear.weight`."""
    elements: int
    """Number of its values."""
    unequal: int
    """Number of values in which the first replay and the first eager run differ."""
    largest: float
    """Their largest absolute difference."""
    squared: float
    """Their squared distance."""
    size: float
    """Sum of squares of the eager run's values, without what they were added to."""
    scale: float
    """Largest absolute value of the same."""
    rounding: float = 0.0
    """Distance that nobody asks about, as a share of the tensor's own size."""
    apart: float = 0.0
    """Least distance at which a single replay counts as wrong, as a share of the tensor's own size."""
    eager: list[tuple[float, float]] = field(default_factory=list)
    """Squared distances of each later eager run: from the first eager run, and from the first replay."""
    replayed: list[tuple[float, float]] = field(default_factory=list)
    """The same of each later replay."""

    @property
    def is_suspicious(self) -> bool:
        """Whether the first replay and the first eager run differ by more than rounding."""
        return self.unequal > 0 and not self.squared <= self.rounding**2 * self.size

    @property
    def is_separated(self) -> bool:
        """Whether every replay so far lies nearer to the first replay than every eager run does."""
        eager = [_lean(*distances) for distances in self.eager]
        replayed = [_lean(*distances) for distances in self.replayed]
        return not (eager and replayed) or min(replayed) > max(eager)

    @property
    def is_apart(self) -> bool:
        """Whether the first replay lies far from all eager runs, by how far these lie from each other."""
        nearest = min([self.squared, *(from_replay for _, from_replay in self.eager)])
        spread = max((from_eager for from_eager, _ in self.eager), default=0.0)
        return nearest > self.apart**2 * self.size and nearest > FAR**2 * spread

    @property
    def is_open(self) -> bool:
        """Whether more runs could still show that the replay is wrong."""
        return self.is_apart or (self.is_separated and bool(self.replayed or not self.eager))

    @property
    def spread(self) -> float:
        """Largest distance of an eager run from the first one."""
        return sqrt(max((from_eager for from_eager, _ in self.eager), default=0.0))


def _lean(from_eager: float, from_replay: float) -> float:
    """How much nearer a run lies to the first replay than to the first eager run."""
    return from_eager - from_replay if isfinite(from_eager) or isfinite(from_replay) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found of one verified micro-batch."""

    number: int
    """The micro-batch's number among the module's calls, from 0."""
    bucket: Bucket
    """The bucket that it replayed."""
    slot: int
    """Number of the slot in which it did, from 0."""
    compared: int
    """Number of compared tensors."""
    wrong: Sequence[Evidence]
    """The tensors that are wrong; those of the first steps of the pass come first."""

    def describe(self) -> str:
        """The mismatch in words, with its numbers."""
        bucket = self.bucket
        context = f", context-parallel size {bucket.cp_size}" if bucket.cp_size > 1 else ""
        named = "; ".join(_describe(one) for one in self.wrong[:_SHOWN])
        more = f"; and {len(self.wrong) - _SHOWN} more" if len(self.wrong) > _SHOWN else ""
        return (
            f"micro-batch {self.number}, replayed in slot {self.slot} by the graphs for {bucket.max_seqs} documents of "
            f"{bucket.max_seqlen} tokens{context}, differs from the same micro-batch run eagerly in {len(self.wrong)} "
            f"of {self.compared} tensors: {named}{more}"
        )


def _describe(one: Evidence) -> str:
    runs = f"{len(one.eager) + 1} eager runs and {len(one.replayed) + 1} replays"
    size = sqrt(one.size)
    share = f"{sqrt(one.squared) / size:.2g} of its size" if size else f"{sqrt(one.squared):.3g}"
    spread = f"{one.spread / size:.2g}" if size else f"{one.spread:.3g}"
    return (
        f"{one.name}: {one.unequal:,} of {one.elements:,} values, by up to {one.largest:.3g} (largest value "
        f"{one.scale:.3g}), together {share}, where eager runs differ by up to {spread}; {runs}"
    )
