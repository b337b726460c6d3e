"""Figures of the graphs: what caps cost, why the plan's were chosen, their slots and memory, and their use in a run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from thdprof.analyze.buckets.statistics import PERCENTILES
from thdprof.analyze.predictions import Range
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.drawing import Canvas, Figure, FigureTable, Panel, Scale, write_whole
from thdprof.plan import BucketPart, FallbackRate, Plan
from thdprof.words import join_words, memory_size, percent, percentile_name, ratio, write_count

NO_STATS = "No statistics of a run were given: thdprof report plan.yaml stats.jsonl compares them."
_LEFT = 52
"""Pixels to the left of a panel, for the labels of its y axis."""
_NEAR = 0.7
"""The share of the longest step time above which all times count as near to one another."""
_MOST_BARS = 40
"""Most pipeline ranks that are drawn; of more, every second, third, ... is."""
_NAMED = 4
"""Most graphs whose documents are named in a sentence."""
_ALIKE = 5e-4
"""Difference of two relative step times that no report shows."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to train: by the plan, under the cap that the report is about, or another."""

    name: str
    relative_step_time: Range | None
    """Mean step time divided by that of running all micro-batches eagerly; None without times."""
    rate: FallbackRate
    """The three shares that run eagerly."""


def caps(report: Report, cap: int) -> Figure:
    """The fallbacks and the step time under every single cap."""
    profile, recommended = report.profile, report.recommended_cap
    xs, rates = trace_caps(report)
    times, rate = report.relative_step_times([*xs, cap]), profile.fallback_rate(cap)

    def paint(canvas: Canvas) -> None:
        top = canvas.legend({name: i for i, name in enumerate(rates)})
        x = Scale(max(1, min(xs[0], cap)), max(xs[-1], cap, 2), _LEFT, canvas.width - 8, True)
        panel = canvas.panel("Share that runs eagerly", x, (0, 1), 190, top=top)
        panel.axes(x_label="" if times is not None else "cap, documents", x_ticks=times is None)
        for style, values in enumerate(rates.values()):
            panel.line(xs, values, style)
        panel.cap(cap)
        for level, share in rate:
            panel.dot(cap, share, level)
        if times is not None:
            _paint_times(canvas, report, x, xs, times, cap)

    documents = profile.histogram()
    alt = "The three shares that run eagerly, over the cap. At the percentiles: " + ", ".join(
        f"{percentile_name(name)} {documents.percentile(PERCENTILES[name]):,}" for name in ("p90", "p99", "max")
    )
    if times is not None:
        alt += f". Below, the step time relative to eager: cap {cap:,} {ratio(times[-1])}"
    of_recommended = None if recommended is None else report.relative_step_times([recommended])
    return Figure(
        id="caps",
        text=cap_sentences(report, [cap])[0],
        alt=f"{alt}.",
        paint=paint,
        values={
            "cap_documents": cap,
            "replayed_share": 1 - rate.microbatch,
            **{f"eager_{level}_share": share for level, share in rate},
            "relative_step_time": None if times is None else times[-1],
            "recommended_cap_documents": recommended,
            "recommended_relative_step_time": None if of_recommended is None else of_recommended[0],
        },
    )


def trace_caps(report: Report) -> tuple[list[int], dict[str, list[float]]]:
    """The caps of the profile's grid, in documents, and by name the three shares that run eagerly under each."""
    curve, levels = report.profile.curve().to_dict("list"), ("microbatch", "rank_step", "step")
    names = "eager micro-batches", "(rank, step) with an eager one", "steps with an eager one"
    return curve["max_seqs"], {n: curve[f"fallback_rate_{level}"] for n, level in zip(names, levels, strict=True)}


