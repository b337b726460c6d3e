"""Draws the findings on graphs: what caps cost, how the plan compares, its memory, and a run's statistics."""

from __future__ import annotations

import textwrap

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.report import findings
from thdprof.analyze.report.figures.drawing import Drawing
from thdprof.analyze.report.figures.panel import Panel, whole
from thdprof.analyze.report.figures.scale import EM, Scale
from thdprof.analyze.report.figures.svg import LINE, Canvas
from thdprof.analyze.report.words import counted, percent, ratio

_LEFT = 52
"""Pixels to the left of a panel, for the labels of its y axis."""
_NEAR = 0.7
"""The share of the longest step time above which all times count as near to one another."""
_MOST_BARS = 40
"""Most pipeline ranks that are drawn; of more, every second, third, ... is."""
_BAR = 18
"""Height of a bar that lies, in pixels."""


def caps(finding: findings.CapCurve) -> Drawing:
    """The rates of every cap above, and below its step time where times are known."""
    rates = {
        "eager micro-batches": finding.microbatch,
        "(rank, step) with an eager one": finding.rank_step,
        "steps with an eager one": finding.step,
    }
    series = ("microbatch", "rank_step", "step")
    xs = finding.max_seqs.tolist()
    times = finding.relative_step_time

    def paint(canvas: Canvas) -> None:
        top = canvas.legend(0, 0, [(name, i) for i, name in enumerate(rates)])
        canvas.text(0, top + 14, "Share that runs eagerly", look="b")
        x = Scale(max(1, min(xs[0], finding.cap)), max(xs[-1], finding.cap, 2), _LEFT, canvas.width - 8, True)
        panel = Panel(canvas, x, Scale(0, 1, top + 48 + 190, top + 48))
        panel.axes(x_label="" if times is not None else "cap, documents", x_ticks=times is None)
        for style, values in enumerate(rates.values()):
            panel.line(xs, values.tolist(), style)
        panel.strips(
            xs,
            [
                f"cap {n:,} — " + "; ".join(f"{name}: {percent(float(v[i]))}" for name, v in rates.items())
                for i, n in enumerate(xs)
            ],
        )
        panel.cap(finding.cap)
        at_cap = (finding.cap_rate.microbatch, finding.cap_rate.rank_step, finding.cap_rate.step)
        for name, value in zip(series, at_cap, strict=True):
            panel.dot(finding.cap, value, name)
        if times is not None:
            _time_panel(canvas, finding, times, x)

    alt = "The three shares that run eagerly, over the cap. At the percentiles: " + ", ".join(
        f"{name} {n:,}" for name, n in finding.marks.items()
    )
    if finding.cap_step_time is not None:
        alt += f". Below, the step time relative to eager: cap {finding.cap:,} {ratio(finding.cap_step_time)}"
    return Drawing(id="caps", title=finding.title, alt=f"{alt}.", paint=paint)


def _time_panel(canvas: Canvas, finding: findings.CapCurve, times: NDArray[np.float64], x: Scale) -> None:
    """The step time of every cap, as a band where it is a range, beside that of the plan."""
    xs, lows, highs = finding.max_seqs.tolist(), times[:, 0].tolist(), times[:, 1].tolist()
    entries: list[tuple[str, int | str]] = [("one cap", 0)]
    plan = finding.plan_step_time if finding.num_buckets else None
    if plan is not None:
        entries.append((f"the plan's {counted(finding.num_buckets, 'graph')}: {ratio(plan)}{finding.plan_data}", 2))
    top = canvas.bottom + 20
    canvas.text(0, top + 14, "Step time, all eager = 1", look="b")
    top = canvas.legend(0, top + 20, entries, marked=False) + 8
    low, high = _time_limits(finding, times)
    panel = Panel(canvas, x, Scale(low, high, top + 190, top))
    panel.axes(x_label="cap, documents", write_y=lambda value: f"{value:.3g}")
    panel.band(xs, lows, highs, 0)
    panel.line(xs, highs, 0)
    if (times[:, 0] != times[:, 1]).any():
        panel.line(xs, lows, 0, marked=False)
    if plan is not None:
        panel.band([x.low, x.high], [plan[0]] * 2, [plan[1]] * 2, 2)
        for value in sorted(set(plan)):
            canvas.line([(x.start, panel.y(value)), (x.end, panel.y(value))], "l s2")
    panel.strips(
        xs, [f"cap {n:,} — {ratio((a, b))} of the eager step time" for n, a, b in zip(xs, lows, highs, strict=True)]
    )
    panel.cap(finding.cap, named=False)
    if finding.cap_step_time is not None:
        for value, name in zip(finding.cap_step_time, ("time_low", "time_high"), strict=True):
            panel.dot(finding.cap, value, name)


