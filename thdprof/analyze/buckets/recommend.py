"""The buckets that minimise the expected step time: candidates, the curve of single caps, and the search."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.statistics import PERCENTILES, AnalyzedRun, Histogram, Profile, upper_bound
from thdprof.analyze.buckets.step_costs import StepCosts, costs_of_run
from thdprof.analyze.settings.limits import Limits
from thdprof.dispatch import Bucket
from thdprof.errors import UsageError
from thdprof.plan import FallbackRate
from thdprof.schedule.microbatch_table import MicrobatchTable

_MAX_SEQLEN_PERCENTILES = (50.0, 90.0, 99.0, 100.0)
"""Percentiles of max_seqlen that are considered as lengths of a bucket."""
_MAX_CANDIDATES = 16
"""Caps that are considered at most, unless the percentiles alone are more."""


def candidate_caps(profile: Profile, costs: CostTable) -> list[int]:
    """Caps worth considering: quantiles of `n_seqs` and measured caps, rounded up to the cost table's steps."""
    histogram = profile.n_seqs
    quantiles = {histogram.percentile(p) for p in (75.0, *PERCENTILES.values())}
    top, longest = max(quantiles), profile.max_seqlen.percentile(100.0)
    ms = {n: costs.replay_ms(n, longest) for n in (top, *costs.measured_max_seqs()) if n >= min(quantiles)}
    # a larger shape can be cheaper
    optional = sorted([n for n in ms if n not in quantiles and (n < top or ms[n] < ms[top])])
    room = max(1, _MAX_CANDIDATES - len(quantiles))
    spread = optional[:: max(1, -(-len(optional) // room))]
    cheapest = min(optional, key=ms.__getitem__, default=top)
    return sorted({costs.round_max_seqs(n) for n in (*quantiles, *spread, cheapest)})


def _candidate_lengths(profile: Profile, costs: CostTable, top: int) -> list[int]:
    """Values of max_seqlen worth considering, in tokens; where costs do not depend on it, only `top`, the largest."""
    if not costs.needs_max_seqlen:
        return [top]
    step = costs.max_seqlen_granularity
    quantiles = {profile.max_seqlen.percentile(p) for p in _MAX_SEQLEN_PERCENTILES}
    return sorted({min(top, max(1, math.ceil(n / step) * step)) for n in quantiles} | {top})


def find_longest_captured(profiles: Mapping[int, Profile], longest_possible: Mapping[int, int]) -> dict[int, int]:
    """The longest document, in tokens, that one cap's graph of each context-parallel size is captured for.

    Args:
        longest_possible: tokens of the longest document that a micro-batch of each size can hold.
    """
    return {
        cp_size: max(longest_possible[cp_size], part.max_seqlen.percentile(100.0)) for cp_size, part in profiles.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A single cap for all context-parallel sizes, with the fallbacks and the step time under it."""

    max_seqs: int
    """Documents that the graphs are captured for."""
    coverage: float
    """Share of micro-batches that replay."""
    fallback_rate: FallbackRate
    """Shares of micro-batches, (rank, step) pairs and steps with eager execution."""
    relative_step_time: float | None
    """Mean step time divided by that of running all micro-batches eagerly; None without times of the user's model."""
    padding_ms: float | None
    """Mean time in milliseconds by which a replay takes longer than that of a graph for exactly its documents would;
    None without times of the user's model."""
    names: tuple[str, ...]
    """Names of the percentiles of n_seqs that the cap equals, such as "p90"."""


def cap_curve(
    options: Sequence[tuple[Bucket, ...]], profile: Profile, costs: CostTable, step_costs: StepCosts, eager_ms: float
) -> tuple[Candidate, ...]:
    """The fallbacks and the step time under each single cap.

    Its graphs are captured for the longest document, because systems with one cap limit nothing else.

    Args:
        options: the buckets of each cap, one for each context-parallel size.
        eager_ms: mean step time in milliseconds with all micro-batches run eagerly.
    """
    times = step_costs.step_ms(options)
    named: dict[int, list[str]] = {}
    for name, percent in PERCENTILES.items():
        named.setdefault(profile.n_seqs.percentile(percent), []).append(name)
    rates = [step_costs.fallback_rate(buckets) for buckets in options]
    largest = [buckets[-1] for buckets in options]
    return tuple(
        [
            Candidate(
                max_seqs=bucket.max_seqs,
                coverage=1 - rate.microbatch,
                fallback_rate=rate,
                relative_step_time=float(ms) / eager_ms,
                padding_ms=padding,
                names=tuple(named.get(bucket.max_seqs, ())),
            )
            for bucket, rate, ms, padding in zip(
                largest, rates, times, _padding_ms(profile, costs, largest), strict=True
            )
        ]
    )


def _padding_ms(profile: Profile, costs: CostTable, buckets: Sequence[Bucket]) -> list[float]:
    """Mean time in ms by which a replay of each bucket takes longer than that of a graph for its exact documents."""
    means = []
    for bucket in buckets:
        counts = profile.n_seqs.counts[: bucket.max_seqs + 1]
        present = np.flatnonzero(counts)
        own = np.array([costs.replay_ms(max(1, int(n)), bucket.max_seqlen) for n in present])
        paid = costs.replay_ms(bucket.max_seqs, bucket.max_seqlen) - own
        means.append(float(paid @ counts[present] / counts[present].sum()) if present.size else 0.0)
    return means


_SEARCH_WORK = 4_000_000_000
"""Multiplications that the search over subsets may take; beyond it, it looks at evenly spaced steps."""
_SLOWNESS_BY_ROUND = 8
"""Multiplications that take as long as one micro-batch under one choice does with dynamic context parallelism."""
_MOST_CHOICES = 50_000
"""Most choices of buckets that are compared."""


def subsets(buckets: Sequence[Bucket], most: int) -> list[tuple[Bucket, ...]]:
    """Every choice of at most `most` of `buckets`, those of fewest buckets first; the empty choice runs all eagerly."""
    ordered = sorted(buckets)
    return [choice for size in range(min(most, len(ordered)) + 1) for choice in combinations(ordered, size)]


def choices_of(shapes: Sequence[Sequence[Bucket]], most: int, costs: StepCosts) -> Sequence[tuple[Bucket, ...]]:
    """Choices of at most `most` of `shapes` of each context-parallel size, fewest first.

    For a single size these are all choices. For several sizes they are the combinations of a few choices of each size:
    the quickest choice of every number of buckets, if it is quicker than those of fewer buckets, and the one bucket
    that fits all micro-batches.
    """
    by_size = [subsets(part, most) for part in shapes]
    if len(by_size) == 1 or most == 0:
        return by_size[0]
    short: list[list[tuple[Bucket, ...]]] = []
    for part, of_part in zip(shapes, by_size, strict=True):
        times = costs.total_ms(of_part).round(9)
        quickest: dict[int, int] = {}
        for index in np.argsort(times, kind="stable"):
            quickest.setdefault(len(of_part[index]), int(index))
        saves = [i for n, i in quickest.items() if all(times[i] < times[quickest[fewer]] for fewer in range(n))]
        fits_all = replace(part[0], max_seqs=max(b.max_seqs for b in part), max_seqlen=max(b.max_seqlen for b in part))
        short.append([*dict.fromkeys([*(of_part[i] for i in saves), (fits_all,)])])
    count = math.prod(len(part) for part in short)
    if count > _MOST_CHOICES:
        raise UsageError(
            f"--buckets {most}: {count:,} choices for {len(short)} context-parallel sizes are more than the "
            f"{_MOST_CHOICES:,} that are compared; give a smaller number"
        )
    return sorted((tuple(b for part in parts for b in part) for parts in product(*short)), key=len)


def refuse_long_search(num_shapes: int, num_buckets: int) -> None:
    """Refuse a search over more choices than are compared.

    Raises:
        UsageError: naming the number of choices.
    """
    choices = sum(math.comb(num_shapes, k) for k in range(min(num_shapes, num_buckets) + 1))
    if choices > _MOST_CHOICES:
        raise UsageError(
            f"--buckets {num_buckets}: {choices:,} choices of {num_shapes} shapes are more than the {_MOST_CHOICES:,} "
            "that are compared; give a smaller number"
        )


def search_stride(table: MicrobatchTable, costs: StepCosts, choices: int) -> int:
    """The stride of the steps on which so many `choices` are compared: 1, unless all steps would take too long."""
    if table.data_parallel_size == 1 and table.uniform:
        return 1
    if table.groups is not None:
        return min(table.num_steps, -(-len(table) * choices * _SLOWNESS_BY_ROUND // _SEARCH_WORK))
    work = table.num_steps * table.data_parallel_size * 2 * len(costs.class_counts) * choices
    return -(-work // _SEARCH_WORK)


def choose_quickest(
    choices: Sequence[tuple[Bucket, ...]],
    times: NDArray[np.float64],
    costs: StepCosts,
    max_fallback_rate: float | None,
) -> tuple[Bucket, ...]:
    """The quickest choice within the limits; of equally quick choices, that of the fewest and then smallest buckets.

    Args:
        times: mean step time under each choice, infinite where it exceeds the memory limit, shape [choices].

    Raises:
        UsageError: no choice keeps to the limits.
    """
    for index in np.argsort(times.round(9), kind="stable"):  # choices come fewest first
        choice = choices[int(index)]
        if not np.isfinite(times[index]):
            break
        if max_fallback_rate is None or costs.fallback_rate(choice).step <= max_fallback_rate:
            return choice
    raise UsageError(
        f"--max-fallback-rate {max_fallback_rate:g}: no choice of buckets within the graph-memory budget keeps to "
        "it; raise --graph-memory-gib, or the rate"
    )


def choose_covering(
    choices: Sequence[tuple[Bucket, ...]], times: NDArray[np.float64], costs: StepCosts, *, most_ms: float
) -> tuple[Bucket, ...]:
    """The quickest choice under which no micro-batch runs eagerly; empty where none takes at most `most_ms` a step.

    An eager micro-batch needs its activations beside all slots, where a further bucket needs about 1% of a slot.

    Args:
        times: mean step time under each choice, infinite where it exceeds the memory limit, shape [choices].
        most_ms: longest mean step time that graphs may take.
    """
    everything = (1 << len(costs.class_counts)) - 1
    held = {b: costs.classes_held(b) for b in {bucket for choice in choices for bucket in choice}}
    covers = np.array([functools.reduce(or_, map(held.__getitem__, choice), 0) == everything for choice in choices])
    covering = np.where(covers, times, np.inf).round(9)
    best = int(covering.argmin())
    return choices[best] if covering[best] <= most_ms else ()


_KEPT_GAIN = 0.5
"""Share of the time that the quickest buckets save which buckets that hold every micro-batch must save to be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The buckets to capture, and the step times and fallbacks that are expected with them.

    Times are of the cost table. Where it is of another model (`Analysis.times.origin` is "none"), they only rank the
    choices, and the analysis has None in their place.
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
    relative_step_time: float | None
    """Mean step time divided by that of running all micro-batches eagerly."""
    step_ms: float | None
    """Mean step time in milliseconds."""
    eager_step_ms: float | None
    """Mean step time in milliseconds with all micro-batches run eagerly."""
    graph_memory_bytes: int | None
    """Graph memory of the busiest pipeline rank in bytes with all activations on the device; None where not known."""
    one_cap: Candidate | None
    """The best single cap within the limits; None where none saves enough of the eager step time."""
    unlimited_relative_step_time: float
    """The relative_step_time of the best choice of buckets without limits on memory and fallbacks, by any costs."""
    candidates: tuple[Candidate, ...]
    """All single caps that were considered, ascending."""
    caps: tuple[int, ...]
    """Values of max_seqs that were compared, ascending."""
    lengths: tuple[int, ...]
    """Values of max_seqlen that were compared, ascending."""
    steps_searched: int
    """Number of steps on which choices were compared; the figures of the chosen buckets are of all steps."""

    def without_times(self) -> Recommendation:
        """The same without times of a step or a cap."""
        no_times: dict[str, Any] = {"relative_step_time": None, "padding_ms": None}
        return replace(
            self,
            relative_step_time=None,
            step_ms=None,
            eager_step_ms=None,
            one_cap=None if self.one_cap is None else replace(self.one_cap, **no_times),
            candidates=tuple([replace(candidate, **no_times) for candidate in self.candidates]),
        )


def recommend(
    run: AnalyzedRun, costs: CostTable, *, independent: int, limits: Limits, curve: bool = True
) -> Recommendation:
    """Choose the buckets that make a mean step quickest within the limits.

    Several buckets also hold every micro-batch, where that keeps to the limits and to most of what graphs save
    (`Limits.cover_largest`).

    Args:
        costs: the cost table, of the run's context-parallel size.
        independent: number of the run's micro-batches that are independent draws, for the confidence bound.
        curve: whether single caps are priced.

    Raises:
        UsageError: no choice keeps to `limits`, or there are too many choices to compare.
    """
    table, profile = run.table, run.profile
    joint = _profile_joint(table, profile)
    profiles = {min(run.longest_possible): joint} if table.groups is None else Profile.by_cp_size(table, table.groups)
    caps_of = {part: candidate_caps(part, costs) for part in {profile, joint, *profiles.values()}}
    rounded = {*caps_of[profile], *caps_of[joint]}
    caps = sorted(rounded)
    if costs.max_seqs_steps:  # the curve shows the percentiles, too, that candidates were rounded up from
        percentiles = {part.n_seqs.percentile(p) for part in (profile, joint) for p in PERCENTILES.values()}
        caps = sorted(rounded | {max(1, n) for n in percentiles})
    longest = find_longest_captured(profiles, run.longest_possible)
    shapes: list[list[Bucket]] = []
    for cp_size, part in profiles.items():
        tokens = _candidate_lengths(part, costs, longest[cp_size])
        shapes.append([Bucket(n, s, run.n_tokens, cp_size) for n in caps_of[part] for s in tokens])
    every = [bucket for buckets in shapes for bucket in buckets]
    lengths = sorted({b.max_seqlen for b in every})
    all_caps = sorted({*caps, *(b.max_seqs for b in every)})
    step_costs = costs_of_run(run, costs, all_caps, lengths)
    most_bytes, least = limits.graph_memory_bytes, 1 - costs.least_gain

    def memory(buckets: Sequence[Bucket]) -> int | None:
        return costs.graph_memory_bytes(num_slots=run.num_slots, num_buckets=len(buckets), n_tokens=run.n_tokens)

    for buckets in shapes:
        refuse_long_search(len(buckets), limits.num_buckets)
    choices = choices_of(shapes, limits.num_buckets, step_costs)
    stride = search_stride(table, step_costs, len(choices))
    times = step_costs.step_ms(choices, stride)
    ms_of = dict(zip(choices, map(float, times), strict=True)) if stride == 1 else {}

    def choice_ms(choice: tuple[Bucket, ...]) -> float:
        return ms_of[choice] if choice in ms_of else step_costs.choice_ms(choice)

    eager_ms = choice_ms(())
    within = [most_bytes is None or (memory(c) or 0) <= most_bytes for c in choices]
    times_within = np.where(within, times, np.inf)
    chosen = choose_quickest(choices, times_within, step_costs, limits.max_fallback_rate)
    step_ms = choice_ms(chosen)
    if chosen and limits.num_buckets > 1 and limits.cover_largest:
        most_ms = min(least * eager_ms, eager_ms - _KEPT_GAIN * (eager_ms - step_ms))
        if covering := choose_covering(choices, times_within, step_costs, most_ms=most_ms):
            chosen, step_ms = covering, choice_ms(covering)
    options = [tuple(Bucket(n, longest[size], run.n_tokens, size) for size in profiles) for n in caps]
    candidates = cap_curve(options, profile, costs, step_costs, eager_ms) if curve else ()
    one_graph_fits = most_bytes is None or (memory(options[0]) or 0) <= most_bytes
    most_fallbacks = 1.0 if limits.max_fallback_rate is None else limits.max_fallback_rate
    singles = [
        c
        for c in candidates
        if c.max_seqs in rounded  # between steps of the costs, the largest cap is as quick as any
        and one_graph_fits
        and c.fallback_rate.step <= most_fallbacks
        and ((c.relative_step_time or 0.0) <= least or limits.max_fallback_rate is not None)
    ]
    if limits.max_fallback_rate is None and step_ms > least * eager_ms:
        chosen, step_ms = (), eager_ms
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
        candidates=candidates,
        caps=tuple(all_caps),
        lengths=tuple(lengths),
        unlimited_relative_step_time=float(times.min()) / eager_ms if stride == 1 else step_ms / eager_ms,
        steps_searched=-(-table.num_steps // stride),
    )


def _profile_joint(table: MicrobatchTable, profile: Profile) -> Profile:
    """The profile of what ranks that decide together ask for; `profile` where every rank decides for itself."""
    if table.shared_capture_ranks == 1:
        return profile
    n_seqs, max_seqlen = table.joint(table.n_seqs), table.joint(table.max_seqlen)
    return Profile(n_seqs=Histogram.count(n_seqs), max_seqlen=Histogram.count(max_seqlen))
