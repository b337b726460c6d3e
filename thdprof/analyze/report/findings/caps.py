"""Findings on caps: the cost of every single cap, and why the plan's graphs were chosen."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.statistics import PERCENTILES
from thdprof.analyze.predictions import Range
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, listed, percent, percentile_name, ratio
from thdprof.plan import FallbackRate

_ALIKE = 5e-4
"""Difference of two relative step times that no report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapCurve:
    """The fallbacks and the step time under each single cap; arrays have shape [caps]."""

    title: str
    """The finding in a sentence."""
    max_seqs: NDArray[np.int64]
    """The caps in documents, ascending."""
    coverage: NDArray[np.float64]
    """Share of micro-batches that replay a graph."""
    microbatch: NDArray[np.float64]
    """Share of micro-batches that run eagerly."""
    rank_step: NDArray[np.float64]
    """Share of (rank, step) pairs with an eager micro-batch."""
    step: NDArray[np.float64]
    """Share of steps with an eager micro-batch on any rank."""
    relative_step_time: NDArray[np.float64] | None
    """Lowest and highest mean step time divided by that of running all micro-batches eagerly, shape [caps, 2]; None
    without times."""
    marks: dict[str, int]
    """The caps at percentiles and at the maximum, in documents, by name."""
    plan_step_time: Range | None
    """Relative step time of the plan's own buckets; None without times."""
    plan_data: str
    """Words that the figure adds to this time where the profile also counts data that the plan was not made for."""
    num_buckets: int
    """Buckets of the plan."""
    cap: int
    """The cap that the report is asked about, in documents."""
    cap_rate: FallbackRate
    """The three shares under that cap."""
    cap_step_time: Range | None
    """Relative step time under that cap; None without times."""
    cheaper: str
    """A sentence on graphs that replay quicker than smaller ones; empty where none does, or without times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to train: eagerly, under a single cap, or by the plan."""

    name: str
    """The alternative in words."""
    relative_step_time: Range | None
    """Mean step time divided by that of running all micro-batches eagerly; None without times."""
    rate: FallbackRate
    """The three shares that run eagerly."""
    role: Literal["plan", "cap", "other"]
    """Whether it is the plan, the cap that the report is asked about, or another alternative."""
    cap: int | None
    """The single cap, in documents; None for the plan and for running eagerly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan beside its alternatives."""

    title: str
    """The finding in a sentence."""
    alternatives: tuple[Alternative, ...]
    """All alternatives, the slowest first; without times, the one with most eager micro-batches first."""
    shares: tuple[tuple[str, float], ...]
    """Name and share of micro-batches of each graph of the plan, then of those that run eagerly."""


def cap_curve(report: Report, cap: int) -> CapCurve:
    """The fallbacks and the step time under every single cap, with `cap` marked."""
    profile = report.profile
    frame = profile.curve()
    documents = profile.histogram()
    caps = frame["max_seqs"].tolist()
    times = report.relative_step_times([*caps, cap])
    return CapCurve(
        title=cap_sentences(report, [cap])[0],
        max_seqs=frame["max_seqs"].to_numpy(),
        coverage=frame["coverage"].to_numpy(),
        microbatch=frame["fallback_rate_microbatch"].to_numpy(),
        rank_step=frame["fallback_rate_rank_step"].to_numpy(),
        step=frame["fallback_rate_step"].to_numpy(),
        relative_step_time=None if times is None else np.array(times[:-1]),
        marks={percentile_name(name): documents.percentile(PERCENTILES[name]) for name in ("p90", "p99", "max")},
        plan_step_time=report.times.relative_step_time,
        plan_data=", on its own data" if profile.num_runs > 1 else "",
        num_buckets=len(report.plan.graphs.buckets),
        cap=cap,
        cap_rate=profile.fallback_rate(cap),
        cap_step_time=None if times is None else times[-1],
        cheaper="" if times is None else _cheaper(report),
    )


