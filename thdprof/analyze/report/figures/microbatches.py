"""Figures of the micro-batches: their shapes, and how these vary over ranks, steps and parts of the data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram
from thdprof.analyze.profile.run_profile import histogram_of, share_over
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.drawing import LINE, Canvas, Figure, FigureTable, Panel, Scale, write_whole
from thdprof.words import make_printable, percent, percentile_name, shorten, write_count

NO_PARTS = (
    "One part of data was profiled, so differences between shards, or between the components of a blend, are not "
    "known: profile each by itself (analyze --profile) and join them with thdprof merge."
)
LONGEST_NAME = 60
"""Characters of a part's name in a sentence."""
_LEFT = 60
"""Pixels to the left of a panel, for the labels of its y axis."""
_BINS = 40
"""Most bars of a histogram."""
_POINTS = 400
"""Most points of a curve."""
_SKEWED = 8
"""A largest value more than this many times the (least) median is shown on a logarithmic axis."""
_MOST_PARTS = 20
"""Most parts of the data that are shown."""
_LEAST = 200
"""Least micro-batches of a segment, where the run has that many: the P99 of fewer would be noise."""
_ONCE_IN_1000 = 1.949
"""Critical value of the two-sample Kolmogorov-Smirnov statistic, which chance exceeds once in 1000 times."""
_ONCE_IN_1000_NORMAL = 3.291
"""Deviations from the mean that a normal distribution exceeds, to either side, once in 1000 times."""
_ENDS = ("p50", "p90", "p99", "max")
"""Percentiles of documents that are shown over the run and of parts."""


def count_bars(histogram: Histogram) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Borders of the bars that show `histogram`, shape [bars + 1], and the share of micro-batches in each, [bars]."""
    edges = bin_edges(histogram.percentile(100.0), _BINS, logarithmic=is_skewed(histogram))
    counts = np.histogram(np.arange(len(histogram.counts)), edges, weights=histogram.counts)[0]
    return edges, counts / histogram.total


def _list_percentiles(percentiles: dict[str, int]) -> str:
    return ", ".join(f"{percentile_name(name)} {value:,}" for name, value in percentiles.items())


def is_skewed(histogram: Histogram) -> bool:
    """Whether a logarithmic axis shows the histogram."""
    return histogram.percentile(100.0) > _SKEWED * max(1, histogram.percentile(50.0))


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


def shapes(report: Report, cap: int) -> Figure:
    """Histograms of a micro-batch's documents and of the tokens of its longest document."""
    documents, tokens = report.profile.histogram(), report.profile.histogram(measure="max_seqlen")
    n_seqs, longest = (h.percentiles().model_dump(exclude={"mean"}) for h in (documents, tokens))
    measures = (
        ("documents of a micro-batch", "document", documents, n_seqs),
        ("tokens of its longest document", "token", tokens, longest),
    )

    def paint(canvas: Canvas) -> None:
        columns = 1 if canvas.narrow else 2
        width = (canvas.width - 24 * (columns - 1)) / columns
        top = 0.0
        for index, (label, unit, histogram, percentiles) in enumerate(measures):
            left = index % columns * (width + 24)
            if columns == 1:
                top = canvas.bottom + (24 if index else 0)
            panel = _paint_distribution(canvas, left, top, width, label, unit, histogram)
            if index == 0:
                panel.cap(cap)
            names = [f"{percentile_name(name)} {value:,}" for name, value in percentiles.items()]
            for row, words in enumerate((names[:3], names[3:])):
                y = panel.y.start + (3 + row) * LINE + 4
                canvas.text(left + _LEFT, y, "   ".join(words), look="q", extra=' xml:space="preserve"')
            canvas.bottom = max(canvas.bottom, panel.y.start + 4 * LINE + 8)

    alt = "Two histograms: documents of a micro-batch and tokens of its longest. "
    alt += "; ".join(f"{label}: {_list_percentiles(percentiles)}" for label, _, _, percentiles in measures)
    return Figure(
        id="shapes",
        text=f"{_spread(documents, n_seqs)}; the longest document has "
        f"{write_count(longest['p50'], 'token')} at the median and {longest['max']:,} at most.",
        alt=alt,
        paint=paint,
        values={
            "n_seqs_documents": {"mean": documents.mean, **n_seqs},
            "max_seqlen_tokens": {"mean": tokens.mean, **longest},
        },
    )