def _paint_times(canvas: Canvas, report: Report, x: Scale, xs: list[int], times: list[Range], cap: int) -> None:
    """The step time of every cap, as a band where it is a range, beside that of the plan.

    `times` are relative step times of the caps `xs` of the curve, then of `cap`, which is marked.
    """
    lows, highs = [low for low, _ in times[:-1]], [high for _, high in times[:-1]]
    entries = {"one cap": 0}
    num_buckets, of_plan = len(report.plan.graphs.buckets), report.times.relative_step_time
    plan = of_plan if num_buckets else None
    if plan is not None:
        entries[f"the plan's {write_count(num_buckets, 'graph')}: {ratio(plan)}{_own_data(report)}"] = 2
    top = canvas.bottom + 20
    canvas.text(0, top + 14, "Step time, all eager = 1", look="b")
    top = canvas.legend(entries, top=top + 20, marked=False) + 8
    every = [*itertools.chain(*times), *(of_plan or ())]
    low, high = min(every), max(every)
    spread = max(high - low, 0.01)
    # From 0, unless the times would then look the same.
    if low < _NEAR * high:
        low, high = 0.0, max(1.08, high * 1.05)
    else:
        low, high = low - 0.4 * spread, high + 0.3 * spread
    panel = Panel(canvas, x, Scale(low, high, top + 190, top))
    panel.axes(x_label="cap, documents", write_y=lambda value: f"{value:.3g}")
    panel.band(xs, lows, highs, 0)
    panel.line(xs, highs, 0)
    if lows != highs:
        panel.line(xs, lows, 0, marked=False)
    if plan is not None:
        panel.band([x.low, x.high], [plan[0]] * 2, [plan[1]] * 2, 2)
        for value in sorted(set(plan)):
            canvas.line([(x.start, panel.y(value)), (x.end, panel.y(value))], "l s2")
    panel.cap(cap, named=False)
    for value, name in zip(times[-1], ("time_low", "time_high"), strict=True):
        panel.dot(cap, value, name)


def cap_sentences(report: Report, caps: list[int]) -> list[str]:
    """What each of `caps` does, in a sentence each, beside the recommended cap."""
    recommended = report.recommended_cap
    times = report.relative_step_times([*caps, recommended or 1])
    grid = {*report.profile.caps()}
    sentences = []
    for index, cap in enumerate(caps):
        rate = report.profile.fallback_rate(cap)
        one = f"One cap of {write_count(cap, 'document')} replays"
        if rate.step == 0:
            text = f"{one} every micro-batch"
        else:
            text = (
                f"{one} {percent(1 - rate.microbatch)} of micro-batches, but {percent(rate.step)} of steps wait for an "
                "eager one"
            )
        if times is not None:
            about = "" if cap in grid or cap > max(grid) else "about "
            text += f": a step takes {about}{ratio(times[index])} of its eager time"
            differs = any(abs(a - b) >= _ALIKE for a, b in zip(times[index], times[-1], strict=True))
            if recommended is not None and cap != recommended and differs:
                text += f", under the recommended cap, {recommended:,}, {ratio(times[-1])}"
        sentences.append(f"{text}.")
    return sentences


def cheaper_graph(report: Report) -> str:
    """On the widest fall of the replay time from one cap of the cost table to the next; empty where none falls."""
    costs, longest = report.profile.costs, report.profile.training.seq_length
    measured = costs.measured_max_seqs()
    times = [costs.replay_ms(n, longest) for n in measured]
    falls = [(before - after, i) for i, (before, after) in enumerate(itertools.pairwise(times))]
    most, at = max(falls, default=(0.0, 0))
    if most <= 0:
        return ""
    small, large = measured[at], measured[at + 1]
    return (
        f"A larger graph can be cheaper: one of {large:,} documents replays in {times[at + 1]:.1f} ms, one of "
        f"{small:,} in {times[at]:.1f} ms by the cost table, since the time of attention kernels need not grow with "
        f"the documents that they are launched for. So from a cap of {small:,} to one of {large:,} the step time falls "
        "for two reasons: fewer micro-batches run eagerly, and the others replay a quicker graph."
    )


def choice(report: Report, cap: int) -> Figure:
    """The plan's graphs beside their alternatives: step times, or without times what runs eagerly."""
    graphs, rate = report.plan.graphs, report.plan.predictions.fallback_rate
    every = alternatives(report, cap)
    shares: list[tuple[object, ...]] = [(*_sizes(b).values(), percent(b.share)) for b in graphs.buckets]
    shares.append(("eager", "", "", percent(rate.microbatch)))
    return Figure(
        id="choice",
        text=_choice_text(report),
        tables=(
            _compare_alternatives(every),
            FigureTable("The plan's graphs", [*_SIZES, "micro-batches"], shares),
        ),
        values={
            "impl": graphs.impl,
            "graphs": [{**_sizes(b), "share": b.share} for b in graphs.buckets],
            "times_origin": report.times.origin,
            "relative_step_time": report.times.relative_step_time,
            "eager_step_share": rate.step,
            "one_cap_documents": report.recommended_cap,
            "alternatives": [
                {"name": a.name, "relative_step_time": a.relative_step_time, "eager_step_share": a.rate.step}
                for a in every
            ],
        },
    )


