"""The curve of single caps: what each covers, and what a step takes under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.statistics import PERCENTILES, Profile
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.dispatch import Bucket
from thdprof.plan import FallbackRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A single cap for all context-parallel sizes, with the fallbacks and the step time under it."""

    max_seqs: int
    """Documents that the graphs are captured for."""
    coverage: float
    """Share of micro-batches that replay."""
    fallback_rate: FallbackRate
    """Shares of micro-batches, (rank, step) pairs and steps with eager execution."""
    relative_step_time: float
    """Mean step time divided by that of running all micro-batches eagerly."""
    padding_ms: float
    """Mean time in milliseconds by which a replay takes longer than that of a graph for exactly its documents would."""
    names: tuple[str, ...]
    """Names of the percentiles of n_seqs that the cap equals, such as "p90"."""


def cap_curve(
    options: Sequence[tuple[Bucket, ...]], profile: Profile, costs: CostTable, step_costs: StepCosts, eager_ms: float
) -> tuple[Candidate, ...]:
    """The fallbacks and the step time under each single cap.

    Its graphs are captured for the longest document, because systems with one cap limit nothing else.

    Args:
        options: the buckets of each cap, one for each context-parallel size.
        profile: histograms of the micro-batches.
        costs: the cost table.
        step_costs: the step costs of the micro-batches.
        eager_ms: mean step time in milliseconds with all micro-batches run eagerly.
    """
    times = step_costs.step_ms(options)
    named: dict[int, list[str]] = {}
    for name, percent in PERCENTILES.items():
        named.setdefault(profile.n_seqs.percentile(percent), []).append(name)
    curve = []
    for buckets, ms in zip(options, times, strict=True):
        rate, bucket = step_costs.fallback_rate(buckets), buckets[-1]
        curve.append(
            Candidate(
                max_seqs=bucket.max_seqs,
                coverage=1 - rate.microbatch,
                fallback_rate=rate,
                relative_step_time=float(ms) / eager_ms,
                padding_ms=_padding_ms(profile, costs, bucket),
                names=tuple(named.get(bucket.max_seqs, ())),
            )
        )
    return tuple(curve)


def _padding_ms(profile: Profile, costs: CostTable, bucket: Bucket) -> float:
    """Mean time in ms by which a replay of `bucket` takes longer than that of a graph for its exact documents."""
    counts = profile.n_seqs.counts[: bucket.max_seqs + 1]
    present = np.flatnonzero(counts)
    if not present.size:
        return 0.0
    own = np.array([costs.replay_ms(max(1, int(n)), bucket.max_seqlen) for n in present])
    paid = costs.replay_ms(bucket.max_seqs, bucket.max_seqlen) - own
    return float(paid @ counts[present] / counts[present].sum())
