"""Findings on caps: the cost of every single cap, and why the plan's graphs were chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.recommend import LEAST_GAIN
from thdprof.analyze.buckets.statistics import PERCENTILES
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, listed, percent, percentile_name


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
    relative_step_time: NDArray[np.float64]
    """Mean step time divided by that of running all micro-batches eagerly."""
    marks: dict[str, tuple[int, float]]
    """The caps at percentiles and at the maximum, in documents, with their relative step times, by name."""
    plan_step_time: float
    """Relative step time of the plan's own buckets."""
    plan_data: str
    """Words that the figure adds to this time where the profile also counts data that the plan was not made for."""
    num_buckets: int
    """Buckets of the plan."""
    cap: int
    """The cap that the report is asked about, in documents."""
    cap_step_time: float
    """Relative step time under that cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to train: eagerly, under a single cap, or by the plan."""

    name: str
    """The alternative in words."""
    relative_step_time: float
    """Mean step time divided by that of running all micro-batches eagerly."""
    stalled: float
    """Share of steps with an eager micro-batch."""
    role: Literal["plan", "cap", "other"]
    """Whether it is the plan, the cap that the report is asked about, or another alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan beside its alternatives."""

    title: str
    """The finding in a sentence."""
    alternatives: tuple[Alternative, ...]
    """All alternatives, the slowest first."""
    shares: tuple[tuple[str, float], ...]
    """Name and share of micro-batches of each graph of the plan, then of those that run eagerly."""


def cap_curve(report: Report, cap: int) -> CapCurve:
    """The fallbacks and the step time under every single cap, with `cap` marked."""
    profile = report.profile
    frame = profile.curve()
    documents = profile.histogram()
    marks: dict[str, tuple[int, float]] = {}
    for name in ("p90", "p99", "max"):
        at = documents.percentile(PERCENTILES[name])
        marks[f"{percentile_name(name)} {at:,}"] = (at, profile.relative_step_time(at))
    own = profile.relative_step_time(cap)
    best = frame.iloc[int(frame["relative_step_time"].to_numpy().argmin())]
    rate = profile.fallback_rate(cap)
    known = cap > int(frame["max_seqs"].iloc[-1]) or cap in frame["max_seqs"].to_numpy()
    takes = f"a step takes {'' if known else 'about '}{own:.3f} of its eager time"
    title = (
        f"One cap of {counted(cap, 'document')} replays {percent(1 - rate.microbatch)} of micro-batches, but "
        f"{percent(rate.step)} of steps wait for an eager one: {takes}"
    )
    if rate.step == 0:
        title = f"One cap of {counted(cap, 'document')} replays every micro-batch: {takes}"
    if best["relative_step_time"] < own - 5e-4:
        title += f", at the quickest cap, {int(best['max_seqs']):,}, {best['relative_step_time']:.3f}."
    else:
        title += ", and no other cap is quicker."
    return CapCurve(
        title=title,
        max_seqs=frame["max_seqs"].to_numpy(),
        coverage=frame["coverage"].to_numpy(),
        microbatch=frame["fallback_rate_microbatch"].to_numpy(),
        rank_step=frame["fallback_rate_rank_step"].to_numpy(),
        step=frame["fallback_rate_step"].to_numpy(),
        relative_step_time=frame["relative_step_time"].to_numpy(),
        marks=marks,
        plan_step_time=report.plan.predictions.relative_step_time,
        plan_data=",\non its own data" if len(profile.parts) > 1 else "",
        num_buckets=len(report.plan.graphs.buckets),
        cap=cap,
        cap_step_time=own,
    )


def choice(report: Report, cap: int) -> Choice:
    """The plan's buckets beside the usual advice, the best single cap and `cap`."""
    plan, profile = report.plan, report.profile
    alternatives = [Alternative(name="all eager", relative_step_time=1.0, stalled=1.0, role="other")]
    caps: dict[int, list[str]] = {}
    documents = profile.histogram()
    for name in ("p90", "p99", "max"):
        words = "pad to the most" if name == "max" else f"cap at {percentile_name(name)}"
        caps.setdefault(documents.percentile(PERCENTILES[name]), []).append(words)
    one = plan.graphs.one_cap
    if one is not None:
        caps.setdefault(one.max_seqs, []).append("plan's one cap")
    caps.setdefault(cap, []).append("your cap")
    for at, names in caps.items():
        alternatives.append(
            Alternative(
                name=f"{', '.join(names)}: {at:,}",
                relative_step_time=profile.relative_step_time(at),
                stalled=profile.fallback_rate(at).step,
                role="cap" if at == cap else "other",
            )
        )
    buckets = plan.graphs.buckets
    if buckets:
        own = ", on its own data" if len(profile.parts) > 1 else ""
        alternatives.append(
            Alternative(
                name=f"plan{own}: {_short_names(report)}",
                relative_step_time=plan.predictions.relative_step_time,
                stalled=plan.predictions.fallback_rate.step,
                role="plan",
            )
        )
    ordered = sorted(alternatives, key=lambda a: (-a.relative_step_time, a.name))
    shares = [(_label(report, i), b.share) for i, b in enumerate(buckets)]
    shares.append(("eager", plan.predictions.fallback_rate.microbatch))
    return Choice(title=_choice_title(report), alternatives=tuple(ordered), shares=tuple(shares))


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


def _bucket_names(report: Report) -> str:
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
    buckets, predicted = plan.graphs.buckets, plan.predictions
    if not buckets or plan.graphs.impl == "none":
        considered = {profile.histogram().percentile(p) for p in PERCENTILES.values()}
        best = min(profile.relative_step_time(max(1, cap)) for cap in considered)
        bound = profile.num_runs == 1 and best <= 1 - LEAST_GAIN  # but for limits, that cap would have been chosen
        none = f"no graphs {'within the limits that were given' if bound else 'that were considered'} save"
        return f"Running eagerly was chosen: {none} {LEAST_GAIN:.0%} of the step time."
    stalled = predicted.fallback_rate.step
    stalls = "no step waits for an eager micro-batch" if stalled == 0 else f"{percent(stalled)} of steps wait"
    title = (
        f"Graphs for {_bucket_names(report)} were chosen because a step takes "
        f"{predicted.relative_step_time:.3f} of its eager time and {stalls}"
    )
    if len(profile.parts) > 1:
        return f"{title}, on the data that the plan was made for."
    one = plan.graphs.one_cap
    if one is None or len(buckets) == 1:
        return title + "."
    ratio = profile.relative_step_time(one.max_seqs)
    less = 1 - predicted.relative_step_time / ratio
    return f"{title}: {percent(less)} less than the best single cap, {one.max_seqs:,}." if less > 0 else f"{title}."