_SIZES = ("documents", "longest document, tokens", "ranks")
"""Columns of a graph's sizes in a table."""


def _sizes(b: Any) -> dict[str, int]:
    return {"max_seqs_documents": b.max_seqs, "max_seqlen_tokens": b.max_seqlen, "cp_size": b.cp_size}


def alternatives(report: Report, cap: int) -> list[Alternative]:
    """Eager, the usual advice, the recommended single cap, `cap` and the plan.

    The slowest come first; without times, those with most eager micro-batches.
    """
    plan, profile = report.plan, report.profile
    names: dict[int, list[str]] = {}
    documents = profile.histogram()
    for name in ("p90", "p99", "max"):
        words = "pad to the most" if name == "max" else f"cap at {percentile_name(name)}"
        names.setdefault(documents.percentile(PERCENTILES[name]), []).append(words)
    if report.recommended_cap is not None:
        names.setdefault(report.recommended_cap, []).append("recommended cap")
    if cap != report.default_cap:
        names.setdefault(cap, []).append("your cap")
    times = report.relative_step_times([*names])
    everything = FallbackRate(microbatch=1.0, rank_step=1.0, step=1.0)
    found = [Alternative("all eager", None if times is None else (1.0, 1.0), everything)]
    for index, (at, of_cap) in enumerate(names.items()):
        time = None if times is None else times[index]
        found.append(Alternative(f"{', '.join(of_cap)}: {at:,}", time, profile.fallback_rate(at)))
    buckets = plan.graphs.buckets
    if buckets:
        graphs = (
            join_words([f"{b.max_seqs:,}" for b in buckets]) if has_short_names(buckets) else f"{len(buckets)} graphs"
        )
        time = None if times is None else report.times.relative_step_time
        found.append(Alternative(f"plan{_own_data(report)}: {graphs}", time, plan.predictions.fallback_rate))
    return sorted(found, key=lambda a: (sum(a.relative_step_time or ()), a.rate.microbatch, a.name), reverse=True)


def _own_data(report: Report) -> str:
    """Words beside the plan's numbers where the profile also counts data that the plan was not made for."""
    return ", on its own data" if report.profile.num_runs > 1 else ""


def has_short_names(buckets: list[BucketPart]) -> bool:
    """Whether the plan's graphs are few and differ in documents, so that these can stand for each of them."""
    return len({b.max_seqs for b in buckets}) == len(buckets) <= _NAMED


def bucket_names(report: Report) -> str:
    """The documents of the plan's graphs in words, such as "64, 113 and 358 documents"."""
    buckets = report.plan.graphs.buckets
    repeated = len({b.max_seqs for b in buckets}) < len(buckets)
    names = [f"{b.max_seqs:,} (to {b.max_seqlen:,} tokens)" if repeated else f"{b.max_seqs:,}" for b in buckets]
    one = len(buckets) == 1 and buckets[0].max_seqs == 1
    return (
        f"{join_words(names)} {'document' if one else 'documents'}" if len(names) <= _NAMED else f"{len(names)} shapes"
    )


def _choice_text(report: Report) -> str:
    plan, profile = report.plan, report.profile
    buckets, rate = plan.graphs.buckets, plan.predictions.fallback_rate
    relative = report.times.relative_step_time
    if not buckets or plan.graphs.impl == "none":
        return _eager_text(report)
    stalls = "no step waits for an eager micro-batch" if rate.step == 0 else f"{percent(rate.step)} of steps wait"
    text = f"Graphs for {bucket_names(report)} were chosen"
    if relative is None:
        replayed = "every micro-batch" if rate.microbatch == 0 else f"{percent(1 - rate.microbatch)} of micro-batches"
        text += f": they replay {replayed}, and {stalls}"
    else:
        text += f" because a step takes {ratio(relative)} of its eager time and {stalls}"
    if profile.num_runs > 1:
        return f"{text}, on the data that the plan was made for."
    one = report.recommended_cap
    times = None if one is None else report.relative_step_times([one])
    if relative is None or one is None or times is None or len(buckets) == 1:
        return f"{text}."
    less = [1 - own / single for own, single in zip(relative, times[0], strict=True)]
    if min(less) <= 0:
        return f"{text}."
    low, high = percent(min(less)), percent(max(less))
    return f"{text}: {low if low == high else f'{low} to {high}'} less than under the recommended cap, {one:,}."