def cap_sentences(report: Report, caps: list[int]) -> list[str]:
    """What each of `caps` does, in a sentence each, beside the recommended cap."""
    recommended = report.recommended_cap
    times = report.relative_step_times([*caps, recommended or 1])
    grid = {c.max_seqs for c in report.profile.caps()}
    sentences = []
    for index, cap in enumerate(caps):
        rate = report.profile.fallback_rate(cap)
        one = f"One cap of {counted(cap, 'document')} replays"
        if rate.step == 0:
            text = f"{one} every micro-batch"
        else:
            text = (
                f"{one} {percent(1 - rate.microbatch)} of micro-batches, but {percent(rate.step)} of steps wait for an "
                "eager one"
            )
        if times is not None:
            about = "" if cap in grid or cap > max(grid) else "about "
            text += f": a step takes {about}{ratio(times[index])} of its eager time"
            differs = any(abs(a - b) >= _ALIKE for a, b in zip(times[index], times[-1], strict=True))
            if recommended is not None and cap != recommended and differs:
                text += f", under the recommended cap, {recommended:,}, {ratio(times[-1])}"
        sentences.append(f"{text}.")
    return sentences


def _cheaper(report: Report) -> str:
    """On the widest fall of the replay time from one cap of the cost table to the next; empty where none falls."""
    costs, longest = report.profile.costs, report.profile.training.seq_length
    caps = costs.measured_max_seqs()
    times = [costs.replay_ms(n, longest) for n in caps]
    falls = [(before - after, i) for i, (before, after) in enumerate(itertools.pairwise(times))]
    most, at = max(falls, default=(0.0, 0))
    if most <= 0:
        return ""
    small, large = caps[at], caps[at + 1]
    return (
        f"A larger graph can be cheaper: one of {large:,} documents replays in {times[at + 1]:.1f} ms, one of "
        f"{small:,} in {times[at]:.1f} ms by the cost table, since the time of attention kernels need not grow with "
        f"the documents that they are launched for. So from a cap of {small:,} to one of {large:,} the step time falls "
        "for two reasons: fewer micro-batches run eagerly, and the others replay a quicker graph."
    )


def choice(report: Report, cap: int) -> Choice:
    """The plan's buckets beside the usual advice, the recommended single cap and `cap`."""
    plan, profile = report.plan, report.profile
    caps: dict[int, list[str]] = {}
    documents = profile.histogram()
    for name in ("p90", "p99", "max"):
        words = "pad to the most" if name == "max" else f"cap at {percentile_name(name)}"
        caps.setdefault(documents.percentile(PERCENTILES[name]), []).append(words)
    if report.recommended_cap is not None:
        caps.setdefault(report.recommended_cap, []).append("recommended cap")
    if cap != report.default_cap:
        caps.setdefault(cap, []).append("your cap")
    times = report.relative_step_times([*caps])
    known = times is not None
    everything = FallbackRate(microbatch=1.0, rank_step=1.0, step=1.0)
    alternatives = [
        Alternative(
            name="all eager", relative_step_time=(1.0, 1.0) if known else None, rate=everything, role="other", cap=None
        )
    ]
    for index, (at, names) in enumerate(caps.items()):
        alternatives.append(
            Alternative(
                name=f"{', '.join(names)}: {at:,}",
                relative_step_time=None if times is None else times[index],
                rate=profile.fallback_rate(at),
                role="cap" if at == cap else "other",
                cap=at,
            )
        )
    buckets = plan.graphs.buckets
    if buckets:
        own = ", on its own data" if profile.num_runs > 1 else ""
        alternatives.append(
            Alternative(
                name=f"plan{own}: {_short_names(report)}",
                relative_step_time=report.times.relative_step_time if known else None,
                rate=plan.predictions.fallback_rate,
                role="plan",
                cap=None,
            )
        )
    ordered = sorted(alternatives, key=_slowness, reverse=True)
    shares = [(_label(report, i), b.share) for i, b in enumerate(buckets)]
    shares.append(("eager", plan.predictions.fallback_rate.microbatch))
    return Choice(title=_choice_title(report), alternatives=tuple(ordered), shares=tuple(shares))


