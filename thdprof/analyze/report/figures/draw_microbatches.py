"""Draws the findings on the micro-batches: their shapes, and how these vary over ranks, steps and parts of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thdprof.analyze.report import findings
from thdprof.analyze.report.figures.axes import CAP_LINE, STYLES, cap_line, percent_format, scale, whole_numbers
from thdprof.analyze.report.figures.canvas import BLUE, INK, ORANGE, Drawing, canvas, drawing
from thdprof.analyze.report.findings.shapes import Distribution
from thdprof.analyze.report.words import counted, percent, percentile_name, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"p50": "o", "p90": "s", "p95": "D", "p99": "^", "p99_9": "v", "max": "X"}
"""The marker of each percentile on a cumulative curve."""
_LONGEST_NAME = 28
"""Characters of a part's name beside its row."""


def shapes(finding: findings.Shapes) -> Drawing:
    """A histogram above a cumulative curve for each measure: documents, and tokens of the longest document."""
    with canvas(6.2, finding.title) as figure:
        axes = figure.subplots(2, 2, sharex="col")
        measures = (("documents of a micro-batch", finding.n_seqs), ("longest document, tokens", finding.max_seqlen))
        for column, (label, spread) in enumerate(measures):
            _histogram(axes[0, column], spread)
            _cumulative(axes[1, column], spread)
            axes[1, column].set_xlabel(label)
        axes[0, 0].set_ylabel("share of micro-batches")
        axes[1, 0].set_ylabel("share of at most so many")
        cap_line(axes[0, 0], finding.cap)
        axes[1, 0].axvline(finding.cap, **CAP_LINE)
        alt = (
            "Two histograms above two cumulative curves: documents of a micro-batch and tokens of its longest. "
            + "; ".join(
                f"{label}: " + ", ".join(f"{percentile_name(n)} {v:,}" for n, v in spread.percentiles.items())
                for label, spread in measures
            )
        )
        return drawing(figure, "shapes", finding.title, alt)


def _histogram(axis: Axes, spread: Distribution) -> None:
    axis.bar(spread.edges[:-1], spread.shares, np.diff(spread.edges), align="edge", color=BLUE, alpha=0.75, linewidth=0)
    axis.yaxis.set_major_formatter(percent_format())
    scale(axis, logarithmic=spread.logarithmic, largest=int(spread.values[-1]), narrow=True)


def _cumulative(axis: Axes, spread: Distribution) -> None:
    axis.step(spread.values, spread.cumulative, where="post", color=BLUE)
    for name, value in spread.percentiles.items():
        at = float(spread.cumulative[np.searchsorted(spread.values, value, side="right") - 1])
        label = f"{percentile_name(name)} {value:,}"
        axis.plot([value], [at], _MARKERS[name], color=INK, markerfacecolor="none", label=label, linestyle="none")
    axis.yaxis.set_major_formatter(percent_format())
    axis.set_ylim(-0.03, 1.06)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=3, fontsize=8.5)


