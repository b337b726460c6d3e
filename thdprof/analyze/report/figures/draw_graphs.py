"""Draws the findings on graphs: what caps cost, how the plan compares, its memory, and a run's statistics."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from thdprof.analyze.report import findings
from thdprof.analyze.report.figures.axes import CAP_LINE, STYLES, cap_line, percent_format, scale
from thdprof.analyze.report.figures.canvas import BLUE, GREEN, INK, ORANGE, Drawing, canvas, drawing
from thdprof.analyze.report.words import counted, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HATCHES = ("", "///", "--", "xx", "||")
"""Hatches of a pipeline rank's model chunks."""
_NEAR = 0.7
"""The share of the longest step time above which all times count as near to one another."""
_MOST_BARS = 40
"""Most pipeline ranks that are drawn; of more, every second, third, ... is."""


def caps(finding: findings.CapCurve) -> Drawing:
    """The rates of every cap above, and its step time below."""
    with canvas(6.2, finding.title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        rates = {
            "micro-batches that replay": finding.coverage,
            "eager micro-batches": finding.microbatch,
            "(rank, step) with an eager one": finding.rank_step,
            "steps with an eager one": finding.step,
        }
        styles = ((INK, ":", "."), *STYLES[:3])
        for (name, values), (colour, dash, marker) in zip(rates.items(), styles, strict=True):
            upper.plot(finding.max_seqs, values, dash, color=colour, marker=marker, markersize=4, label=name)
        upper.set_ylim(-0.04, 1.08)
        upper.set_ylabel("share")
        upper.yaxis.set_major_formatter(percent_format())
        upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        lower.plot(
            finding.max_seqs, finding.relative_step_time, "-", color=BLUE, marker="o", markersize=4, label="one cap"
        )
        if finding.num_buckets:
            name = (
                f"the plan's {counted(finding.num_buckets, 'graph')}: {finding.plan_step_time:.3f}{finding.plan_data}"
            )
            lower.axhline(finding.plan_step_time, color=GREEN, linestyle="--", label=name)
        for (name, (cap, time)), marker in zip(finding.marks.items(), "s^X", strict=True):
            lower.plot(
                [cap], [time], marker, color=INK, markerfacecolor="none", markersize=9, linestyle="none",
                label=f"{name}: {time:.3f}",
            )  # fmt: skip
        lower.plot(
            [finding.cap], [finding.cap_step_time], "D", color=ORANGE, markersize=6, linestyle="none",
            label=f"cap {finding.cap:,}: {finding.cap_step_time:.3f}",
        )  # fmt: skip
        lower.set_ylim(*_time_limits(finding))
        lower.set_ylabel("step time, all eager = 1")
        lower.set_xlabel("cap, documents")
        lower.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        cap_line(upper, finding.cap)
        lower.axvline(finding.cap, **CAP_LINE)
        for axis in (upper, lower):
            scale(axis, logarithmic=True, largest=int(finding.max_seqs[-1]), smallest=int(finding.max_seqs[0]))
        alt = (
            "Above, the share of micro-batches that replay and the three shares that fall back, over the cap; below, "
            "the step time relative to eager: "
            + ", ".join(f"{name} {time:.3f}" for name, (_, time) in finding.marks.items())
            + f", cap {finding.cap:,} {finding.cap_step_time:.3f}."
        )
        return drawing(figure, "caps", finding.title, alt)


def _time_limits(finding: findings.CapCurve) -> tuple[float, float]:
    """Lower and upper end of the axis of step times: from 0, unless the times would then look alike."""
    times = [*finding.relative_step_time, finding.plan_step_time, finding.cap_step_time]
    low, high = min(times), max(times)
    if low < _NEAR * high:
        return 0.0, max(1.08, high * 1.05)
    spread = max(high - low, 0.01)
    return low - 0.4 * spread, high + 0.3 * spread


def choice(finding: findings.Choice) -> Drawing:
    """The step times of the alternatives as bars, beside the shares of the plan's graphs."""
    from matplotlib.ticker import MaxNLocator

    rows = len(finding.alternatives)
    with canvas(1.5 + 0.4 * max(rows, len(finding.shares)), finding.title) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        looks = {"other": (BLUE, "", 0.55), "cap": (ORANGE, "///", 0.75), "plan": (GREEN, "\\\\\\", 0.85)}
        top = max(a.relative_step_time for a in finding.alternatives)
        for row, alternative in enumerate(finding.alternatives):
            colour, hatch, alpha = looks[alternative.role]
            left.barh(
                row,
                alternative.relative_step_time,
                color=colour,
                hatch=hatch,
                alpha=alpha,
                edgecolor=INK,
                linewidth=0.4,
            )
            left.text(
                alternative.relative_step_time + 0.015 * top,
                row,
                f"{alternative.relative_step_time:.3f}, {percent(alternative.stalled)} of steps stall",
                va="center",
                fontsize=8.5,
            )
        left.set_yticks(range(rows), [textwrap.fill(a.name, 26) for a in finding.alternatives])
        left.set_xlim(0, top * 1.75)
        left.set_xticks([tick for tick in MaxNLocator(4).tick_values(0, max(1, top)) if tick <= max(1, top)])
        left.set_xlabel("step time, all eager = 1; steps that wait for an eager one stall")
        _share_bars(right, finding.shares)
        for axis in (left, right):
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.tick_params(axis="y", length=0)
        alt = "Bars of the step time of " + "; ".join(
            f"{a.name}: {a.relative_step_time:.3f}, {percent(a.stalled)} of steps stall" for a in finding.alternatives
        )
        alt += ". Bars of the plan's graphs: " + ", ".join(f"{n} {percent(s)}" for n, s in finding.shares) + "."
        return drawing(figure, "choice", finding.title, alt)


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
    axis.xaxis.set_major_formatter(percent_format())
    axis.set_xlabel("share of micro-batches")


def memory(finding: findings.Memory) -> Drawing:
    """The slots of every pipeline rank, and the memory of a rank by the number of graphs a slot."""
    with canvas(3.3, finding.title) as figure:
        if finding.gib_by_buckets:
            left, right = figure.subplots(1, 2, width_ratios=(3, 2))
            _memory_bars(right, finding)
        else:
            left = figure.subplots()
        _slot_bars(left, finding)
        alt = "Slots of each pipeline rank: " + ", ".join(
            "+".join(map(str, rank)) for rank in finding.slots[:_MOST_BARS]
        )
        alt += "".join(
            f"; {counted(n, 'graph')} a slot {size:.2f} GiB" for n, size in enumerate(finding.gib_by_buckets, start=1)
        )
        alt += "" if finding.host_gib is None else f"; pinned host memory {finding.host_gib:.2f} GiB"
        return drawing(figure, "memory", finding.title, alt)


def _slot_bars(axis: Axes, finding: findings.Memory) -> None:
    from matplotlib.ticker import MaxNLocator

    stride = -(-len(finding.slots) // _MOST_BARS)
    ranks = np.arange(0, len(finding.slots), stride)
    shown = np.array([finding.slots[r] for r in ranks])
    base = np.zeros(len(ranks))
    chunks = shown.shape[1]
    for chunk in range(chunks):
        axis.bar(
            ranks, shown[:, chunk], 0.7 * stride, base, color=(BLUE, GREEN, ORANGE)[chunk % 3], alpha=0.75,
            hatch=_HATCHES[chunk % len(_HATCHES)], edgecolor=INK, linewidth=0.4,
            label=f"model chunk {chunk}" if 1 < chunks <= 8 else None,
        )  # fmt: skip
        base += shown[:, chunk]
    for direction in (axis.xaxis, axis.yaxis):
        direction.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(0, float(base.max()) * 1.25)
    if len(ranks) <= 16:
        axis.set_xticks(ranks)
    axis.set_xlim(ranks[0] - max(1, stride), ranks[-1] + max(1, stride))
    axis.set_xlabel("pipeline rank" + (f", every {stride}th" if stride > 1 else ""))
    axis.set_ylabel("slots")
    axis.grid(False, axis="x")
    if 1 < chunks <= 8:
        axis.legend(loc="upper right", ncols=min(4, chunks), fontsize=8.5)


def _memory_bars(axis: Axes, finding: findings.Memory) -> None:
    numbers = np.arange(1, len(finding.gib_by_buckets) + 1)
    for number, size in enumerate(finding.gib_by_buckets, start=1):
        in_plan = number == finding.num_buckets
        axis.bar(
            number, size, 0.6, color=GREEN if in_plan else BLUE, hatch="\\\\\\" if in_plan else "",
            alpha=0.8 if in_plan else 0.5, edgecolor=INK, linewidth=0.4,
        )  # fmt: skip
        axis.text(number, size, f"{size:.2f}" + ("\nplan" if in_plan else ""), ha="center", va="bottom", fontsize=8.5)
    axis.set_xticks(numbers)
    axis.set_ylim(0, max(finding.gib_by_buckets) * 1.3 or 1)
    axis.set_xlabel("graphs a slot")
    axis.set_ylabel("GiB, busiest rank" + ("" if finding.host_gib is None else ", after offloading"))
    axis.grid(False, axis="x")


def observed(finding: findings.Observed) -> Drawing:
    """The predicted and the observed share of each graph as a pair of bars."""
    rows = np.arange(len(finding.names))
    with canvas(2.2 + 0.5 * len(rows), finding.title) as figure:
        axis = figure.subplots()
        looks = (("predicted", finding.predicted, -0.2, BLUE, ""), ("observed", finding.observed, 0.2, ORANGE, "///"))
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
        axis.set_yticks(rows, list(finding.names))
        axis.invert_yaxis()
        axis.set_xlim(0, max(*finding.predicted, *finding.observed) * 1.15 or 1)
        axis.xaxis.set_major_formatter(percent_format())
        axis.set_xlabel("\n".join(["share of dispatched micro-batches", *textwrap.wrap(finding.note, 90)]))
        axis.grid(False, axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        alt = "Predicted and observed shares: " + "; ".join(
            f"{' '.join(n.split())} {p:.2%} and {o:.2%}"
            for n, p, o in zip(finding.names, finding.predicted, finding.observed, strict=True)
        )
        return drawing(figure, "observed", finding.title, alt)
