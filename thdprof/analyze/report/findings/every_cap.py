"""What every single cap does, in words and numbers: what a page needs to answer for another cap.

The shares follow exactly from the profile's counts for any cap. Step times are those of the profile's grid of caps, and
linear between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.statistics import Histogram
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings.caps import cap_sentences
from thdprof.analyze.report.findings.run import Drift, drift_over, steps_over
from thdprof.analyze.report.words import percent, ratio

_EVERY = 400
"""Largest number of documents up to which a page answers for every cap."""
_THINNED = 500
"""Caps about evenly spaced on a logarithmic axis, of which a page answers for those beyond the first few, else."""

COLUMNS = ("replayed", "microbatch", "rank_step", "step", "time")
"""Columns of the table of caps, by the names that the page's script knows them by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryCap:
    """What every cap of a page does; sequences have an entry for each cap."""

    caps: tuple[int, ...]
    """The caps in documents, ascending."""
    start: int
    """Index of the cap with which the page opens."""
    series: dict[str, tuple[float, ...]]
    """The curves' values: `replayed`, `microbatch`, `rank_step` and `step` as shares; `time_low` and `time_high` where
    times are known."""
    texts: dict[str, tuple[str, ...]]
    """Cells of the table by `COLUMNS`, `cap` the cap itself, `sentence` what the cap does, and `steps` and `drift` the
    ends of these findings' sentences."""
    segments: tuple[tuple[float, ...], ...]
    """Share of steps over each cap in each segment of the run."""
    parts: tuple[tuple[float, ...], ...]
    """Share of steps over each cap in each part that is shown."""


def every_cap(report: Report, cap: int, drift: Drift, parts: tuple[str, ...]) -> EveryCap:
    """What every cap does that the page can be asked about.

    Args:
        report: the report.
        cap: documents of the cap with which the page opens.
        drift: the finding on the run's segments.
        parts: names of the parts that are shown.
    """
    profile = report.profile
    caps = page_caps(report, cap)
    rates = [profile.fallback_rate(n) for n in caps]
    times = report.relative_step_times(caps)
    series = {
        "replayed": tuple(1 - r.microbatch for r in rates),
        "microbatch": tuple(r.microbatch for r in rates),
        "rank_step": tuple(r.rank_step for r in rates),
        "step": tuple(r.step for r in rates),
    }
    texts = {name: tuple(percent(v) for v in values) for name, values in series.items()}
    texts["cap"] = tuple(f"{n:,}" for n in caps)
    texts["sentence"] = tuple(cap_sentences(report, caps))
    texts["steps"] = tuple(steps_over(report, n) for n in caps)
    texts["drift"] = tuple(drift_over(drift.largest, n, several=drift.several) for n in caps)
    if times is not None:
        series["time_low"], series["time_high"] = (tuple(t[end] for t in times) for end in (0, 1))
        texts["time"] = tuple(ratio(t) for t in times)
    at = np.array(caps)
    return EveryCap(
        caps=tuple(caps),
        start=caps.index(cap),
        series=series,
        texts=texts,
        segments=tuple(_over(h, at) for h in drift.largest),
        parts=tuple(_over(profile.histogram("step_max", part=name), at) for name in parts),
    )


def page_caps(report: Report, cap: int) -> list[int]:
    """Caps that a page answers for: every one up to `_EVERY` documents; of more, every one at first, then some."""
    documents = report.profile.histogram()
    most = max(documents.percentile(100.0), cap, *(b.max_seqs for b in report.plan.graphs.buckets), 1)
    if most <= _EVERY:
        return list(range(1, most + 1))
    named = {cap, most, *(c.max_seqs for c in report.profile.caps()), *(b.max_seqs for b in report.plan.graphs.buckets)}
    spaced = np.unique(np.rint(np.geomspace(1, most, _THINNED)).astype(np.int64)).tolist()
    return sorted({n for n in (*named, *spaced) if 1 <= n <= most})


def _over(histogram: Histogram, caps: NDArray[np.int64]) -> tuple[float, ...]:
    """Share of the histogram's values over each of `caps`."""
    within = np.cumsum(histogram.counts)[np.minimum(caps, len(histogram.counts) - 1)]
    return tuple(((histogram.total - within) / histogram.total).tolist())
