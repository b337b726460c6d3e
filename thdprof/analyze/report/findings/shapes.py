"""Findings on the shapes of micro-batches: documents, and tokens of the longest document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram
from thdprof.analyze.profile.run_profile import share_over
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, percent

_BINS = 40
"""Most bars of a histogram."""
_CELLS = 40
"""Most columns, and most rows, of the map of both measures."""
_POINTS = 400
"""Most points of a curve."""
_SKEWED = 8
"""A largest value more than this many times the median is shown on a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How a measure is spread over micro-batches."""

    edges: NDArray[np.float64]
    """Borders of the bars, half-way between whole numbers, shape [bars + 1]."""
    shares: NDArray[np.float64]
    """Share of micro-batches in each bar, shape [bars]."""
    densities: NDArray[np.float64]
    """Share of micro-batches for each whole number in a bar: bars of unequal width compare by it, shape [bars]."""
    values: NDArray[np.int64]
    """Values that occur, ascending, shape [points]; evenly spaced ones where there are too many for a curve to show."""
    cumulative: NDArray[np.float64]
    """Share of micro-batches with at most each value, shape [points]."""
    percentiles: dict[str, int]
    """Values at the percentiles, by their names in `PERCENTILES`."""
    mean: float
    """Arithmetic mean."""
    logarithmic: bool
    """Whether the values are so skewed that the figure has a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The distributions of a micro-batch's documents and of the tokens of its longest document."""

    title: str
    """The finding in a sentence."""
    n_seqs: Distribution
    """Documents of a micro-batch."""
    max_seqlen: Distribution
    """Tokens of a micro-batch's longest document."""
    cap: int
    """The cap that the report is asked about, in documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Micro-batches counted by documents and by tokens of the longest document together."""

    title: str
    """The finding in a sentence."""
    n_seqs_edges: NDArray[np.float64]
    """Borders of the columns in documents, shape [columns + 1]."""
    max_seqlen_edges: NDArray[np.float64]
    """Borders of the rows in tokens, shape [rows + 1]."""
    counts: NDArray[np.int64]
    """Number of micro-batches in each cell, shape [rows, columns]."""
    logarithmic: bool
    """Whether documents are so skewed that the figure has a logarithmic axis."""
    buckets: tuple[tuple[int, int], ...]
    """The max_seqs and max_seqlen of each of the plan's graphs."""
    border: int
    """P90 of documents: micro-batches with more hold many documents."""
    over_border: float
    """Share of micro-batches with more documents than `border`."""
    long_many: int | None
    """Median tokens of the longest document of micro-batches over `border`; None where no micro-batch is over it."""
    long_few: int
    """Median tokens of the longest document of the other micro-batches."""
    cap: int
    """The cap that the report is asked about, in documents."""


def distribution(histogram: Histogram) -> Distribution:
    """The distribution that `histogram` counts."""
    largest, median = histogram.percentile(100.0), histogram.percentile(50.0)
    logarithmic = largest > _SKEWED * max(1, median)
    edges = bin_edges(largest, _BINS, logarithmic=logarithmic)
    cumulative = np.concatenate(([0], np.cumsum(histogram.counts)))
    below = cumulative[np.clip(np.ceil(edges).astype(np.int64), 0, len(histogram.counts))]
    values = np.flatnonzero(histogram.counts)
    if len(values) > _POINTS:
        values = values[np.unique(np.linspace(0, len(values) - 1, _POINTS).astype(np.int64))]
    return Distribution(
        edges=edges,
        shares=np.diff(below) / histogram.total,
        densities=np.diff(below) / histogram.total / np.diff(edges),
        values=values,
        cumulative=cumulative[values + 1] / histogram.total,
        percentiles={name: histogram.percentile(p) for name, p in PERCENTILES.items()},
        mean=histogram.mean,
        logarithmic=logarithmic,
    )


