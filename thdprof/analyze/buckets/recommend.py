"""Buckets that minimise the expected synchronous step time, over every subset of the candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from thdprof.analyze.buckets.candidates import candidate_caps, candidate_lengths, curve_caps, longest_captured
from thdprof.analyze.buckets.cap_curve import Candidate, cap_curve
from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.search import (
    choices_of,
    quickest_covering,
    quickest_within,
    refuse_long_search,
    search_stride,
)
from thdprof.analyze.buckets.statistics import Histogram, Profile, upper_bound
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.settings.limits import Limits
from thdprof.dispatch import Bucket
from thdprof.plan import FallbackRate

_KEPT_GAIN = 0.5
"""Share of the time that the quickest buckets save which buckets that hold every micro-batch must save to be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The buckets to capture, and the step times and fallbacks that are expected with them.

    Times are of the cost table. Where it is of another model (`Analysis.times.origin` is "none"), they only rank the
    choices.
    """

    buckets: tuple[Bucket, ...]
    """Ascending, one context-parallel size after the other; empty where none save enough of the eager step time
    (`CostTable.least_gain`)."""
    shares: tuple[float, ...]
    """Share of micro-batches that replay each bucket."""
    fallback_rate: FallbackRate
    """Shares of micro-batches, (rank, step) pairs and steps with eager execution."""
    fallback_rate_upper_bound: float
    """Upper bound, with 95% confidence, of the share of micro-batches of unseen data that run eagerly."""
    relative_step_time: float
    """Mean step time divided by that of running all micro-batches eagerly."""
    step_ms: float
    """Mean step time in milliseconds."""
    eager_step_ms: float
    """Mean step time in milliseconds with all micro-batches run eagerly."""
    graph_memory_bytes: int | None
    """Graph memory of the busiest pipeline rank in bytes with all activations on the device; None where not known."""
    one_cap: Candidate | None
    """The best single cap within the limits; None where none saves enough of the eager step time."""
    unlimited_relative_step_time: float
    """The relative_step_time of the best choice of buckets without limits on memory and fallbacks."""
    candidates: tuple[Candidate, ...]
    """All single caps that were considered, ascending."""
    steps_searched: int
    """Number of steps on which choices were compared; the figures of the chosen buckets are of all steps."""


def recommend(
    table: MicrobatchTable,
    profile: Profile,
    costs: CostTable,
    *,
    longest_possible: Mapping[int, int],
    pipeline_size: int,
    num_slots: float,
    n_tokens_per_rank: int,
    independent: int,
    limits: Limits,
    cp_size: int | None = None,
) -> Recommendation:
    """Choose the buckets that make a mean step quickest within the limits.

    Several buckets also hold every micro-batch, where that keeps to the limits and to most of what graphs save
    (`Limits.cover_largest`).

    Args:
        table: the micro-batches of the run.
        profile: histograms of these micro-batches.
        costs: the cost table.
        longest_possible: tokens of the longest document that a micro-batch of each context-parallel size can hold; the
            run's size alone without dynamic context parallelism.
        pipeline_size: pipeline-parallel size, for the bubble.
        num_slots: slots of the pipeline rank that needs most, in whole models, for the memory.
        n_tokens_per_rank: tokens of a graph's micro-batches on one context-parallel rank.
        independent: number of micro-batches of `table` that are independent draws, for the confidence bound.
        limits: limits that the buckets must keep to.
        cp_size: the run's context-parallel size, which the cost table is of; None: the least of `longest_possible`.

    Raises:
        UsageError: no choice keeps to `limits`, or there are too many choices to compare.
    """
    run_cp_size = min(longest_possible)
    asked = _asked(table, profile)
    caps = sorted({*curve_caps(profile, costs), *curve_caps(asked, costs)})
    profiles = {run_cp_size: asked} if table.groups is None else Profile.by_cp_size(table, run_cp_size)
    shapes = {
        cp_size: [
            Bucket(n, s, n_tokens_per_rank, cp_size)
            for n in candidate_caps(part, costs)
            for s in candidate_lengths(part, costs, longest_possible[cp_size])
        ]
        for cp_size, part in profiles.items()
    }
    every = [bucket for part in shapes.values() for bucket in part]
    lengths = sorted({b.max_seqlen for b in every})
    step_costs = StepCosts(
        table,
        costs,
        sorted({*caps, *(b.max_seqs for b in every)}),
        lengths,
        pipeline_size,
        n_tokens=n_tokens_per_rank,
        cp_size=cp_size or run_cp_size,
    )
    eager_ms = float(step_costs.step_ms([()])[0])
    least = 1 - costs.least_gain

    def memory(buckets: Sequence[Bucket]) -> int | None:
        return costs.graph_memory_bytes(num_slots=num_slots, num_buckets=len(buckets), n_tokens=n_tokens_per_rank)

    for part in shapes.values():
        refuse_long_search(len(part), limits.num_buckets)
    choices = choices_of(list(shapes.values()), limits.num_buckets, step_costs)
    stride = search_stride(table, step_costs, len(choices))
    times = step_costs.step_ms(choices, stride)
    within = [limits.graph_memory_bytes is None or (memory(c) or 0) <= limits.graph_memory_bytes for c in choices]
    times_within = np.where(within, times, np.inf)
    chosen = quickest_within(choices, times_within, step_costs, limits.max_fallback_rate)
    if chosen and limits.num_buckets > 1 and limits.cover_largest:
        quickest_ms = float(step_costs.step_ms([chosen])[0])
        most_ms = min(least * eager_ms, eager_ms - _KEPT_GAIN * (eager_ms - quickest_ms))
        chosen = quickest_covering(choices, times_within, step_costs, most_ms=most_ms) or chosen
    longest = longest_captured(profiles, longest_possible)
    options = [tuple(Bucket(n, longest[size], n_tokens_per_rank, size) for size in shapes) for n in caps]
    curve = cap_curve(options, profile, costs, step_costs, eager_ms)
    one_graph_fits = limits.graph_memory_bytes is None or (memory(options[0]) or 0) <= limits.graph_memory_bytes
    most_fallbacks = 1.0 if limits.max_fallback_rate is None else limits.max_fallback_rate
    rounded = {
        *candidate_caps(profile, costs),
        *candidate_caps(asked, costs),
    }  # between steps of the costs, the largest cap is as quick as any
    singles = [
        c
        for c in curve
        if c.max_seqs in rounded
        and one_graph_fits
        and c.fallback_rate.step <= most_fallbacks
        and (c.relative_step_time <= least or limits.max_fallback_rate is not None)
    ]
    if limits.max_fallback_rate is None and float(step_costs.step_ms([chosen])[0]) > least * eager_ms:
        chosen = ()
    step_ms = float(step_costs.step_ms([chosen])[0])
    rate = step_costs.fallback_rate(chosen)
    independent = max(1, independent // table.shared_capture_ranks)
    return Recommendation(
        buckets=tuple(chosen),
        shares=step_costs.shares(chosen),
        fallback_rate=rate,
        fallback_rate_upper_bound=upper_bound(math.ceil(rate.microbatch * independent), independent),
        relative_step_time=step_ms / eager_ms,
        step_ms=step_ms,
        eager_step_ms=eager_ms,
        graph_memory_bytes=memory(chosen),
        one_cap=min(singles, key=lambda c: (c.relative_step_time, c.max_seqs)) if singles else None,
        candidates=curve,
        unlimited_relative_step_time=float(times.min()) / eager_ms if stride == 1 else step_ms / eager_ms,
        steps_searched=-(-table.num_steps // stride),
    )


def _asked(table: MicrobatchTable, profile: Profile) -> Profile:
    """The profile of what ranks that decide together ask for; `profile` where every rank decides for itself."""
    if table.shared_capture_ranks == 1:
        return profile
    n_seqs, max_seqlen = table.joint(table.n_seqs), table.joint(table.max_seqlen)
    return Profile(n_seqs=Histogram.of(n_seqs), max_seqlen=Histogram.of(max_seqlen))
