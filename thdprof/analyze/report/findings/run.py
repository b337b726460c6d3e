"""Findings on how documents vary: over ranks and steps, over the run, and between parts of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram
from thdprof.analyze.profile.run_profile import histogram_of, share_over
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, percent, printable, shortened

if TYPE_CHECKING:
    import pandas as pd

MOST_PARTS = 20
LONGEST_NAME = 60
"""Characters of a part's name in a sentence."""
_SKEWED = 8
"""A largest value more than this many times the least median is shown on a logarithmic axis."""
_LEAST = 200
"""Least micro-batches of a segment, where the run has that many: the P99 of fewer would be noise."""
_POINTS = 400
"""Most points of a curve."""
_ONCE_IN_1000 = 1.949
"""Critical value of the two-sample Kolmogorov-Smirnov statistic, which chance exceeds once in 1000 times."""

_ONCE_IN_1000_NORMAL = 3.291
"""Deviations from the mean that a normal distribution exceeds, to either side, once in 1000 times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Documents of a micro-batch, and of the fullest micro-batch of a rank and of a step."""

    title: str
    """The finding in a sentence."""
    curves: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
    """For each name, numbers of documents and the share with more documents than each number."""
    at_cap: dict[str, float]
    """Share with more documents than the cap, by the names of `curves`."""
    cap: int
    """The cap that the report is asked about, in documents."""
    head: str
    """The part of the sentence that does not depend on the cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Documents over the run, segment by segment; arrays have shape [segments]."""

    title: str
    """The finding in a sentence."""
    head: str
    """The part of the sentence that does not depend on the cap."""
    largest: tuple[Histogram, ...]
    """Steps of each segment by the documents of their fullest micro-batch."""
    several: bool
    """Whether several runs were joined."""
    percentiles: dict[str, NDArray[np.int64]]
    """Documents of a micro-batch at p50, p90, p99 and max, by these names."""
    step_median: NDArray[np.int64]
    """Documents of the fullest micro-batch of a step, at the median."""
    stalled: NDArray[np.float64]
    """Share of steps with a micro-batch over the cap."""
    logarithmic: bool
    """Whether documents are so skewed that the figure has a logarithmic axis."""
    steps: int
    """Steps of all runs together."""
    num_runs: int
    """Runs that were counted; each of them was cut into segments by itself."""
    cap: int
    """The cap that the report is asked about, in documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of the data beside one another."""

    title: str
    """The finding in a sentence."""
    keys: tuple[str, ...]
    """The parts that are shown, by their names in the profile, the largest part first."""
    names: tuple[str, ...]
    """Their names with what cannot be printed replaced."""
    percentiles: dict[str, tuple[int, ...]]
    """Documents of a micro-batch at p50, p90, p99 and max, by these names; a value for each part."""
    stalled: tuple[float, ...]
    """Share of steps with a micro-batch over the cap; a value for each part."""
    left_out: int
    """Number of smaller parts that are not shown."""
    cap: int
    """The cap that the report is asked about, in documents."""


def steps(report: Report, cap: int) -> Steps:
    """Shares of micro-batches, ranks and steps over the cap: a step waits for its fullest micro-batch on any rank."""
    rows_of = {
        "a micro-batch": "microbatch",
        "fullest of a rank's step": "rank_step_max",
        "fullest of a step": "step_max",
    }
    histograms = {name: report.profile.histogram(rows) for name, rows in rows_of.items()}
    at_cap = {name: share_over(h, cap) for name, h in histograms.items()}
    micro, step = histograms["a micro-batch"], histograms["fullest of a step"]
    head = (
        f"The fullest micro-batch of a step holds {counted(step.percentile(50.0), 'document')} at the median, where a "
        f"micro-batch holds {micro.percentile(50.0):,}: "
    )
    return Steps(
        title=head + steps_over(report, cap),
        head=head,
        curves={n: _exceeding(h) for n, h in histograms.items()},
        at_cap=at_cap,
        cap=cap,
    )


def steps_over(report: Report, cap: int) -> str:
    """The end of the sentence of `steps`: what lies over `cap`."""
    rate = report.profile.fallback_rate(cap)
    return (
        f"over a cap of {cap:,} are {percent(rate.microbatch)} of micro-batches, and {percent(rate.step)} of steps "
        "have one of them."
    )