def _spread(documents: Histogram, p: dict[str, int]) -> str:
    """The documents of a micro-batch in words; `p` are their percentiles by name."""
    most = percent(share_over(documents, p["max"] - 1))
    if p["p50"] == p["max"]:
        if documents.counts[-1] == documents.total:
            return f"Every micro-batch holds {write_count(p['max'], 'document')}"
        return f"No micro-batch holds more than {write_count(p['max'], 'document')}, and {most} of them hold so many"
    text = f"Half of the micro-batches hold at most {write_count(p['p50'], 'document')}"
    if p["p99"] == p["max"]:
        return f"{text}, the fullest, {most} of all, {p['max']:,}"
    return f"{text} and {percent(share_over(documents, p['p99']))} more than {p['p99']:,}, the fullest {p['max']:,}"


def _paint_distribution(
    canvas: Canvas, left: float, top: float, width: float, label: str, unit: str, histogram: Histogram
) -> Panel:
    edges, shares = count_bars(histogram)
    densities = shares / np.diff(edges)  # bars of unequal width compare by the share for each whole number
    x = Scale(float(edges[0]), float(edges[-1]), left + _LEFT, left + width - 6, is_skewed(histogram))
    most = float(densities.max()) * 1.05
    panel = canvas.panel(f"Share of micro-batches, per {unit}", x, (0, most), 160, top=top, left=left)
    panel.axes(x_label=label)
    for at, (density, part) in enumerate(zip(densities, shares, strict=True)):
        if part == 0:
            continue
        begin, end = edges[at : at + 2]
        first, last = int(begin + 0.5), int(end - 0.5)
        numbers = write_count(first, unit) if first == last else f"{first:,} to {last:,} {unit}s"
        panel.column(begin, end, density, f"{numbers}: {percent(float(part))} of micro-batches")
    return panel


def joint(report: Report, cap: int) -> Figure:
    """The longest documents of micro-batches with few and with many documents."""
    rows, documents = report.profile.rows("microbatch"), report.profile.histogram()
    border = documents.percentile(90.0)
    few, many = rows[rows["n_seqs"] <= border], rows[rows["n_seqs"] > border]
    long_few = histogram_of(few, "max_seqlen").percentile(50.0)
    long_many = histogram_of(many, "max_seqlen").percentile(50.0) if len(many) else None
    groups, low = list[tuple[object, ...]](), 0
    for high in sorted({documents.percentile(PERCENTILES[name]) for name in _ENDS}):
        group = histogram_of(rows[rows["n_seqs"].between(low + 1, high)], "max_seqlen")
        lengths = (group.percentile(PERCENTILES[name]) for name in _ENDS)
        groups.append((f"{low + 1:,} to {high:,}", percent(group.total / documents.total), *lengths))
        low = high
    title, head = "Tokens of the longest document", ["documents", "micro-batches", *map(percentile_name, _ENDS)]
    return Figure(
        id="joint",
        text=compare_lengths(border, long_many, long_few, documents),
        tables=(FigureTable(title, head, groups),),
        values={
            "n_seqs_p90_documents": border,
            "over_p90_share": share_over(documents, border),
            "max_seqlen_p50_over_p90_tokens": long_many,
            "max_seqlen_p50_elsewhere_tokens": long_few,
        },
    )


def compare_lengths(border: int, long_many: int | None, long_few: int, documents: Histogram) -> str:
    """A sentence that says whether micro-batches of many documents have longer or shorter documents than the others.

    The many have more documents than `border`; `long_many` and `long_few` are median tokens of the longest document.
    """
    if long_many is None:
        most = percent(float(documents.counts[border] / documents.total))
        return f"{most} of micro-batches hold the most documents there are, {border:,}."
    share = percent(share_over(documents, border))
    relation = "longer than" if long_many > long_few else "as long as" if long_many == long_few else "shorter than"
    return (
        f"Where documents are many they are {relation} elsewhere: the {share} of micro-batches with more than "
        f"{border:,} have a longest document of {write_count(long_many, 'token')} at the median, the others of "
        f"{long_few:,}."
    )


_UNITS = {"a micro-batch": "microbatch", "fullest of a rank's step": "rank_step_max", "fullest of a step": "step_max"}
"""What documents are counted of -> its kind in a profile."""


def trace_steps(report: Report) -> dict[str, tuple[list[int], list[float]]]:
    """At most `_POINTS` numbers of documents, and the share of units with more than each, by the units' name."""
    curves = {}
    for name, kind in _UNITS.items():
        histogram = report.profile.histogram(kind)
        present = np.flatnonzero(histogram.counts)
        values = np.concatenate(([max(0, int(present[0]) - 1)], present))
        if len(values) > _POINTS:
            values = values[np.linspace(0, len(values) - 1, _POINTS).astype(np.int64)]
        curves[name] = values.tolist(), [share_over(histogram, value) for value in values]
    return curves