def joint(finding: findings.Joint) -> Drawing:
    """A map that counts micro-batches by documents and by tokens of the longest document."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba

    with canvas(4.6, finding.title) as figure:
        axis = figure.subplots()
        counts = np.ma.masked_equal(finding.counts, 0)
        # a cell with more micro-batches is more opaque: darker on white, brighter on black
        shades = LinearSegmentedColormap.from_list("counts", [to_rgba(BLUE, alpha) for alpha in (0.2, 1.0)])
        most = max(1, int(finding.counts.max()))
        mesh = axis.pcolormesh(
            finding.n_seqs_edges,
            finding.max_seqlen_edges,
            counts,
            norm=LogNorm(min(1, most / 2), most),  # where no cell holds more than one, each is fully opaque
            cmap=shades,
            rasterized=True,
            linewidth=0,
        )
        bar = figure.colorbar(mesh, ax=axis, label="micro-batches", pad=0.01)
        whole_numbers(bar.ax.yaxis, logarithmic=True)
        left, bottom = finding.n_seqs_edges[0], finding.max_seqlen_edges[0]
        for number, (seqs, length) in enumerate(finding.buckets):
            axis.plot(
                [left, seqs + 0.5, seqs + 0.5], [length + 0.5, length + 0.5, bottom], color=INK, linewidth=1.1,
                linestyle=(0, (1, 1 + 0.7 * (number % 4))), clip_on=True,
            )  # fmt: skip
            if length < max(longest for other, longest in finding.buckets if other == seqs):
                continue  # a number of documents is named once, at its longest bucket
            axis.annotate(
                f"graph {seqs:,}", (seqs + 0.5, length + 0.5), xytext=(-2, -4), textcoords="offset points",
                fontsize=8.5, rotation=90, ha="right", va="top",
            )  # fmt: skip
        cap_line(axis, finding.cap)
        scale(axis, logarithmic=finding.logarithmic, largest=int(finding.n_seqs_edges[-1]))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("documents of a micro-batch")
        axis.set_ylabel("longest document, tokens")
        axis.grid(False)
        top = max([finding.n_seqs_edges[-1], *(s + 0.5 for s, _ in finding.buckets), finding.cap])
        axis.set_xlim(left, top * (1.15 if finding.logarithmic else 1.04))
        axis.set_ylim(bottom, finding.max_seqlen_edges[-1] * 1.04)
        alt = (
            "A map of how many micro-batches have so many documents and so long a longest document, the plan's graphs "
            "as dotted borders and the cap as a dashed line."
        )
        return drawing(figure, "joint", finding.title, alt)


def steps(finding: findings.Steps) -> Drawing:
    """The share of micro-batches, ranks and steps over each number of documents, as falling curves."""
    with canvas(3.9, finding.title) as figure:
        axis = figure.subplots()
        for (name, (values, over)), (colour, dash, marker) in zip(finding.curves.items(), STYLES, strict=False):
            share = finding.at_cap[name]
            axis.step(
                values, over, where="post", linestyle=dash, color=colour, label=f"{name}: {percent(share)} over the cap"
            )
            axis.plot([finding.cap], [share], marker, color=colour)
        axis.set_ylim(-0.03, 1.06)
        axis.set_xlabel("documents")
        axis.set_ylabel("share with more")
        axis.yaxis.set_major_formatter(percent_format())
        cap_line(axis, finding.cap)
        largest = max(int(values[-1]) for values, _ in finding.curves.values())
        scale(axis, logarithmic=largest > 40, largest=largest)
        if largest > 40:
            axis.set_xlim(left=1)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        alt = "Falling curves of the share with more than so many documents. Over the cap: " + ", ".join(
            f"{name} {percent(share)}" for name, share in finding.at_cap.items()
        )
        return drawing(figure, "steps", finding.title, alt)


def drift(finding: findings.Drift) -> Drawing:
    """Percentiles of documents over the run above, and the share of stalled steps below."""
    from matplotlib.ticker import MaxNLocator

    segments = np.arange(1, len(finding.stalled) + 1)
    with canvas(5.0, finding.title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (name, values), (colour, dash, marker) in zip(finding.percentiles.items(), STYLES, strict=True):
            upper.plot(
                segments, values, dash, color=colour, marker=marker, markersize=4,
                label=f"{percentile_name(name)} of micro-batches",
            )  # fmt: skip
        upper.plot(
            segments, finding.step_median, color=INK, alpha=0.6, linewidth=1, label="fullest of a step, at the median"
        )
        upper.axhline(finding.cap, **CAP_LINE, label=f"cap {finding.cap:,}")
        if finding.logarithmic:
            upper.set_yscale("log")
        else:
            upper.set_ylim(bottom=0)
        whole_numbers(upper.yaxis, logarithmic=finding.logarithmic)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        upper.set_ylabel("documents")
        upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        lower.bar(
            segments, finding.stalled, width=0.9, color=ORANGE, alpha=0.75, hatch="///", edgecolor=INK, linewidth=0.3
        )
        lower.set_ylim(0, 1.05)
        lower.set_ylabel(f"steps over {finding.cap:,}")
        lower.yaxis.set_major_formatter(percent_format())
        run = "the run" if finding.num_runs == 1 else "each run"
        each = max(1, round(finding.steps / finding.num_runs / len(segments)))
        lower.set_xlabel(f"segment of {run}, about {counted(each, 'step')} each")
        low, high = percent(finding.stalled.min()), percent(finding.stalled.max())
        alt = f"Percentiles of documents in {len(segments)} segments of the run; steps over the cap: {low} to {high}."
        return drawing(figure, "drift", finding.title, alt)


def parts(finding: findings.Parts) -> Drawing:
    """The percentiles of every part as dots, beside its share of stalled steps."""
    rows = np.arange(len(finding.names))
    with canvas(1.9 + 0.3 * len(rows), finding.title) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for (name, values), (colour, _, marker) in zip(finding.percentiles.items(), STYLES, strict=True):
            left.plot(values, rows, marker, color=colour, linestyle="none", label=percentile_name(name))
        cap_line(left, finding.cap)
        left.set_yticks(rows, [shortened(n, _LONGEST_NAME) for n in finding.names])
        left.set_ylim(len(rows) - 0.5, -0.8)
        scale(left, logarithmic=True, largest=max(finding.percentiles["max"]), narrow=True)
        left.set_xlabel(
            "documents of a micro-batch" + (f"; {finding.left_out} smaller parts left out" if finding.left_out else "")
        )
        left.legend(loc="upper left", bbox_to_anchor=(0, -0.32 if len(rows) < 4 else -0.2), ncols=4, fontsize=8.5)
        right.barh(
            rows, finding.stalled, height=0.6, color=ORANGE, alpha=0.75, hatch="///", edgecolor=INK, linewidth=0.4
        )
        for row, share in zip(rows, finding.stalled, strict=True):
            right.text(share + 0.02, row, percent(share), va="center", fontsize=8.5)
        right.set_xlim(0, 1.25)
        right.set_xticks([0, 0.5, 1])
        right.xaxis.set_major_formatter(percent_format())
        right.set_xlabel(f"steps over {counted(finding.cap, 'document')}")
        alt = "Percentiles of each part: " + "; ".join(
            f"{n}: " + ", ".join(f"{percentile_name(k)} {v[i]:,}" for k, v in finding.percentiles.items())
            for i, n in enumerate(finding.names)
        )
        return drawing(figure, "parts", finding.title, alt)