def _slowness(alternative: Alternative) -> tuple[float, float, str]:
    times = alternative.relative_step_time or (0.0, 0.0)
    return sum(times), alternative.rate.microbatch, alternative.name


def _label(report: Report, index: int) -> str:
    bucket = report.plan.graphs.buckets[index]
    sizes = len({b.cp_size for b in report.plan.graphs.buckets}) > 1
    lengths = len({b.max_seqlen for b in report.plan.graphs.buckets}) > 1 and not sizes
    tail = (
        f", {counted(bucket.cp_size, 'rank')}"
        if sizes
        else f" of {counted(bucket.max_seqlen, 'token')}"
        if lengths
        else ""
    )
    return f"{counted(bucket.max_seqs, 'document')}{tail}"


def bucket_names(report: Report) -> str:
    """The documents of the plan's graphs in words, such as "64, 113 and 358 documents"."""
    buckets = report.plan.graphs.buckets
    alike = len({b.max_seqs for b in buckets}) < len(buckets)
    names = [f"{b.max_seqs:,} (to {b.max_seqlen:,} tokens)" if alike else f"{b.max_seqs:,}" for b in buckets]
    one = len(buckets) == 1 and buckets[0].max_seqs == 1 and not alike
    return f"{listed(names)} {'document' if one else 'documents'}" if len(names) <= 4 else f"{len(names)} shapes"


def _short_names(report: Report) -> str:
    buckets = report.plan.graphs.buckets
    distinct = len({b.max_seqs for b in buckets}) == len(buckets) <= 4
    return listed([f"{b.max_seqs:,}" for b in buckets]) if distinct else f"{len(buckets)} graphs"


def _choice_title(report: Report) -> str:
    plan, profile = report.plan, report.profile
    buckets, rate = plan.graphs.buckets, plan.predictions.fallback_rate
    relative = report.times.relative_step_time
    if not buckets or plan.graphs.impl == "none":
        return _eager_title(report)
    stalls = "no step waits for an eager micro-batch" if rate.step == 0 else f"{percent(rate.step)} of steps wait"
    title = f"Graphs for {bucket_names(report)} were chosen"
    if relative is None:
        replayed = "every micro-batch" if rate.microbatch == 0 else f"{percent(1 - rate.microbatch)} of micro-batches"
        title += f": they replay {replayed}, and {stalls}"
    else:
        title += f" because a step takes {ratio(relative)} of its eager time and {stalls}"
    if profile.num_runs > 1:
        return f"{title}, on the data that the plan was made for."
    one = report.recommended_cap
    if relative is None or one is None or len(buckets) == 1:
        return title + "."
    times = report.relative_step_times([one])
    if times is None:
        return title + "."
    less = [1 - own / single for own, single in zip(relative, times[0], strict=True)]
    if min(less) <= 0:
        return f"{title}."
    low, high = percent(min(less)), percent(max(less))
    return f"{title}: {low if low == high else f'{low} to {high}'} less than under the recommended cap, {one:,}."


def _eager_title(report: Report) -> str:
    """Why running eagerly was chosen."""
    profile = report.profile
    considered = sorted({max(1, profile.histogram().percentile(p)) for p in PERCENTILES.values()})
    times = report.relative_step_times(considered)
    if times is None:
        return "Running eagerly was chosen: the plan captures no graphs."
    # Without limits, a cap that saves more would have been chosen.
    bound = profile.num_runs == 1 and min(high for _, high in times) <= 1 - profile.costs.least_gain
    none = f"no graphs {'within the limits that were given' if bound else 'that were considered'} save"
    return f"Running eagerly was chosen: {none} {profile.costs.least_gain:.0%} of the step time."