def bin_edges(largest: int, bins: int, *, logarithmic: bool) -> NDArray[np.float64]:
    """Borders of at most `bins` bins over 1 to `largest`, half-way between whole numbers.

    The bins are equally wide. Where `logarithmic` they are about equally wide on a logarithmic axis, but no bin holds
    fewer whole numbers than the one before it.
    """
    if logarithmic:
        ratio = (largest + 1) ** (1 / bins)
        ends = [1]
        while ends[-1] <= largest:
            last = ends[-1] - ends[-2] if len(ends) > 1 else 1
            ends.append(ends[-1] + max(last, round(ends[-1] * (ratio - 1))))
        numbers = np.array(ends)
    else:
        step = max(1, -(-largest // bins))
        numbers = np.arange(1, largest + step + 1, step)
    return np.asarray(numbers - 0.5)


def shapes(report: Report, cap: int) -> Shapes:
    """The distributions of both measures over micro-batches; `cap` is shown on that of documents."""
    n_seqs = distribution(report.profile.histogram())
    longest = distribution(report.profile.histogram(measure="max_seqlen"))
    s = longest.percentiles
    title = (
        f"{_spread(report.profile.histogram(), n_seqs.percentiles)}; the longest document has "
        f"{counted(s['p50'], 'token')} at the median and {s['max']:,} at most."
    )
    return Shapes(title=title, n_seqs=n_seqs, max_seqlen=longest, cap=cap)


def _spread(documents: Histogram, p: dict[str, int]) -> str:
    """The documents of a micro-batch in words.

    Args:
        documents: micro-batches by their number of documents.
        p: percentiles of that number, by name.
    """
    if p["p50"] == p["max"]:
        if documents.counts[-1] == documents.total:
            return f"Every micro-batch holds {counted(p['max'], 'document')}"
        most = _share_of_most(documents)
        return f"No micro-batch holds more than {counted(p['max'], 'document')}, and {most} of them hold so many"
    text = f"Half of the micro-batches hold at most {counted(p['p50'], 'document')}"
    if p["p99"] == p["max"]:
        return f"{text}, the fullest, {_share_of_most(documents)} of all, {p['max']:,}"
    return f"{text} and {percent(share_over(documents, p['p99']))} more than {p['p99']:,}, the fullest {p['max']:,}"


def _share_of_most(documents: Histogram) -> str:
    """The share of micro-batches with the most documents, in words."""
    return percent(share_over(documents, documents.percentile(100.0) - 1))


def joint(report: Report, cap: int) -> Joint:
    """Micro-batches by both measures together, with the borders of the plan's graphs."""
    rows = report.profile.rows("microbatch")
    n_seqs, max_seqlen, count = (rows[c].to_numpy(dtype=np.int64) for c in ("n_seqs", "max_seqlen", "count"))
    documents = report.profile.histogram()
    most, median = documents.percentile(100.0), documents.percentile(50.0)
    logarithmic = most > _SKEWED * max(1, median)
    x = bin_edges(most, _CELLS, logarithmic=logarithmic)
    y = bin_edges(int(max_seqlen.max()), _CELLS, logarithmic=False)
    column = np.clip(np.searchsorted(x, n_seqs) - 1, 0, len(x) - 2)
    row = np.clip(np.searchsorted(y, max_seqlen) - 1, 0, len(y) - 2)
    shape = (len(y) - 1, len(x) - 1)
    cells = np.bincount(row * shape[1] + column, weights=count, minlength=shape[0] * shape[1])
    border, long_many, long_few = _apart(n_seqs, max_seqlen, count, documents)
    return Joint(
        border=border,
        over_border=share_over(documents, border),
        long_many=long_many,
        long_few=long_few,
        title=joint_title(n_seqs, max_seqlen, count, documents),
        n_seqs_edges=x,
        max_seqlen_edges=y,
        counts=cells.astype(np.int64).reshape(shape),
        logarithmic=logarithmic,
        buckets=tuple((b.max_seqs, b.max_seqlen) for b in report.plan.graphs.buckets),
        cap=cap,
    )


def _apart(
    n_seqs: NDArray[np.int64], max_seqlen: NDArray[np.int64], count: NDArray[np.int64], documents: Histogram
) -> tuple[int, int | None, int]:
    """P90 of documents, and the median longest document of micro-batches with more, if any, and of the others."""
    border = documents.percentile(90.0)
    many = n_seqs > border
    few = _median(max_seqlen[~many], count[~many])
    return border, _median(max_seqlen[many], count[many]) if many.any() else None, few


def joint_title(
    n_seqs: NDArray[np.int64], max_seqlen: NDArray[np.int64], count: NDArray[np.int64], documents: Histogram
) -> str:
    """A sentence that says whether micro-batches of many documents have longer or shorter documents than the others.

    Args:
        n_seqs: documents of each distinct shape of a micro-batch, of shape (shapes,).
        max_seqlen: tokens of the longest document of each shape.
        count: micro-batches of each shape.
        documents: micro-batches by their number of documents, whose P90 parts the many from the others.
    """
    border, long_many, long_few = _apart(n_seqs, max_seqlen, count, documents)
    if long_many is None:
        most = percent(float(count[n_seqs == border].sum() / count.sum()))
        return f"{most} of micro-batches hold the most documents there are, {border:,}."
    share = percent(share_over(documents, border))
    relation = "longer than" if long_many > long_few else "as long as" if long_many == long_few else "shorter than"
    return (
        f"Where documents are many they are {relation} elsewhere: the {share} of micro-batches with more than "
        f"{border:,} have a longest document of {counted(long_many, 'token')} at the median, the others of "
        f"{long_few:,}."
    )


def _median(values: NDArray[np.int64], count: NDArray[np.int64]) -> int:
    return Histogram(np.bincount(values, weights=count).astype(np.int64)).percentile(50.0)