def _time_limits(finding: findings.CapCurve, times: NDArray[np.float64]) -> tuple[float, float]:
    """Lower and upper end of the axis of step times: from 0, unless the times would then look alike."""
    every = [*times.ravel().tolist(), *(finding.plan_step_time or ()), *(finding.cap_step_time or ())]
    low, high = min(every), max(every)
    if low < _NEAR * high:
        return 0.0, max(1.08, high * 1.05)
    spread = max(high - low, 0.01)
    return low - 0.4 * spread, high + 0.3 * spread


def choice(finding: findings.Choice) -> Drawing:
    """The step times of the alternatives as bars, or without times what runs eagerly; below, the plan's shares."""
    known = all(a.relative_step_time is not None for a in finding.alternatives)
    looks = {"other": "f0", "cap": "fc", "plan": "f2"}

    def paint(canvas: Canvas) -> None:
        label = "Step time, all eager = 1" if known else "Steps with an eager micro-batch"
        canvas.text(0, 14, label, look="b")
        tops = [max(a.relative_step_time) if a.relative_step_time else a.rate.step for a in finding.alternatives]
        x = Scale(0, max([1.0, *tops]), 0, canvas.width * (0.42 if canvas.narrow else 0.6))
        at = 24.0
        for alternative in finding.alternatives:
            waits = f"{percent(alternative.rate.step)} of steps wait"
            low, high = alternative.relative_step_time or (0.0, alternative.rate.step)
            told = f"{ratio((low, high))}, {waits}" if known else percent(alternative.rate.step)
            canvas.text(
                0, at + 13, shortened_label(alternative.name, canvas), look="b" if alternative.role == "plan" else ""
            )
            at += LINE + 2
            look = looks[alternative.role]
            canvas.rect(0, at, max(1.0, x(high)), _BAR, look)
            if known and high > low:
                canvas.rect(x(low), at, x(high) - x(low), _BAR, "hit range", extra=' style="fill-opacity:.35"')
            tip = f"{alternative.name}: {told}; {percent(alternative.rate.microbatch)} of micro-batches run eagerly"
            canvas.text(x(high) + 8, at + 13, told)
            canvas.rect(0, at - LINE, canvas.width, LINE + _BAR + 4, "hit", tip=tip)
            at += _BAR + 8
        canvas.bottom = at
        _share_bars(canvas, finding.shares)

    alt = "Bars of " + "; ".join(
        f"{a.name}: "
        + (f"{ratio(a.relative_step_time)}, " if a.relative_step_time else "")
        + f"{percent(a.rate.step)} of steps wait"
        for a in finding.alternatives
    )
    alt += ". Bars of the plan's graphs: " + ", ".join(f"{n} {percent(s)}" for n, s in finding.shares) + "."
    return Drawing(id="choice", title=finding.title, alt=alt, paint=paint)


def shortened_label(words: str, canvas: Canvas) -> str:
    """`words` in one line of the canvas."""
    most = int(canvas.width / EM)
    return words if len(words) <= most else words[: most - 1] + "…"


def _share_bars(canvas: Canvas, shares: tuple[tuple[str, float], ...]) -> None:
    """Shares of micro-batches of each of the plan's graphs, below one another."""
    at = canvas.bottom + 12
    canvas.text(0, at + 14, "Share of micro-batches, by the plan's graphs", look="b")
    at += 24
    widest = max(len(name) for name, _ in shares) * EM
    left = min(widest, canvas.width * 0.5) + 20
    x = Scale(0, 1, left, canvas.width - 64)
    for name, value in shares:
        canvas.text(left - 8, at + 13, name, anchor="end")
        canvas.rect(left, at, x(value) - left, _BAR, "f1" if name == "eager" else "f2")
        canvas.text(x(value) + 6, at + 13, percent(value))
        canvas.rect(0, at - 2, canvas.width, _BAR + 4, "hit", tip=f"{name}: {percent(value)} of micro-batches")
        at += _BAR + 6
    canvas.bottom = at


def memory(finding: findings.Memory) -> Drawing:
    """The slots of every pipeline rank, and the memory of a rank by the number of graphs a slot."""

    def paint(canvas: Canvas) -> None:
        if len(finding.slots) * len(finding.slots[0]) > 1:
            _slot_bars(canvas, finding)
        if finding.gib_by_buckets:
            _memory_bars(canvas, finding)

    alt = "Slots of each pipeline rank: " + ", ".join("+".join(map(str, rank)) for rank in finding.slots[:_MOST_BARS])
    alt += "".join(
        f"; {counted(n, 'graph')} a slot {size:.2f} GiB" for n, size in enumerate(finding.gib_by_buckets, start=1)
    )
    alt += "" if finding.host_gib is None else f"; pinned host memory {finding.host_gib:.2f} GiB"
    return Drawing(id="memory", title=finding.title, alt=f"{alt}.", paint=paint)


