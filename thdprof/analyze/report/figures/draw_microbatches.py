"""Draws the findings on the micro-batches: their shapes, and how these vary over ranks, steps and parts of the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.report import findings
from thdprof.analyze.report.figures.drawing import Drawing
from thdprof.analyze.report.figures.panel import Panel, whole
from thdprof.analyze.report.figures.scale import EM, Scale
from thdprof.analyze.report.figures.svg import LINE, MARKERS, Canvas
from thdprof.analyze.report.findings.shapes import Distribution
from thdprof.analyze.report.words import counted, percent, percentile_name, shortened

_LEFT = 60
"""Pixels to the left of a panel, for the labels of its y axis."""


def shapes(finding: findings.Shapes) -> Drawing:
    """A histogram above a cumulative curve for each measure: documents, and tokens of the longest document."""
    measures = (
        ("documents of a micro-batch", "document", finding.n_seqs),
        ("tokens of its longest document", "token", finding.max_seqlen),
    )

    def paint(canvas: Canvas) -> None:
        columns = 1 if canvas.narrow else 2
        width = (canvas.width - 24 * (columns - 1)) / columns
        top = 0.0
        for index, (label, unit, spread) in enumerate(measures):
            left = index % columns * (width + 24)
            if columns == 1:
                top = canvas.bottom + (24 if index else 0)
            cap = finding.cap if index == 0 else None
            _distribution(canvas, left, top, width, label, unit, spread, cap)

    alt = (
        "Two histograms above two cumulative curves: documents of a micro-batch and tokens of its longest. "
        + "; ".join(
            f"{label}: " + ", ".join(f"{percentile_name(n)} {v:,}" for n, v in spread.percentiles.items())
            for label, _, spread in measures
        )
    )
    return Drawing(id="shapes", title=finding.title, alt=alt, paint=paint)


def _distribution(
    canvas: Canvas, left: float, top: float, width: float, label: str, unit: str, spread: Distribution, cap: int | None
) -> None:
    """The histogram and the cumulative curve of one measure."""
    inner, right = left + _LEFT, left + width - 6
    low, high = float(spread.edges[0]), float(spread.edges[-1])
    canvas.text(left, top + 14, f"Share of micro-batches, per {unit}", look="b")
    x = Scale(low, high, inner, right, spread.logarithmic)
    y = Scale(0, float(spread.densities.max()) * 1.05, top + 180, top + 48)
    panel = Panel(canvas, x, y)
    panel.axes(x_ticks=False)
    for at, (density, part) in enumerate(zip(spread.densities, spread.shares, strict=True)):
        if part == 0:
            continue
        begin, end = spread.edges[at : at + 2]
        first, last = int(begin + 0.5), int(end - 0.5)
        numbers = counted(first, unit) if first == last else f"{first:,} to {last:,} {unit}s"
        tip = f"{numbers}: {percent(float(part))} of micro-batches"
        start, stop = x(begin), x(end)
        gap = 0.6 if stop - start > 3 else 0
        canvas.rect(start + gap, y(density), stop - start - 2 * gap, y.start - y(density), "f0")
        canvas.rect(start, y.end, stop - start, y.start - y.end, "hit", tip=tip)
    canvas.text(left, top + 210, "Share with at most so many", look="b")
    below = Panel(canvas, x, Scale(0, 1, top + 352, top + 222))
    below.axes(x_label=label)
    below.stairs([low, *spread.values], [0.0, *spread.cumulative], 0)
    tips = [f"{percent(float(c))} hold at most {counted(int(v), unit)}" for v, c in _pairs(spread)]
    below.strips(spread.values.tolist(), tips)
    if cap is not None:
        panel.cap(cap)
        below.cap(cap, named=False)
    names = [f"{percentile_name(name)} {value:,}" for name, value in spread.percentiles.items()]
    half = -(-len(names) // 2)
    for row, words in enumerate((names[:half], names[half:])):
        canvas.text(inner, top + 352 + (3 + row) * LINE + 4, "   ".join(words), look="q", extra=' xml:space="preserve"')
    canvas.bottom = max(canvas.bottom, top + 352 + 4 * LINE + 8)


def _pairs(spread: Distribution) -> list[tuple[int, float]]:
    return list(zip(spread.values.tolist(), spread.cumulative.tolist(), strict=True))


def joint(finding: findings.Joint) -> Drawing:
    """A map that counts micro-batches by documents and by tokens of the longest document."""
    xs, ys = finding.n_seqs_edges, finding.max_seqlen_edges
    most = max(1, int(finding.counts.max()))
    top = float(max([xs[-1], *(s + 0.5 for s, _ in finding.buckets), finding.cap]))

    def paint(canvas: Canvas) -> None:
        canvas.text(0, 14, "Longest document of a micro-batch, tokens", look="b")
        height = 300 if canvas.narrow else 340
        x = Scale(
            float(xs[0]), top * (1.1 if finding.logarithmic else 1.03), _LEFT, canvas.width - 8, finding.logarithmic
        )
        y = Scale(float(ys[0]), float(ys[-1]) * 1.04, 48 + height, 48)
        panel = Panel(canvas, x, y)
        panel.axes(x_label="documents of a micro-batch", write_y=whole, whole_y=True)
        for row, column in np.argwhere(finding.counts > 0).tolist():
            count = int(finding.counts[row, column])
            shade = 0.3 + 0.7 * (np.log(count) / np.log(most) if most > 1 else 1)
            x0, x1, y0, y1 = x(xs[column]), x(xs[column + 1]), y(ys[row]), y(ys[row + 1])
            tip = (
                f"{_numbers(xs, column)} documents, the longest {_numbers(ys, row)} tokens: "
                f"{counted(count, 'micro-batch', 'micro-batches')}"
            )
            canvas.rect(x0, y1, x1 - x0, y0 - y1, "cell", tip=tip, extra=f' fill="#2a87c8" fill-opacity="{shade:.2f}"')
        named: list[float] = []
        for number, (seqs, length) in enumerate(finding.buckets):
            right, up = x(seqs + 0.5), y(length + 0.5)
            dash = f"1 {1 + 2 * (number % 4)}"
            canvas.add(
                f'<path class="m a" stroke-dasharray="{dash}" d="M{x.start:.1f} {up:.1f}H{right:.1f}V{y.start:.1f}"/>'
            )
            if length < max(longest for other, longest in finding.buckets if other == seqs):
                continue  # a number of documents is named once, at its longest bucket
            if any(abs(right - other) < LINE for other in named):
                continue
            named.append(right)
            canvas.text(
                right - 5, up + 6, f"graph {seqs:,}", anchor="end",
                extra=f' transform="rotate(-90 {right - 5:.1f} {up + 6:.1f})"',
            )  # fmt: skip
        panel.cap(finding.cap)
        key = [
            f"pale to solid: 1 to {counted(most, 'micro-batch', 'micro-batches')} in a cell",
            "dotted: the plan's graphs",
        ]
        for line in key if canvas.narrow else ["; ".join(key)]:
            canvas.text(_LEFT, canvas.bottom + LINE + 2, line, look="q")
            canvas.bottom += LINE

    alt = (
        "A map of how many micro-batches have so many documents and so long a longest document, the plan's graphs "
        "as dotted borders and the cap as a dashed line."
    )
    return Drawing(id="joint", title=finding.title, alt=alt, paint=paint)


def _numbers(edges: NDArray[np.float64], index: int) -> str:
    first, last = int(edges[index] + 0.5), int(edges[index + 1] - 0.5)
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def steps(finding: findings.Steps) -> Drawing:
    """The share of micro-batches, ranks and steps over each number of documents, as falling curves."""
    largest = max(int(values[-1]) for values, _ in finding.curves.values())
    logarithmic = largest > 40
    series = ("microbatch", "rank_step", "step")

    def paint(canvas: Canvas) -> None:
        top = canvas.legend(0, 0, [(name, i) for i, name in enumerate(finding.curves)], marked=False)
        canvas.text(0, top + 14, "Share with more documents", look="b")
        x = Scale(1 if logarithmic else 0, max(largest, finding.cap, 2), _LEFT, canvas.width - 8, logarithmic)
        y = Scale(0, 1, top + 48 + 200, top + 48)
        panel = Panel(canvas, x, y)
        panel.axes(x_label="documents")
        for style, (values, over) in enumerate(finding.curves.values()):
            panel.stairs(values.tolist(), over.tolist(), style)
        every = sorted({int(v) for values, _ in finding.curves.values() for v in values if v >= x.low})
        panel.strips(every, [_told_over(finding, at) for at in every])
        panel.cap(finding.cap)
        for name, value in zip(series, finding.at_cap.values(), strict=True):
            panel.dot(finding.cap, value, name)

    alt = "Falling curves of the share with more than so many documents. Over the cap: " + ", ".join(
        f"{name} {percent(value)}" for name, value in finding.at_cap.items()
    )
    return Drawing(id="steps", title=finding.title, alt=alt, paint=paint)


def _told_over(finding: findings.Steps, documents: int) -> str:
    """The share of each curve over a number of documents, in words."""
    shares = []
    for name, (values, over) in finding.curves.items():
        index = int(np.searchsorted(values, documents, side="right")) - 1
        shares.append(f"{name} {percent(float(over[max(0, index)]))}")
    return f"over {counted(documents, 'document')} — {'; '.join(shares)}"


def drift(finding: findings.Drift) -> Drawing:
    """Percentiles of documents over the run above, and the share of steps over the cap below."""
    number = len(finding.stalled)
    most = max(int(finding.percentiles["max"].max()), int(finding.step_median.max()), finding.cap, 2)
    run = "the run" if finding.num_runs == 1 else "each run"
    each = max(1, round(finding.steps / finding.num_runs / number))
    label = f"segment of {run}, about {counted(each, 'step')} each"
    order = ("max", "p99", "p90", "p50")

    def paint(canvas: Canvas) -> None:
        names = [(f"{percentile_name(name)} of micro-batches", i) for i, name in enumerate(order)]
        top = canvas.legend(0, 0, [*names, ("the cap", "cap")])
        canvas.text(0, top + 14, "Documents", look="b")
        x = Scale(0.5, number + 0.5, _LEFT, canvas.width - 8)
        upper = Panel(canvas, x, Scale(1 if finding.logarithmic else 0, most, top + 220, top + 28, finding.logarithmic))
        upper.axes(x_ticks=False, write_y=whole, whole_y=True)
        at = list(range(1, number + 1))
        for style, name in enumerate(order):
            upper.line(at, finding.percentiles[name].tolist(), style)
        upper.level(finding.cap)
        upper.strips(
            at,
            [
                f"segment {i + 1:,}: "
                + ", ".join(f"{percentile_name(n)} {int(finding.percentiles[n][i]):,}" for n in order)
                + f"; fullest of a step at the median {int(finding.step_median[i]):,}"
                for i in range(number)
            ],
        )
        below = top + 236
        canvas.text(0, below + 14, "Steps over the cap", look="b")
        y = Scale(0, 1, below + 150, below + 28)
        lower = Panel(canvas, x, y)
        lower.axes(x_label=label)
        for i, value in enumerate(finding.stalled.tolist()):
            left, right = x(i + 0.55), x(i + 1.45)
            data = f' data-bar="segments {i}" data-y="{y.data}"'
            canvas.rect(left, y(value), right - left, y.start - y(value), "fc", extra=data)
            canvas.rect(
                x(i + 0.5), y.end, x(i + 1.5) - x(i + 0.5), y.start - y.end, "hit",
                tip=f"segment {i + 1:,}: {percent(value)} of steps over the cap", extra=f' data-told="segments {i}"',
            )  # fmt: skip

    low, high = percent(float(finding.stalled.min())), percent(float(finding.stalled.max()))
    alt = f"Percentiles of documents in {number} segments of the run; steps over the cap: {low} to {high}, {label}."
    return Drawing(id="drift", title=finding.title, alt=alt, paint=paint)


def parts(finding: findings.Parts) -> Drawing:
    """The percentiles of every part as markers on a line, beside its share of steps over the cap."""
    row = 44
    largest = max(2, *finding.percentiles["max"], finding.cap)

    def paint(canvas: Canvas) -> None:
        names = list(finding.percentiles)
        entries = [(percentile_name(name), i) for i, name in enumerate(names)]
        top = canvas.legend(0, 0, entries)
        split = canvas.width * (0.6 if canvas.narrow else 0.66)
        x = Scale(1, largest, 8, split - 16, True)
        wide = Scale(0, 1, split, canvas.width - 52)
        canvas.text(0, top + 14, "Documents", look="b")
        canvas.text(wide.start, top + 14, "Steps over the cap", look="b")
        begin = top + 44
        y = Scale(0, 1, begin + row * len(finding.names), begin)
        panel = Panel(canvas, x, y)
        panel.axes(x_label="documents of a micro-batch", write_y=lambda value: "")
        for index, name in enumerate(finding.names):
            at = begin + row * index
            canvas.text(8, at + 15, shortened(name, int((split - 30) / EM)))
            line = at + 29
            values = [finding.percentiles[p][index] for p in names]
            canvas.line([(x(values[0]), line), (x(values[-1]), line)], "a")
            for style, value in enumerate(values):
                canvas.marker(x(value), line, MARKERS[style], f"m s{style}")
            tip = f"{name}: " + ", ".join(f"{percentile_name(p)} {v:,}" for p, v in zip(names, values, strict=True))
            canvas.rect(0, at, split - 8, row, "hit", tip=tip)
            stalled = finding.stalled[index]
            data = f' data-row="parts {index}" data-x="{wide.data}"'
            canvas.rect(wide.start, line - 9, wide(stalled) - wide.start, 16, "fc", extra=data)
            canvas.text(
                wide(stalled) + 6,
                line + 4,
                percent(stalled),
                extra=f' data-row-text="parts {index}" data-x="{wide.data}"',
            )
        panel.cap(finding.cap)
        if finding.left_out:
            canvas.text(8, canvas.bottom + LINE, f"{counted(finding.left_out, 'smaller part')} left out", look="q")
            canvas.bottom += LINE

    alt = "Percentiles of each part: " + "; ".join(
        f"{n}: " + ", ".join(f"{percentile_name(k)} {v[i]:,}" for k, v in finding.percentiles.items())
        for i, n in enumerate(finding.names)
    )
    return Drawing(id="parts", title=finding.title, alt=alt, paint=paint)
