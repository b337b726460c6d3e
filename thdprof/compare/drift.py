"""Has the data moved on? The micro-batches that a run has seen, held against a plan's counts while it trains.

The counts of a plan and of a run that trains on the same data are two samples of one population, wherever the order
of the data is shuffled: the run sees another part of it, or the same part up to the present step. So every count is
held to the hypergeometric distribution of Fisher's exact test. A run that is exactly the plan's is a sample without
replacement from the plan itself, which varies less, so that the test errs on the quiet side.

A run is compared many times, at the i-th time over the last 1, 2, 4, ... comparisons and over all of them. The chance
of a false alarm in a whole run, however long it is, stays under FALSE_ALARMS_PER_RUN: the i-th comparison may spend
1 / (i * (i + 1)) of it, shared evenly among its spans, its counts, and too few or too many.

Micro-batches that are made together (one step of a packer for whole steps, the rows that Megatron-Bridge collates for a
step of a rank) count as one, for they resemble each other, and so do those that ranks decide on together. Where rows
are read in the file's order, early shares tell nothing of the whole. Then an alarm needs more micro-batches of a kind
than the whole plan has. Behind its last micro-batch it needs more than the plan has in as many epochs, and a count that
chance does not explain either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, exp, floor, lgamma, log10

from thdprof.dispatch import Bucket
from thdprof.plan import Plan
from thdprof.training import PACKERS

FALSE_ALARMS_PER_RUN = 1e-3
"""Largest chance that a run whose data is the plan's ever raises an alarm."""

_NEGLIGIBLE = 1e-17
_ROUNDING = 1e-6
_LARGEST_POWER = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The count that differs most from what the plan allows."""

    bucket: Bucket | None
    """The bucket that is replayed too seldom or too often; None: micro-batches that run eagerly by shape."""
    microbatches: int
    """Number of the latest micro-batches over which it differs."""
    observed_share: float
    """Share of them that the run counted."""
    predicted_share: float
    """The plan's share."""
    chance: float | None
    """Chance of a difference as large in this direction, if the data is the plan's; None: it is impossible."""

    def __str__(self) -> str:
        """The numbers as a part of a sentence."""
        what = "ran eagerly by shape" if self.bucket is None else f"replayed {bucket_name(self.bucket)}"
        how = "the whole plan has fewer"
        if self.chance is not None:
            power = min(_LARGEST_POWER, floor(-log10(self.chance))) if self.chance > 0 else _LARGEST_POWER
            how = f"by chance less than once in 10^{power}"
        return (
            f"of the last {self.microbatches:,} micro-batches {self.observed_share:.2%} {what}, the plan says "
            f"{self.predicted_share:.2%} ({how})"
        )