def _eager_text(report: Report) -> str:
    profile = report.profile
    considered = sorted({max(1, profile.histogram().percentile(p)) for p in PERCENTILES.values()})
    times = report.relative_step_times(considered)
    if times is None:
        return "Running eagerly was chosen: the plan captures no graphs."
    # Without limits, a cap that saves more would have been chosen.
    bound = profile.num_runs == 1 and min(high for _, high in times) <= 1 - profile.costs.least_gain
    none = f"no graphs {'within the limits that were given' if bound else 'that were considered'} save"
    return f"Running eagerly was chosen: {none} {profile.costs.least_gain:.0%} of the step time."


def _compare_alternatives(every: list[Alternative]) -> FigureTable:
    """The shares that run eagerly by each alternative, and its step time where that is known."""
    times = [a.relative_step_time for a in every]
    head, rows = ["", "steps that wait", "eager micro-batches"], []
    for a, time in zip(every, times, strict=True):
        known = [] if time is None else [ratio(time)]
        rows.append([a.name, *known, percent(a.rate.step), percent(a.rate.microbatch)])
    if None not in times:
        head.insert(1, "step time, all eager = 1")
    return FigureTable("Ways to train, the slowest first" if None not in times else "Ways to train", head, rows)


def memory(report: Report, cap: int) -> Figure:
    """Slots of every pipeline rank, and graph memory of the busiest one for 1, 2, ... buckets.

    The sentence on a plan that captures nothing says which slots and which memory one `cap` would need.
    """
    plan, timed = report.plan, report.times.origin != "none"
    slots = plan.graphs.slots
    num_buckets = len(plan.captured)
    most, num_models = max(sum(rank) for rank in slots), len(slots) * len(slots[0])
    freed, host, gib = 0, None, []
    if num_buckets and timed:
        freed, host_bytes = plan.predictions.offload_freed_bytes or 0, plan.predictions.offload_host_bytes
        host = None if host_bytes is None else host_bytes / 2**30
    for buckets in range(1, max(3, num_buckets) + 1) if timed else ():
        size = report.profile.costs.graph_memory_bytes(
            num_slots=most / num_models, num_buckets=buckets, n_tokens=max(1, plan.graph_tokens)
        )
        if size is not None:
            gib.append(max(0, size - freed) / 2**30)

    title = f"Graph memory of the busiest rank{'' if host is None else ', after offloading'}"
    rows = [(n, f"{size:.2f} GiB{', the plan' if n == num_buckets else ''}") for n, size in enumerate(gib, start=1)]
    return Figure(
        id="memory",
        text=_memory_text(plan, most, gib, cap, host, known=timed),
        alt="Slots of each pipeline rank: " + ", ".join("+".join(map(str, rank)) for rank in slots[:_MOST_BARS]) + ".",
        paint=(lambda canvas: _paint_slots(canvas, slots)) if num_models > 1 else None,
        tables=(FigureTable(title, ["graphs a slot", "memory"], rows),) if gib else (),
        values={
            "captured_graphs": num_buckets,
            "slots_by_rank": slots if num_buckets else [],
            "graph_memory_gib": (gib[num_buckets - 1] if num_buckets else 0.0) if gib else None,
            "graph_memory_by_graphs_gib": gib,
            "pinned_host_memory_gib": host,
        },
    )