def _slot_bars(canvas: Canvas, finding: findings.Memory) -> None:
    """An upright bar for each pipeline rank, of one piece for each model chunk."""
    stride = -(-len(finding.slots) // _MOST_BARS)
    ranks = range(0, len(finding.slots), stride)
    chunks = len(finding.slots[0])
    most = max(sum(rank) for rank in finding.slots)
    label = "Slots" + (f"; the pieces are {chunks} model chunks, chunk 0 below" if chunks > 1 else "")
    canvas.text(0, 14, shortened_label(label, canvas), look="b")
    x = Scale(-0.5 * stride, ranks[-1] + 0.5 * stride, _LEFT, canvas.width - 8)
    panel = Panel(canvas, x, Scale(0, most * 1.05, 190, 28))
    panel.axes(x_label="pipeline rank" + (f", every {stride}th" if stride > 1 else ""), write_y=whole, whole_y=True)
    for rank in ranks:
        base, left, width = 0, x(rank - 0.35 * stride), x(rank + 0.35 * stride) - x(rank - 0.35 * stride)
        for slots in finding.slots[rank]:
            canvas.rect(left, panel.y(base + slots) + 1, width, panel.y(base) - panel.y(base + slots) - 1, "f0")
            base += slots
        tip = f"pipeline rank {rank}: {counted(base, 'slot')}"
        tip += f" ({' + '.join(map(str, finding.slots[rank]))})" if chunks > 1 else ""
        canvas.rect(left, 28, width, panel.y.start - 28, "hit", tip=tip)


def _memory_bars(canvas: Canvas, finding: findings.Memory) -> None:
    """A lying bar for each number of graphs a slot."""
    at = canvas.bottom + (16 if canvas.bottom else 0)
    after = "" if finding.host_gib is None else ", after offloading"
    canvas.text(0, at + 14, f"Graph memory of the busiest rank{after}", look="b")
    at += 24
    x = Scale(0, max(finding.gib_by_buckets) or 1, 100, canvas.width - 130)
    for number, size in enumerate(finding.gib_by_buckets, start=1):
        plan = number == finding.num_buckets
        canvas.text(92, at + 13, counted(number, "graph"), anchor="end")
        canvas.rect(100, at, x(size) - 100, _BAR, "f2" if plan else "f0")
        canvas.text(x(size) + 6, at + 13, f"{size:.2f} GiB" + (", the plan" if plan else ""))
        canvas.rect(0, at - 2, canvas.width, _BAR + 4, "hit", tip=f"{counted(number, 'graph')} a slot: {size:.2f} GiB")
        at += _BAR + 6
    canvas.bottom = at


def observed(finding: findings.Observed) -> Drawing:
    """The predicted and the observed share of each graph as a pair of bars."""
    pairs = list(zip(finding.names, finding.predicted, finding.observed, strict=True))

    def paint(canvas: Canvas) -> None:
        canvas.text(0, 14, "Share of dispatched micro-batches", look="b")
        x = Scale(0, max(*finding.predicted, *finding.observed) or 1, 0, canvas.width - 150)
        at = 24.0
        for name, predicted, seen in pairs:
            words = " ".join(name.split())
            canvas.text(0, at + 13, words)
            at += LINE + 2
            for value, kind, look in ((predicted, "predicted", "f0"), (seen, "observed", "f1")):
                canvas.rect(0, at, max(1.0, x(value)), _BAR - 4, look)
                canvas.text(x(value) + 8, at + 11, f"{value:.2%} {kind}")
                at += _BAR - 2
            canvas.rect(
                0, at - 2 * _BAR - LINE, canvas.width, 2 * _BAR + LINE, "hit",
                tip=f"{words}: {predicted:.2%} predicted, {seen:.2%} observed",
            )  # fmt: skip
            at += 8
        for line in textwrap.wrap(finding.note, int(canvas.width / EM)):
            canvas.text(0, at + 13, line, look="q")
            at += LINE
        canvas.bottom = at

    alt = "Predicted and observed shares: " + "; ".join(
        f"{' '.join(n.split())} {p:.2%} and {o:.2%}" for n, p, o in pairs
    )
    return Drawing(id="observed", title=finding.title, alt=f"{alt}.", paint=paint)
