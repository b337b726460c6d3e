"""Shows what `thdprof pack` has made: the trainer's own packs and the new ones in a table, as JSON, or on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof import __version__
from thdprof.analyze.analysis import Analysis
from thdprof.analyze.profile.run_profile import make_profile
from thdprof.analyze.report import html
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.shared import plain_table, print_parts
from thdprof.pack.repack import Repacking, Side
from thdprof.words import memory_size, percent, ratio, write_count, write_range

SCHEMA = "thdprof.packs/1"
"""Name and version of the JSON."""


_ORDERED_FOR = ("seq_length", "data_parallel_size", "global_batch_size", "micro_batch_size", "seed")
"""Settings for which the packs and their order hold."""


def print_repacking(result: Repacking, console: Console, *, then: Sequence[str] = ()) -> None:
    """Write the table, the notes, and what the user does next."""
    run = result.after.analysis.settings
    step = (
        write_count(run.data_parallel_size, "rank"),
        write_count(run.num_microbatches, "micro-batch", "micro-batches"),
        write_count(run.micro_batch_size, "pack"),
    )
    parts: list[str | Table | Text] = [Text(f"packs of {run.seq_length:,} tokens, for steps of {' x '.join(step)}")]
    if result.curve:
        curve = plain_table([], ["cap", "packs", "more", "most documents", "tokens a second"])
        for cap in result.curve:
            mark = "*" if cap.max_docs == result.max_docs else ""
            name = "none" if cap.max_docs is None else f"{cap.max_docs:,}"
            rate = "not known" if cap.tokens_per_second is None else f"{cap.tokens_per_second:,.0f}"
            curve.add_row(f"{mark}{name}", f"{cap.packs:,}", f"{cap.more_packs:.2%}", f"{cap.documents:,}", rate)
        parts += [Text(), curve, Text()]
        if result.curve[0].tokens_per_second is None:
            parts.insert(-1, "No times are known, so the cap (*) is the least that adds at most 0.3% of packs.")
    table = plain_table(["one epoch"], ["before", "after"])
    for name, *cells in _rows(result):
        table.add_row(name, *cells)
    print_parts([*parts, table, *map(Text, _describe_packs(result)), *map(Text, then)], console)


def _describe_packs(result: Repacking) -> Iterator[str]:
    """Sentences on documents that were not packed whole, and on how like a random order the new one is."""
    yield from (f"{note[0].upper()}{note[1:]}." for note in result.packs.documents.notes)
    if result.order is None:
        return
    ordered, random = result.order
    each = (f"{round(figures.correlation, 2) + 0.0:.2f}" for figures in result.order)  # never -0.00
    yield f"Mean lengths of neighbouring steps' documents correlate by {', and by '.join(each)} in a random order."
    if ordered.source_distance is not None and random.source_distance is not None:
        distance = f"by {percent(ordered.source_distance)} of its tokens, and by {percent(random.source_distance)}"
        sources = f"The mix of {len(result.sources)} sources in a step"
        yield f"{sources} differs from that of all data {distance} in a random order."


def _rows(result: Repacking) -> list[tuple[str, str, str]]:
    before, after = result.before, result.after

    def row(name: str, cell: Any) -> tuple[str, str, str]:
        return name, cell(before), cell(after)

    def documents(side: Side) -> str:
        counts = side.analysis.n_seqs
        return f"{counts.p50:,}; {counts.p99:,}; {counts.max:,}"

    def graphs(side: Side) -> str:
        return ", ".join(f"{bucket.max_seqs:,}" for bucket in side.analysis.recommendation.buckets) or "none"

    def memory(side: Side) -> str:
        return "not known" if side.graph_memory_bytes is None else memory_size(side.graph_memory_bytes / 2**30)

    def slowest(value: float | None) -> str:
        return "not known" if value is None else f"{value:.3f}"

    rows = [
        row("packs", lambda side: f"{side.packs:,}"),
        row("share of them that is filled", lambda side: percent(side.fill)),
        row("documents of a micro-batch: P50; P99; max", documents),
        row("graphs for documents up to", graphs),
        row("steps with an eager micro-batch", lambda side: percent(side.analysis.recommendation.fallback_rate.step)),
        row("memory of graphs", memory),
        row("slowest rank by the mean rank", lambda side: slowest(side.slowest_over_mean)),
        row("the same in a random order", lambda side: slowest(side.slowest_over_mean_random)),
    ]
    if before.analysis.times.step_ms is not None and after.analysis.times.step_ms is not None:
        rows.append(row("a step", lambda side: write_range(side.analysis.times.step_ms, "ms")))
        rows.append(row("of a step run eagerly", lambda side: ratio(side.analysis.times.relative_step_time)))
    if before.tokens_per_second is not None and after.tokens_per_second is not None:
        rows.append(row("tokens a second", lambda side: write_range(side.tokens_per_second)))
    return rows


def to_page(result: Repacking, analysis: Analysis) -> str:
    """The page that `thdprof report` makes of a plan of the new packs, with the table of before and after."""
    report = Report(plan=analysis.plan, profile=make_profile(analysis), comparison=None)
    rows = [("one epoch", "before", "after"), *_rows(result)]
    title = "thdprof pack: before and after"
    return html.to_page(
        report,
        report.default_cap,
        title=title,
        version=__version__,
        compared=rows,
        explained=" ".join(_describe_packs(result)),
    )


def to_dict(result: Repacking) -> dict[str, Any]:
    """The JSON object as a dict."""
    return {
        "schema": SCHEMA,
        "settings": {name: getattr(result.after.analysis.settings, name) for name in _ORDERED_FOR},
        "max_docs": result.max_docs,
        "documents": len(result.packs.order),
        "caps": [asdict(cap) for cap in result.curve],
        "before": _side(result.before),
        "after": _side(result.after),
        "sources": list(result.sources),
        "steps": None if result.order is None else {name: f._asdict() for name, f in result.order._asdict().items()},
        "notes": list(result.packs.documents.notes),
    }


def _side(side: Side) -> dict[str, Any]:
    chosen, times = side.analysis.recommendation, side.analysis.times
    return {
        "packs": side.packs,
        "fill": side.fill,
        "documents_per_microbatch": side.analysis.n_seqs.model_dump(),
        "buckets": [asdict(bucket) for bucket in chosen.buckets],
        "fallback_rate": chosen.fallback_rate.model_dump(),
        "graph_memory_bytes": side.graph_memory_bytes,
        "slowest_over_mean": side.slowest_over_mean,
        "slowest_over_mean_random": side.slowest_over_mean_random,
        "relative_step_time": times.relative_step_time,
        "step_ms": times.step_ms,
        "tokens_per_second": side.tokens_per_second,
    }