def _memory_text(plan: Plan, most: int, gib: list[float], cap: int, host: float | None, *, known: bool) -> str:
    """The slots and the graph memory of the busiest rank; of a plan without graphs, what one `cap` would need."""
    ranks, captured = len(plan.graphs.slots), len(plan.captured)
    rank = "the only pipeline rank" if ranks == 1 else f"the busiest of {ranks:,} pipeline ranks"
    unknown = "the cost table does not tell what {} takes" if known else "what {} takes depends on the model"
    if not captured:
        would = f"with one cap of {write_count(cap, 'document')} {rank} would need {write_count(most, 'slot')}"
        size = f" and about {memory_size(gib[0])} of graph memory" if gib else f"; {unknown.format('one')}"
        return f"The plan captures nothing, so no slot and no graph memory are needed; {would}{size}."
    text = f"{rank[0].upper()}{rank[1:]} needs {write_count(most, 'slot')}"
    pinned = "" if host is None else f" and {memory_size(host)} of pinned host memory"
    after = "" if host is None else " after offloading"
    if not gib:
        return f"{text}{pinned if known else ''}; {unknown.format('a slot')}."
    text += f"{',' if pinned else ' and'} about {memory_size(gib[captured - 1])}"
    if captured == 1:
        return f"{text} of graph memory{after}{pinned}."
    times = gib[captured - 1] / gib[0] if gib[0] else 1.0
    shared = f"{captured} graphs a slot"
    because = "because all graphs of a slot share its memory."
    if host is not None:
        shared += f"{after}{pinned}: {times:.2f} times the graph memory of one graph"
        return f"{text} of graph memory for {shared}, {because}"
    return f"{text} for {shared}, {times:.2f} times that of one, {because}"


def _paint_slots(canvas: Canvas, every: list[list[int]]) -> None:
    stride = -(-len(every) // _MOST_BARS)
    ranks, most = range(0, len(every), stride), max(sum(rank) for rank in every)
    x = Scale(-0.5 * stride, ranks[-1] + 0.5 * stride, _LEFT, canvas.width - 8)
    panel = canvas.panel("Slots", x, (0, most * 1.05), 162, gap=28)
    panel.axes(x_label="pipeline rank" + (f", every {stride}th" if stride > 1 else ""), write_y=write_whole)
    for rank in ranks:
        low, high, slots = rank - 0.35 * stride, rank + 0.35 * stride, sum(every[rank])
        chunks = f" ({' + '.join(map(str, every[rank]))})" if len(every[rank]) > 1 else ""
        panel.column(low, high, slots, f"pipeline rank {rank}: {write_count(slots, 'slot')}{chunks}")


def observed(report: Report, cap: int) -> Figure:
    """The plan's shares beside those that a run observed, as pairs of bars."""
    comparison = report.comparison
    if comparison is None:
        return Figure(id="observed", text=NO_STATS, values={})
    predicted, seen = comparison.predicted_fallback_rate, comparison.observed_fallback_rate
    rows: list[tuple[object, ...]] = [
        (*_sizes(b).values(), f"{b.predicted_share:.2%}", f"{b.observed_share:.2%}") for b in comparison.buckets
    ]
    rows.append(("eager by shape", "", "", f"{predicted:.2%}", f"{seen:.2%}"))
    notes = [("nothing was replayed", "what the shapes decide is shown")] if comparison.basis == "decided" else []
    notes += [(f"eager, not predicted: {reason}", f"{n:,}") for reason, n in comparison.other_fallbacks.items()]
    for way, ms in (("a replayed", comparison.replay_ms), ("an eager", comparison.eager_ms)):
        if ms is not None:
            notes.append((f"{way} micro-batch", f"{ms:.2f} ms"))
    verdict = "as predicted" if comparison.is_as_predicted else "not as predicted"
    dispatched = write_count(comparison.dispatched, "dispatched micro-batch", "dispatched micro-batches")
    wrong = f"{comparison.wrong_numbers}. " if comparison.wrong_numbers else ""

    return Figure(
        id="observed",
        text=(
            f"{wrong}{percent(seen)} of {dispatched} fell back by their shape, {percent(predicted)} were predicted: "
            f"{verdict}, no share is further off than {comparison.largest_difference * 100:.2f} points."
        ),
        tables=(
            FigureTable("Share of dispatched micro-batches", [*_SIZES, "predicted", "observed"], rows),
            *([FigureTable("What else the run counted", [], notes)] if notes else []),
        ),
        values={
            "dispatched_microbatches": comparison.dispatched,
            "predicted_fallback_share": predicted,
            "observed_fallback_share": seen,
            "largest_difference_share": comparison.largest_difference,
            "holds": comparison.holds,
            "graphs": [
                {**_sizes(b), "predicted_share": b.predicted_share, "observed_share": b.observed_share}
                for b in comparison.buckets
            ],
            "verified_microbatches": comparison.verified,
            "mismatches": comparison.mismatches,
            "suspicions": comparison.suspicions,
            "other_fallbacks_microbatches": {str(reason): n for reason, n in comparison.other_fallbacks.items()},
            "replay_ms": comparison.replay_ms,
            "eager_ms": comparison.eager_ms,
        },
    )