def steps(report: Report, cap: int) -> Figure:
    """Documents of a micro-batch beside those of the fullest micro-batch of a rank and of a step."""
    histograms, curves = [report.profile.histogram(kind) for kind in _UNITS.values()], trace_steps(report)
    at_cap = [share_over(h, cap) for h in histograms]
    largest = max(values[-1] for values, _ in curves.values())
    logarithmic, rate = largest > 40, report.profile.fallback_rate(cap)

    def paint(canvas: Canvas) -> None:
        top = canvas.legend({name: i for i, name in enumerate(curves)}, marked=False)
        x = Scale(1 if logarithmic else 0, max(largest, cap, 2), _LEFT, canvas.width - 8, logarithmic)
        panel = canvas.panel("Share with more documents", x, (0, 1), 200, top=top)
        panel.axes(x_label="documents")
        for style, (values, over) in enumerate(curves.values()):
            panel.stairs(values, over, style)
        panel.cap(cap)
        for (level, _), value in zip(rate, at_cap, strict=True):
            panel.dot(cap, value, level)

    return Figure(
        id="steps",
        text=steps_head(report) + steps_over(report, cap),
        alt="Falling curves of the share with more than so many documents. Over the cap: "
        + ", ".join(f"{name} {percent(value)}" for name, value in zip(_UNITS, at_cap, strict=True)),
        paint=paint,
        values={
            "cap_documents": cap,
            "microbatch_p50_documents": histograms[0].percentile(50.0),
            "step_max_p50_documents": histograms[2].percentile(50.0),
            **{f"over_cap_{level}_share": share for level, share in rate},
        },
    )


def steps_head(report: Report) -> str:
    """The part of the sentence of `steps` that does not depend on the cap."""
    micro, step = report.profile.histogram(), report.profile.histogram("step_max")
    return (
        f"The fullest micro-batch of a step holds {write_count(step.percentile(50.0), 'document')} at the median, "
        f"where a micro-batch holds {micro.percentile(50.0):,}: "
    )


def steps_over(report: Report, cap: int) -> str:
    """The end of the sentence of `steps`: what lies over `cap`."""
    rate = report.profile.fallback_rate(cap)
    return (
        f"over a cap of {cap:,} are {percent(rate.microbatch)} of micro-batches, and {percent(rate.step)} of steps "
        "have one of them."
    )


def drift(report: Report, cap: int) -> Figure:
    """Percentiles of documents over the run: all parts together, each from its own first step to its last."""
    micro, largest = (cut_run(report, kind) for kind in ("segment_microbatch", "segment_step_max"))
    percentiles = {name: [h.percentile(PERCENTILES[name]) for h in micro] for name in _ENDS}
    step_median = [h.percentile(50.0) for h in largest]
    stalled = [share_over(h, cap) for h in largest]
    logarithmic = max(percentiles["max"]) > _SKEWED * min(percentiles["p50"])
    most = max(*percentiles["max"], 2)
    number, num_runs = len(stalled), report.profile.num_runs
    each = max(1, round(report.profile.steps / num_runs / number))
    label = f"segment of {'the run' if num_runs == 1 else 'each run'}, about {write_count(each, 'step')} each"
    order = _ENDS[::-1]

    def paint(canvas: Canvas) -> None:
        top = canvas.legend({f"{percentile_name(name)} of micro-batches": i for i, name in enumerate(order)})
        x, limits = Scale(0.5, number + 0.5, _LEFT, canvas.width - 8), (1 if logarithmic else 0, most)
        panel = canvas.panel("Documents", x, limits, 192, top=top, gap=28, logarithmic=logarithmic)
        panel.axes(x_label=label, write_y=write_whole)
        at = list(range(1, number + 1))
        for style, name in enumerate(order):
            panel.line(at, percentiles[name], style)

    return Figure(
        id="drift",
        text=drift_head(report) + drift_over(largest, cap, several=num_runs > 1),
        alt=f"Percentiles of documents in {number} segments of the run; steps over the cap: {percent(min(stalled))} to "
        f"{percent(max(stalled))}, {label}.",
        paint=paint,
        values={
            "cap_documents": cap,
            "runs": num_runs,
            "steps": report.profile.steps,
            "n_seqs_documents": percentiles,
            "step_max_p50_documents": step_median,
            "over_cap_step_share": stalled,
        },
    )


