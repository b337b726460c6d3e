"""What the differences between a replay and its eager run mean: the decision alone, on numbers of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from thdprof.dispatch import Bucket

SPREADS = 4.0
"""A replay may differ from an eager run by so many times the largest difference of two eager runs."""
FEW = 256
"""Values of a tensor from which on the largest of their differences can be relied on to be alike in any two runs."""
_SHOWN = 3
"""Most tensors that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one tensor of a replay differs from that of the eager run."""

    name: str
    """What the tensor is, such as `output 0` or `gradient of linear.weight`."""
    elements: int
    """Number of its values."""
    unequal: int
    """Number of values that are not equal; NaN equals NaN."""
    largest: float
    """Largest absolute difference; infinite where one of the two values alone is NaN or infinite."""
    spread: float
    """Largest absolute difference of two eager runs; 0 where only one was made."""
    scale: float
    """Largest finite absolute value that the eager run has made, or added to what was there."""
    rounding: float
    """Absolute rounding error of the largest values, by which runs may differ where algorithms are not deterministic;
    0 of integers.
    """

    def allowed(self, *, exact: bool) -> float:
        """Largest difference that is no mismatch.

        Args:
            exact: whether replay and eager run must be equal bit for bit.
        """
        return 0.0 if exact else SPREADS * self.spread + self.rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The differences of one verified micro-batch."""

    number: int
    """The micro-batch's number among the module's calls, from 0."""
    bucket: Bucket
    """The bucket that it replayed."""
    slot: int
    """Number of the slot in which it did, from 0."""
    exact: bool
    """Whether replay and eager run must be equal bit for bit."""
    differences: Sequence[Difference]
    """One entry for each compared tensor."""

    @property
    def wrong(self) -> list[Difference]:
        """The tensors that differ by more than is allowed; those of the first steps of the pass come first."""
        return [d for d in self.differences if d.unequal and not d.largest <= d.allowed(exact=self.exact)]

    def told(self) -> str:
        """The mismatch in words, with its numbers."""
        wrong, bucket = self.wrong, self.bucket
        context = f", context-parallel size {bucket.cp_size}" if bucket.cp_size > 1 else ""
        named = "; ".join(self._one(d) for d in wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return (
            f"micro-batch {self.number}, replayed in slot {self.slot} by the graphs for {bucket.max_seqs} documents of "
            f"{bucket.max_seqlen} tokens{context}, differs from the same micro-batch run eagerly in {len(wrong)} of "
            f"{len(self.differences)} tensors: {named}{more}"
        )

    def _one(self, d: Difference) -> str:
        eager = "must be equal" if self.exact else f"eager runs differ by {d.spread:.3g}"
        return (
            f"{d.name}: {d.unequal:,} of {d.elements:,} values, by up to {d.largest:.3g} "
            f"(largest value {d.scale:.3g}, {eager})"
        )


class Spreads:
    """The largest spread of eager runs that each tensor has shown so far, as a share of its largest value.

    Two runs may agree by chance where a third does not, above all in small tensors. A tensor of fewer than FEW values
    therefore has at least the largest spread of all tensors.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def applied(self, differences: Sequence[Difference]) -> list[Difference]:
        """The differences, each with the largest spread that its tensor has shown, this time included."""
        for d in differences:
            own = d.spread / d.scale if d.scale and isfinite(d.spread) else 0.0
            self._largest[d.name] = max(own, self._largest.get(d.name, 0.0))
        most = max(self._largest.values(), default=0.0)
        return [
            replace(d, spread=max(d.spread, (most if d.elements < FEW else self._largest[d.name]) * d.scale))
            for d in differences
        ]
