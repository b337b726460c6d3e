"""Draws findings."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.analyze.report import findings
from thdprof.analyze.report.figures.canvas import BLUE, GREEN, INK, ORANGE, Drawing, canvas, drawing
from thdprof.analyze.report.findings.shapes import Distribution
from thdprof.analyze.report.words import counted, percent, percentile_name, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Formatter

_MARKERS = {"p50": "o", "p90": "s", "p95": "D", "p99": "^", "p99_9": "v", "max": "X"}
_STYLES = ((BLUE, "-", "o"), (GREEN, "--", "s"), (ORANGE, "-.", "^"), (INK, ":", "X"))
"""Colour, dash and marker of the first, second, ... line."""
_HATCHES = ("", "///", "--", "xx", "||")
_CAP: dict[str, Any] = {"color": ORANGE, "linestyle": (0, (5, 2)), "linewidth": 1.3}
"""The line of the cap that is asked about."""
_NEAR = 0.7
_MOST_BARS = 40
_LONGEST_NAME = 28


def shapes(found: findings.Shapes) -> Drawing:
    """Histograms above cumulative curves, for both measures."""
    with canvas(6.2, found.title) as figure:
        axes = figure.subplots(2, 2, sharex="col")
        measures = (("documents of a micro-batch", found.n_seqs), ("longest document, tokens", found.max_seqlen))
        for column, (label, spread) in enumerate(measures):
            _histogram(axes[0, column], spread)
            _cumulative(axes[1, column], spread)
            axes[1, column].set_xlabel(label)
        axes[0, 0].set_ylabel("share of micro-batches")
        axes[1, 0].set_ylabel("share of at most so many")
        _cap_line(axes[0, 0], found.cap)
        axes[1, 0].axvline(found.cap, **_CAP)
        alt = (
            "Two histograms above two cumulative curves: documents of a micro-batch and tokens of its longest. "
            + "; ".join(
                f"{label}: " + ", ".join(f"{percentile_name(n)} {v:,}" for n, v in spread.percentiles.items())
                for label, spread in measures
            )
        )
        return drawing(figure, "shapes", found.title, alt)


def _histogram(axis: Axes, spread: Distribution) -> None:
    axis.bar(spread.edges[:-1], spread.shares, np.diff(spread.edges), align="edge", color=BLUE, alpha=0.75, linewidth=0)
    axis.yaxis.set_major_formatter(_percent_format())
    _scale(axis, logarithmic=spread.logarithmic, largest=int(spread.values[-1]), narrow=True)


def _cumulative(axis: Axes, spread: Distribution) -> None:
    axis.step(spread.values, spread.cumulative, where="post", color=BLUE)
    for name, value in spread.percentiles.items():
        at = float(spread.cumulative[np.searchsorted(spread.values, value, side="right") - 1])
        label = f"{percentile_name(name)} {value:,}"
        axis.plot([value], [at], _MARKERS[name], color=INK, markerfacecolor="none", label=label, linestyle="none")
    axis.yaxis.set_major_formatter(_percent_format())
    axis.set_ylim(-0.03, 1.06)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=3, fontsize=8.5)


def _scale(axis: Axes, *, logarithmic: bool, largest: int, smallest: int = 1, narrow: bool = False) -> None:
    """Whole numbers along x, from `smallest` to `largest`, as many as an axis, or half a figure, has room for."""
    if logarithmic:
        axis.set_xscale("log")
    crowded = largest > (500 if narrow else 2_000) and largest > 100 * smallest
    most = (4 if largest >= 10_000 else 6) if narrow else 9
    _whole_numbers(axis.xaxis, logarithmic=logarithmic, subs=(1.0,) if crowded else (1.0, 2.0, 5.0), most=most)


def _whole_numbers(axis: Axis, *, logarithmic: bool, subs: tuple[float, ...] = (1.0, 2.0, 5.0), most: int = 10) -> None:
    """Ticks that read 1, 2, 5, 10, ... where `logarithmic`, without powers; else at most `most` steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if logarithmic:
        axis.set_major_locator(LogLocator(subs=subs, numticks=50))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))


def _percent_format() -> Formatter:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=None)