def cut_run(report: Report, kind: str) -> list[Histogram]:
    """Units of `kind` by their documents, in equal stretches of the run, none of them empty.

    A run of fewer steps than a profile has segments has gaps in its segment numbers. To keep every stretch from being
    empty, a part is cut by the rank of a segment among the segments that the part has, not by the segment's number.
    """
    profile = report.profile
    segments = {p.name: np.unique(profile.rows("segment_step_max", part=p.name)["segment"]) for p in profile.parts}
    bins = int(np.clip(profile.microbatches // _LEAST, 1, min(map(len, segments.values()))))
    rows = profile.rows(kind)
    of_row = np.empty(len(rows), dtype=np.int64)
    for part, present in segments.items():
        chosen = (rows["part"] == part).to_numpy()
        place = np.searchsorted(present, rows["segment"].to_numpy()[chosen])
        of_row[chosen] = place * bins // len(present)
    return [histogram_of(rows[of_row == index], "n_seqs") for index in range(bins)]


def _cut_ends(stretches: Sequence[Histogram]) -> tuple[Histogram, Histogram, str]:
    """The first and the last third of the run, or halves of two stretches, and the name of what they are."""
    length, share = (1, "half") if len(stretches) == 2 else (len(stretches) // 3, "third")
    first, last = (reduce(Histogram.merge, part) for part in (stretches[:length], stretches[-length:]))
    return first, last, share


def drift_head(report: Report) -> str:
    """The part of the sentence of `drift` that does not depend on the cap."""
    micro, several = cut_run(report, "segment_microbatch"), report.profile.num_runs > 1
    if len(micro) == 1:
        return f"{'One of the runs that were joined' if several else 'The run'} is too short to tell a drift; "
    run = "the runs that were joined, each by itself," if several else "the run"
    first, last, share = _cut_ends(micro)
    size = max(len(first.counts), len(last.counts))
    early, late = (np.cumsum(np.pad(h.counts, (0, size - len(h.counts)))) / h.total for h in (first, last))
    if np.abs(early - late).max() <= _ONCE_IN_1000 * np.sqrt(1 / first.total + 1 / last.total):
        return (
            f"Documents of a micro-batch do not drift: the first and the last {share} of {run} differ no more than by "
            "chance; "
        )
    p50, p99 = ([h.percentile(p) for h in (first, last)] for p in (50.0, 99.0))
    return (
        f"Documents of a micro-batch drift: from the first {share} of {run} to the last P50 goes from {p50[0]:,} to "
        f"{p50[1]:,} and P99 from {p99[0]:,} to {p99[1]:,}; "
    )


def drift_over(largest: Sequence[Histogram], cap: int, *, several: bool) -> str:
    """The end of the sentence of `drift`: the steps over `cap` at the begin and at the end of the run.

    The shares of single segments are left out: a segment has few steps, so that its share jumps where nothing drifts.
    `largest` are the steps of each stretch by their fullest micro-batch; `several` runs may have been joined.
    """
    over = f"over a cap of {cap:,} are "
    if len(largest) == 1:
        return f"{over}{percent(share_over(largest[0], cap))} of {'all' if several else 'its'} steps."
    first, last, stretch = _cut_ends(largest)
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


def parts(report: Report, cap: int) -> Figure:
    """Percentiles of documents in each part of the data, beside its share of steps over the cap."""
    every = report.profile.parts
    if len(every) == 1:
        return Figure(id="parts", text=NO_PARTS, values={})
    shown = sorted(every, key=lambda p: -p.microbatches)[:_MOST_PARTS]
    histograms = [report.profile.histogram(part=p.name) for p in shown]
    percentiles = {name: [h.percentile(PERCENTILES[name]) for h in histograms] for name in _ENDS}
    names = [make_printable(p.name) for p in shown]
    stalled = [report.profile.fallback_rate(cap, part=p.name).step for p in shown]
    left_out = len(every) - len(shown)
    of_part = [{p: values[i] for p, values in percentiles.items()} for i in range(len(shown))]
    title = "Documents of a micro-batch"
    if left_out:
        title += f"; {write_count(left_out, 'smaller part')} left out"
    rows = [
        (shorten(name, LONGEST_NAME), *of_part[i].values(), percent(share))
        for i, (name, share) in enumerate(zip(names, stalled, strict=True))
    ]
    head = ["part", *map(percentile_name, _ENDS), f"steps over {cap:,}"]
    p99 = percentiles["p99"]
    if min(p99) == max(p99):
        text = f"P99 of documents is {p99[0]:,} in all {write_count(len(shown), 'part')} that are shown."
    else:
        most, least = (shorten(shown[p99.index(n)].name, LONGEST_NAME) for n in (max(p99), min(p99)))
        text = (
            f"P99 of documents is {max(p99):,} in {most} and {min(p99):,} in {least}: "
            "a cap at the P99 of all is not that of each."
        )
    return Figure(
        id="parts",
        text=text,
        tables=(FigureTable(title, head, rows),),
        values={
            "cap_documents": cap,
            "parts": [
                {"name": name, "n_seqs_documents": values, "over_cap_step_share": share}
                for name, values, share in zip(names, of_part, stalled, strict=True)
            ],
            "left_out_parts": left_out,
        },
    )