class DriftTest:
    """Holds the counts of a run to a plan's, time and again while the run goes on."""

    def __init__(self, plan: Plan) -> None:
        """A test of a run by `plan` that begins now, with no micro-batch counted."""
        run = plan.training
        self._buckets = sorted(plan.shares)
        self._planned = plan.microbatches.count
        self._shares = [plan.predictions.fallback_rate.microbatch, *(plan.shares[b] for b in self._buckets)]
        self._deal_in_order = (
            run.loader == "single" and plan.dataset.format != "megatron" and run.max_num_samples is None
        )
        self._exact = plan.microbatches.exact
        together = plan.microbatches.count / plan.microbatches.steps
        if PACKERS[run.packer].packs_steps and plan.dataset.format == "lengths":
            self._together = together
        elif run.loader == "batch" and plan.dataset.format.startswith("bridge"):
            self._together = together / run.data_parallel_size
        else:
            self._together = 1.0
        self._together = max(self._together, float(run.shared_capture_ranks))
        self._seen: list[list[int]] = [[0] * (len(self._shares) + 1)]

    def moved(self, replays: Mapping[Bucket, int], *, by_shape: int, undecided: int) -> Moved | None:
        """Compare once more; None where the data can still be the plan's.

        Args:
            replays: micro-batches of the run so far that replayed each bucket.
            by_shape: those that ran eagerly because of their shape.
            undecided: those that ran eagerly although their shape fits a bucket, such as for want of a free slot. The
                shares of buckets are not compared while there are any.
        """
        self._seen.append([undecided, by_shape, *(replays.get(bucket, 0) for bucket in self._buckets)])
        looks = len(self._seen) - 1
        spans = list(_spans(looks))
        allowed = FALSE_ALARMS_PER_RUN / (looks * (looks + 1)) / len(spans) / (2 * len(self._shares))
        if self._deal_in_order:
            return self._beyond_plan(allowed)
        found = [moved for span in spans for moved in self._differences(span, allowed)]
        return min(found, key=lambda moved: moved.chance or 0.0, default=None)

    def _differences(self, span: int, allowed: float) -> Iterator[Moved]:
        """The counts over the last `span` comparisons whose chance is less than `allowed`."""
        counts = [now - then for now, then in zip(self._seen[-1], self._seen[-1 - span], strict=True)]
        total = sum(counts)
        if total == 0:
            return
        compared = 1 if counts[0] else len(self._shares)
        for index in range(compared):
            share, count = self._shares[index], counts[index + 1]
            chance = self._chance(count, total, share, allowed)
            if chance < allowed:
                yield self._difference(index, count, total, chance)

    def _difference(self, index: int, count: int, total: int, chance: float | None) -> Moved:
        return Moved(
            bucket=self._buckets[index - 1] if index else None,
            microbatches=total,
            observed_share=count / total,
            predicted_share=self._shares[index],
            chance=chance,
        )

    def _chance(self, count: int, total: int, share: float, allowed: float) -> float:
        """Chance of `count` of `total` or a count further from the plan's share, on the same side; see `tail`."""
        drawn, others = floor(total / self._together), floor(self._planned / self._together)
        if not (drawn and others):
            return 1.0
        if count < share * total:  # too few: then too many of all others
            count, share = total - count, 1 - share
        # rounded towards each other, so that rounding makes no difference larger
        marked = min(others, ceil(share * others - _ROUNDING))
        return tail(floor(count * drawn / total), drawn, marked, others, enough=allowed)

    def _beyond_plan(self, allowed: float) -> Moved | None:
        """The first count that is larger than the plan's, in as many epochs as the run has begun.

        Chance does not excuse more than an exact plan has of its one epoch. A revised plan's counts are a sample.
        """
        counts = self._seen[-1]
        total = sum(counts)
        epochs = ceil(total / self._planned)
        for index, (share, count) in enumerate(zip(self._shares, counts[1:], strict=True)):
            if count > epochs * round(share * self._planned):
                chance = None if epochs == 1 and self._exact else self._chance(count, total, share, allowed)
                if chance is None or chance < allowed:
                    return self._difference(index, count, total, chance)
        return None


def tail(count: int, drawn: int, marked: int, others: int, *, enough: float = 1.0) -> float:
    """Chance that of `drawn` draws at least `count` are marked, given how many are marked among these and `others`.

    Draws are without replacement, from all of `drawn + others`; `marked` of the `others` are marked. The sum stops
    at `enough`: a larger chance may be returned as any number from there up to itself.
    """
    population, all_marked = drawn + others, count + marked
    if count * others <= marked * drawn:
        return 1.0  # not above the mean
    if all_marked > population:
        return 1.0
    term = exp(
        _log_choose(all_marked, count)
        + _log_choose(population - all_marked, drawn - count)
        - _log_choose(population, drawn)
    )
    total = 0.0
    while total < enough and term > _NEGLIGIBLE * total and count <= drawn:
        total += term
        rest = population - all_marked - drawn + count + 1
        term *= (all_marked - count) * (drawn - count) / ((count + 1) * rest) if rest > 0 else 0.0
        count += 1
    return min(1.0, total)


def bucket_name(bucket: Bucket) -> str:
    """How a bucket is called in a run's log."""
    context = f" on {bucket.cp_size} ranks" if bucket.cp_size > 1 else ""
    return f"{bucket.max_seqs} documents of {bucket.max_seqlen} tokens{context}"


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _spans(looks: int) -> Iterator[int]:
    """Numbers of the latest comparisons that are looked at together: powers of two, and all."""
    span = 1
    while span < looks:
        yield span
        span *= 2
    yield looks