def _exceeding(histogram: Histogram) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Values of the histogram, at most `_POINTS`, and the share of larger values than each."""
    values = np.concatenate(([max(0, int(np.flatnonzero(histogram.counts)[0]) - 1)], np.flatnonzero(histogram.counts)))
    if len(values) > _POINTS:
        values = values[np.unique(np.linspace(0, len(values) - 1, _POINTS).astype(np.int64))]
    over = histogram.total - np.cumsum(histogram.counts)
    return values, over[values] / histogram.total


def drift(report: Report, cap: int) -> Drift:
    """Documents over the run: all parts together, each part from its own first step to its last."""
    profile = report.profile
    segments = {part.name: profile.segments(part.name) for part in profile.parts}
    bins = int(np.clip(profile.microbatches // _LEAST, 1, min(map(len, segments.values()))))
    micro, largest = (
        _by_bin(profile.rows(kind), segments, bins) for kind in ("segment_microbatch", "segment_step_max")
    )
    percentiles = {
        name: np.array([h.percentile(PERCENTILES[name]) for h in micro]) for name in ("p50", "p90", "p99", "max")
    }
    several = profile.num_runs > 1
    head = _drift_head(micro, several=several)
    return Drift(
        title=head + drift_over(largest, cap, several=several),
        head=head,
        largest=tuple(largest),
        several=several,
        percentiles=percentiles,
        step_median=np.array([h.percentile(50.0) for h in largest]),
        stalled=np.array([share_over(h, cap) for h in largest]),
        logarithmic=int(percentiles["max"].max()) > _SKEWED * int(percentiles["p50"].min()),
        steps=profile.steps,
        num_runs=profile.num_runs,
        cap=cap,
    )


def _by_bin(rows: pd.DataFrame, segments: Mapping[str, NDArray[np.int64]], bins: int) -> list[Histogram]:
    """Documents in `bins` equal stretches of the run, none of them empty.

    A run of fewer steps than a profile has segments has gaps in its segment numbers. To keep every stretch from being
    empty, a part is cut by the rank of a segment among the segments that the part has, not by the segment's number.

    Args:
        rows: cells of the profile, of one cell kind, with columns `part`, `segment`, `n_seqs` and `count`.
        segments: the segments that each part has, ascending, by the part's name; at least `bins` each.
    """
    of_row = np.empty(len(rows), dtype=np.int64)
    for part, present in segments.items():
        chosen = (rows["part"] == part).to_numpy()
        place = np.searchsorted(present, rows["segment"].to_numpy()[chosen])
        of_row[chosen] = place * bins // len(present)
    return [histogram_of(rows[of_row == index], "n_seqs") for index in range(bins)]


def _stretch(segments: int) -> tuple[int, str]:
    """Segments at each end of the run that are compared, and their name: thirds of the run, or halves of two."""
    return (1, "half") if segments == 2 else (segments // 3, "third")


def _drift_head(micro: Sequence[Histogram], *, several: bool) -> str:
    if len(micro) == 1:
        return f"{'One of the runs that were joined' if several else 'The run'} is too short to tell a drift; "
    run = "the runs that were joined, each by itself," if several else "the run"
    length, share = _stretch(len(micro))
    first, last = (reduce(Histogram.merge, part) for part in (micro[:length], micro[-length:]))
    apart, by_chance = _distance(first, last)
    if apart <= by_chance:
        return (
            f"Documents of a micro-batch do not drift: the first and the last {share} of {run} differ no more than by "
            "chance; "
        )
    early, late = (tuple(h.percentile(p) for p in (50.0, 99.0)) for h in (first, last))
    return (
        f"Documents of a micro-batch drift: from the first {share} of {run} to the last P50 goes from {early[0]:,} to "
        f"{late[0]:,} and P99 from {early[1]:,} to {late[1]:,}; "
    )


def drift_over(largest: Sequence[Histogram], cap: int, *, several: bool) -> str:
    """The end of the sentence of `drift`: the steps over `cap` at the begin and at the end of the run.

    Shares of single segments are not told: a segment has few steps, so that its share jumps where nothing drifts.

    Args:
        largest: steps of each segment by the documents of their fullest micro-batch.
        cap: documents.
        several: whether several runs were joined.
    """
    over = f"over a cap of {cap:,} are "
    if len(largest) == 1:
        return f"{over}{percent(share_over(largest[0], cap))} of {'all' if several else 'its'} steps."
    length, stretch = _stretch(len(largest))
    first, last = (reduce(Histogram.merge, part) for part in (largest[:length], largest[-length:]))
    early, late = share_over(first, cap), share_over(last, cap)
    if early == late:
        return f"{over}{percent(early)} of the steps of both."
    both = (early * first.total + late * last.total) / (first.total + last.total)
    deviation = float(np.sqrt(both * (1 - both) * (1 / first.total + 1 / last.total)))
    chance = "no further apart" if abs(late - early) <= _ONCE_IN_1000_NORMAL * deviation else "further apart"
    return (
        f"{over}{percent(early)} of the first {stretch}'s steps and {percent(late)} of the last's, {chance} than by "
        "chance."
    )


def _distance(one: Histogram, other: Histogram) -> tuple[float, float]:
    """The largest difference of the cumulative shares, and the one that chance alone exceeds once in 1000 times."""
    size = max(len(one.counts), len(other.counts))
    shares = [np.cumsum(np.pad(h.counts, (0, size - len(h.counts)))) / h.total for h in (one, other)]
    by_chance = _ONCE_IN_1000 * float(np.sqrt(1 / one.total + 1 / other.total))
    return float(np.abs(shares[0] - shares[1]).max()), by_chance


def parts(report: Report, cap: int) -> Parts | None:
    """The parts of the profile beside one another; None where it has one part only."""
    every = report.profile.parts
    if len(every) == 1:
        return None
    shown = sorted(every, key=lambda p: -p.microbatches)[:MOST_PARTS]
    histograms = [report.profile.histogram(part=p.name) for p in shown]
    percentiles = {
        name: tuple(h.percentile(PERCENTILES[name]) for h in histograms) for name in ("p50", "p90", "p99", "max")
    }
    p99 = percentiles["p99"]
    low, high = int(np.argmin(p99)), int(np.argmax(p99))
    named = [shortened(p.name, LONGEST_NAME) for p in shown]
    if p99[low] == p99[high]:
        title = f"P99 of documents is {p99[low]:,} in all {counted(len(shown), 'part')} that are shown."
    else:
        title = (
            f"P99 of documents is {p99[high]:,} in {named[high]} and {p99[low]:,} in {named[low]}: "
            "a cap at the P99 of all is not that of each."
        )
    return Parts(
        title=title,
        keys=tuple(p.name for p in shown),
        names=tuple(printable(p.name) for p in shown),
        percentiles=percentiles,
        stalled=tuple(report.profile.fallback_rate(cap, part=p.name).step for p in shown),
        left_out=len(every) - len(shown),
        cap=cap,
    )