def _cap_line(axis: Axes, cap: int) -> None:
    axis.axvline(cap, **_CAP)
    axis.annotate(
        f"cap {cap:,}", (cap, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
        fontsize=8.5, ha="center", va="bottom",
    )  # fmt: skip


def joint(found: findings.Joint) -> Drawing:
    """A map of micro-batches by both measures."""
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba

    with canvas(4.6, found.title) as figure:
        axis = figure.subplots()
        counts = np.ma.masked_equal(found.counts, 0)
        # more is more opaque: darker on white, brighter on black
        shades = LinearSegmentedColormap.from_list("counts", [to_rgba(BLUE, alpha) for alpha in (0.2, 1.0)])
        most = max(1, int(found.counts.max()))
        mesh = axis.pcolormesh(
            found.n_seqs_edges,
            found.max_seqlen_edges,
            counts,
            norm=LogNorm(min(1, most / 2), most),  # a single micro-batch is as dark as any
            cmap=shades,
            rasterized=True,
            linewidth=0,
        )
        bar = figure.colorbar(mesh, ax=axis, label="micro-batches", pad=0.01)
        _whole_numbers(bar.ax.yaxis, logarithmic=True)
        left, bottom = found.n_seqs_edges[0], found.max_seqlen_edges[0]
        for number, (seqs, length) in enumerate(found.buckets):
            axis.plot(
                [left, seqs + 0.5, seqs + 0.5], [length + 0.5, length + 0.5, bottom], color=INK, linewidth=1.1,
                linestyle=(0, (1, 1 + 0.7 * (number % 4))), clip_on=True,
            )  # fmt: skip
            if length < max(longest for other, longest in found.buckets if other == seqs):
                continue  # named once, at its longest
            axis.annotate(
                f"graph {seqs:,}", (seqs + 0.5, length + 0.5), xytext=(-2, -4), textcoords="offset points",
                fontsize=8.5, rotation=90, ha="right", va="top",
            )  # fmt: skip
        _cap_line(axis, found.cap)
        _scale(axis, logarithmic=found.logarithmic, largest=int(found.n_seqs_edges[-1]))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("documents of a micro-batch")
        axis.set_ylabel("longest document, tokens")
        axis.grid(False)
        top = max([found.n_seqs_edges[-1], *(s + 0.5 for s, _ in found.buckets), found.cap])
        axis.set_xlim(left, top * (1.15 if found.logarithmic else 1.04))
        axis.set_ylim(bottom, found.max_seqlen_edges[-1] * 1.04)
        alt = (
            "A map of how many micro-batches have so many documents and so long a longest document, the plan's graphs "
            "as dotted borders and the cap as a dashed line."
        )
        return drawing(figure, "joint", found.title, alt)


def caps(found: findings.CapCurve) -> Drawing:
    """Rates above, step time below."""
    with canvas(6.2, found.title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        rates = {
            "micro-batches that replay": found.coverage,
            "eager micro-batches": found.microbatch,
            "(rank, step) with an eager one": found.rank_step,
            "steps with an eager one": found.step,
        }
        styles = ((INK, ":", "."), *_STYLES[:3])
        for (name, values), (colour, dash, marker) in zip(rates.items(), styles, strict=True):
            upper.plot(found.max_seqs, values, dash, color=colour, marker=marker, markersize=4, label=name)
        upper.set_ylim(-0.04, 1.08)
        upper.set_ylabel("share")
        upper.yaxis.set_major_formatter(_percent_format())
        upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        lower.plot(found.max_seqs, found.relative_step_time, "-", color=BLUE, marker="o", markersize=4, label="one cap")
        if found.num_buckets:
            name = f"the plan's {counted(found.num_buckets, 'graph')}: {found.plan_step_time:.3f}{found.plan_data}"
            lower.axhline(found.plan_step_time, color=GREEN, linestyle="--", label=name)
        for (name, (cap, time)), marker in zip(found.marks.items(), "s^X", strict=True):
            lower.plot(
                [cap], [time], marker, color=INK, markerfacecolor="none", markersize=9, linestyle="none",
                label=f"{name}: {time:.3f}",
            )  # fmt: skip
        lower.plot(
            [found.cap], [found.cap_step_time], "D", color=ORANGE, markersize=6, linestyle="none",
            label=f"cap {found.cap:,}: {found.cap_step_time:.3f}",
        )  # fmt: skip
        lower.set_ylim(*_time_limits(found))
        lower.set_ylabel("step time, all eager = 1")
        lower.set_xlabel("cap, documents")
        lower.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        _cap_line(upper, found.cap)
        lower.axvline(found.cap, **_CAP)
        for axis in (upper, lower):
            _scale(axis, logarithmic=True, largest=int(found.max_seqs[-1]), smallest=int(found.max_seqs[0]))
        alt = (
            "Above, the share of micro-batches that replay and the three shares that fall back, over the cap; below, "
            "the step time relative to eager: "
            + ", ".join(f"{name} {time:.3f}" for name, (_, time) in found.marks.items())
            + f", cap {found.cap:,} {found.cap_step_time:.3f}."
        )
        return drawing(figure, "caps", found.title, alt)


def _time_limits(found: findings.CapCurve) -> tuple[float, float]:
    """From 0, unless all times are so near to one another that nothing would be seen."""
    times = [*found.relative_step_time, found.plan_step_time, found.cap_step_time]
    low, high = min(times), max(times)
    if low < _NEAR * high:
        return 0.0, max(1.08, high * 1.05)
    spread = max(high - low, 0.01)
    return low - 0.4 * spread, high + 0.3 * spread


def choice(found: findings.Choice) -> Drawing:
    """Alternatives as bars, and the shares of the plan's graphs."""
    from matplotlib.ticker import MaxNLocator

    rows = len(found.alternatives)
    with canvas(1.5 + 0.4 * max(rows, len(found.shares)), found.title) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        looks = {"other": (BLUE, "", 0.55), "cap": (ORANGE, "///", 0.75), "plan": (GREEN, "\\\\\\", 0.85)}
        top = max(a.relative_step_time for a in found.alternatives)
        for row, way in enumerate(found.alternatives):
            colour, hatch, alpha = looks[way.kind]
            left.barh(row, way.relative_step_time, color=colour, hatch=hatch, alpha=alpha, edgecolor=INK, linewidth=0.4)
            left.text(
                way.relative_step_time + 0.015 * top,
                row,
                f"{way.relative_step_time:.3f}, {percent(way.stalled)} of steps stall",
                va="center",
                fontsize=8.5,
            )
        left.set_yticks(range(rows), [textwrap.fill(a.name, 26) for a in found.alternatives])
        left.set_xlim(0, top * 1.75)
        left.set_xticks([tick for tick in MaxNLocator(4).tick_values(0, max(1, top)) if tick <= max(1, top)])
        left.set_xlabel("step time, all eager = 1; steps that wait for an eager one stall")
        _share_bars(right, found.shares)
        for axis in (left, right):
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.tick_params(axis="y", length=0)
        alt = "Bars of the step time of " + "; ".join(
            f"{a.name}: {a.relative_step_time:.3f}, {percent(a.stalled)} of steps stall" for a in found.alternatives
        )
        alt += ". Bars of the plan's graphs: " + ", ".join(f"{n} {percent(s)}" for n, s in found.shares) + "."
        return drawing(figure, "choice", found.title, alt)


def _share_bars(axis: Axes, shares: tuple[tuple[str, float], ...]) -> None:
    for row, (name, share) in enumerate(shares):
        eager = name == "eager"
        axis.barh(
            row, share, color=ORANGE if eager else GREEN, hatch="///" if eager else "\\\\\\", alpha=0.8, edgecolor=INK,
            linewidth=0.4,
        )  # fmt: skip
        axis.text(share + 0.02, row, percent(share), va="center", fontsize=8.5)
    axis.set_yticks(range(len(shares)), [textwrap.fill(name, 16) for name, _ in shares])
    axis.set_xlim(0, 1.25)
    axis.set_xticks([0, 0.5, 1])
    axis.xaxis.set_major_formatter(_percent_format())
    axis.set_xlabel("share of micro-batches")


def steps(found: findings.Steps) -> Drawing:
    """Shares over each number of documents."""
    with canvas(3.9, found.title) as figure:
        axis = figure.subplots()
        for (name, (values, over)), (colour, dash, marker) in zip(found.curves.items(), _STYLES, strict=False):
            share = found.at_cap[name]
            axis.step(
                values, over, where="post", linestyle=dash, color=colour, label=f"{name}: {percent(share)} over the cap"
            )
            axis.plot([found.cap], [share], marker, color=colour)
        axis.set_ylim(-0.03, 1.06)
        axis.set_xlabel("documents")
        axis.set_ylabel("share with more")
        axis.yaxis.set_major_formatter(_percent_format())
        _cap_line(axis, found.cap)
        largest = max(int(values[-1]) for values, _ in found.curves.values())
        _scale(axis, logarithmic=largest > 40, largest=largest)
        if largest > 40:
            axis.set_xlim(left=1)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        alt = "Falling curves of the share with more than so many documents. Over the cap: " + ", ".join(
            f"{name} {percent(share)}" for name, share in found.at_cap.items()
        )
        return drawing(figure, "steps", found.title, alt)


def drift(found: findings.Drift) -> Drawing:
    """Percentiles above, stalled steps below, over the run."""
    from matplotlib.ticker import MaxNLocator

    segments = np.arange(1, len(found.stalled) + 1)
    with canvas(5.0, found.title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (name, values), (colour, dash, marker) in zip(found.percentiles.items(), _STYLES, strict=True):
            upper.plot(
                segments, values, dash, color=colour, marker=marker, markersize=4,
                label=f"{percentile_name(name)} of micro-batches",
            )  # fmt: skip
        upper.plot(
            segments, found.step_median, color=INK, alpha=0.6, linewidth=1, label="fullest of a step, at the median"
        )
        upper.axhline(found.cap, **_CAP, label=f"cap {found.cap:,}")
        if found.logarithmic:
            upper.set_yscale("log")
        else:
            upper.set_ylim(bottom=0)
        _whole_numbers(upper.yaxis, logarithmic=found.logarithmic)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        upper.set_ylabel("documents")
        upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        lower.bar(
            segments, found.stalled, width=0.9, color=ORANGE, alpha=0.75, hatch="///", edgecolor=INK, linewidth=0.3
        )
        lower.set_ylim(0, 1.05)
        lower.set_ylabel(f"steps over {found.cap:,}")
        lower.yaxis.set_major_formatter(_percent_format())
        run = "the run" if found.num_runs == 1 else "each run"
        each = max(1, round(found.steps / found.num_runs / len(segments)))
        lower.set_xlabel(f"segment of {run}, about {counted(each, 'step')} each")
        low, high = percent(found.stalled.min()), percent(found.stalled.max())
        alt = f"Percentiles of documents in {len(segments)} segments of the run; steps over the cap: {low} to {high}."
        return drawing(figure, "drift", found.title, alt)


def parts(found: findings.Parts) -> Drawing:
    """Percentiles of every part as dots, and its stalled steps."""
    rows = np.arange(len(found.names))
    with canvas(1.9 + 0.3 * len(rows), found.title) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for (name, values), (colour, _, marker) in zip(found.percentiles.items(), _STYLES, strict=True):
            left.plot(values, rows, marker, color=colour, linestyle="none", label=percentile_name(name))
        _cap_line(left, found.cap)
        left.set_yticks(rows, [shortened(n, _LONGEST_NAME) for n in found.names])
        left.set_ylim(len(rows) - 0.5, -0.8)
        _scale(left, logarithmic=True, largest=max(found.percentiles["max"]), narrow=True)
        left.set_xlabel(
            "documents of a micro-batch" + (f"; {found.left_out} smaller parts left out" if found.left_out else "")
        )
        left.legend(loc="upper left", bbox_to_anchor=(0, -0.32 if len(rows) < 4 else -0.2), ncols=4, fontsize=8.5)
        right.barh(rows, found.stalled, height=0.6, color=ORANGE, alpha=0.75, hatch="///", edgecolor=INK, linewidth=0.4)
        for row, share in zip(rows, found.stalled, strict=True):
            right.text(share + 0.02, row, percent(share), va="center", fontsize=8.5)
        right.set_xlim(0, 1.25)
        right.set_xticks([0, 0.5, 1])
        right.xaxis.set_major_formatter(_percent_format())
        right.set_xlabel(f"steps over {counted(found.cap, 'document')}")
        alt = "Percentiles of each part: " + "; ".join(
            f"{n}: " + ", ".join(f"{percentile_name(k)} {v[i]:,}" for k, v in found.percentiles.items())
            for i, n in enumerate(found.names)
        )
        return drawing(figure, "parts", found.title, alt)


def memory(found: findings.Memory) -> Drawing:
    """Slots of every pipeline rank, and memory by the number of graphs."""
    with canvas(3.3, found.title) as figure:
        if found.gib_by_buckets:
            left, right = figure.subplots(1, 2, width_ratios=(3, 2))
            _memory_bars(right, found)
        else:
            left = figure.subplots()
        _slot_bars(left, found)
        alt = "Slots of each pipeline rank: " + ", ".join("+".join(map(str, rank)) for rank in found.slots[:_MOST_BARS])
        alt += "".join(
            f"; {counted(n, 'graph')} a slot {size:.2f} GiB" for n, size in enumerate(found.gib_by_buckets, start=1)
        )
        alt += "" if found.host_gib is None else f"; pinned host memory {found.host_gib:.2f} GiB"
        return drawing(figure, "memory", found.title, alt)


def _slot_bars(axis: Axes, found: findings.Memory) -> None:
    from matplotlib.ticker import MaxNLocator

    stride = -(-len(found.slots) // _MOST_BARS)
    ranks = np.arange(0, len(found.slots), stride)
    shown = np.array([found.slots[r] for r in ranks])
    base = np.zeros(len(ranks))
    chunks = shown.shape[1]
    for chunk in range(chunks):
        axis.bar(
            ranks, shown[:, chunk], 0.7 * stride, base, color=(BLUE, GREEN, ORANGE)[chunk % 3], alpha=0.75,
            hatch=_HATCHES[chunk % len(_HATCHES)], edgecolor=INK, linewidth=0.4,
            label=f"model chunk {chunk}" if 1 < chunks <= 8 else None,
        )  # fmt: skip
        base += shown[:, chunk]
    for kind in (axis.xaxis, axis.yaxis):
        kind.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(0, float(base.max()) * 1.25)
    if len(ranks) <= 16:
        axis.set_xticks(ranks)
    axis.set_xlim(ranks[0] - max(1, stride), ranks[-1] + max(1, stride))
    axis.set_xlabel("pipeline rank" + (f", every {stride}th" if stride > 1 else ""))
    axis.set_ylabel("slots")
    axis.grid(False, axis="x")
    if 1 < chunks <= 8:
        axis.legend(loc="upper right", ncols=min(4, chunks), fontsize=8.5)


def _memory_bars(axis: Axes, found: findings.Memory) -> None:
    numbers = np.arange(1, len(found.gib_by_buckets) + 1)
    for number, size in enumerate(found.gib_by_buckets, start=1):
        own = number == found.num_buckets
        axis.bar(
            number, size, 0.6, color=GREEN if own else BLUE, hatch="\\\\\\" if own else "", alpha=0.8 if own else 0.5,
            edgecolor=INK, linewidth=0.4,
        )  # fmt: skip
        axis.text(number, size, f"{size:.2f}" + ("\nplan" if own else ""), ha="center", va="bottom", fontsize=8.5)
    axis.set_xticks(numbers)
    axis.set_ylim(0, max(found.gib_by_buckets) * 1.3 or 1)
    axis.set_xlabel("graphs a slot")
    axis.set_ylabel("GiB, busiest rank" + ("" if found.host_gib is None else ", after offloading"))
    axis.grid(False, axis="x")


def observed(found: findings.Observed) -> Drawing:
    """Pairs of bars."""
    rows = np.arange(len(found.names))
    with canvas(2.2 + 0.5 * len(rows), found.title) as figure:
        axis = figure.subplots()
        looks = (("predicted", found.predicted, -0.2, BLUE, ""), ("observed", found.observed, 0.2, ORANGE, "///"))
        for name, values, offset, colour, hatch in looks:
            axis.barh(
                rows + offset,
                values,
                0.36,
                color=colour,
                hatch=hatch,
                alpha=0.75,
                edgecolor=INK,
                linewidth=0.4,
                label=name,
            )
            for row, value in zip(rows, values, strict=True):
                axis.text(value + 0.005, row + offset, f"{value:.2%}", va="center", fontsize=8.5)
        axis.set_yticks(rows, list(found.names))
        axis.invert_yaxis()
        axis.set_xlim(0, max(*found.predicted, *found.observed) * 1.15 or 1)
        axis.xaxis.set_major_formatter(_percent_format())
        axis.set_xlabel("\n".join(["share of dispatched micro-batches", *textwrap.wrap(found.note, 90)]))
        axis.grid(False, axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        alt = "Predicted and observed shares: " + "; ".join(
            f"{' '.join(n.split())} {p:.2%} and {o:.2%}"
            for n, p, o in zip(found.names, found.predicted, found.observed, strict=True)
        )
        return drawing(figure, "observed", found.title, alt)
