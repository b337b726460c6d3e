"""Shows a sweep on a terminal, with one row for each combination, and as JSON, schema `thdprof.sweep/1`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.report.words import percent
from thdprof.analyze.sweep import Combination, Sweep
from thdprof.files import json_text
from thdprof.plan import BucketPart, Plan

SCHEMA = "thdprof.sweep/1"
_STEPS = "steps with an\neager micro-batch"
_FIGURES = ("micro-batches", "steps", "P50", "P99", "max", "caps", _STEPS, "step time", "graph memory")


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Write the report of `sweep` to `console`."""
    for part in _parts(sweep):
        console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))


def _parts(sweep: Sweep) -> Iterator[str | Table | Text]:
    data = sweep.dataset
    source = data.uris[0] if len(data.uris) == 1 else f"{data.uris[0]} and {len(data.uris) - 1} more"
    yield Text(f"{source} ({data.format}): {data.rows:,} rows, {data.documents:,} documents, {data.tokens:,} tokens")
    assumed = [[f"{a.flag} {a.value} ({a.why})" for a in c.assumptions] for c in sweep.combinations]
    for text, rows in _by_row(sweep, assumed):
        yield Text(f"  assumed {text}{rows}", style="dim")
    yield ""
    yield _table(sweep)
    yield ""
    yield "P50, P99, max: documents of a micro-batch; step time: eager = 1; graph memory: of a pipeline rank"
    for text, rows in _by_row(sweep, [list(c.warnings) for c in sweep.combinations]):
        yield Text(f"warning: {text}{rows}", style="yellow")


def _by_row(sweep: Sweep, texts: list[list[str]]) -> Iterator[tuple[str, str]]:
    """Each text of `texts` (a list for each row) once, with its rows, or with none where all analysed rows have it."""
    all_rows = [n for n, c in enumerate(sweep.combinations, start=1) if c.plan is not None]
    rows: dict[str, list[int]] = {}
    for number, of_row in enumerate(texts, start=1):
        for text in of_row:
            rows.setdefault(text, []).append(number)
    for text, numbers in rows.items():
        yield text, "" if numbers == all_rows else f" [row {', '.join(map(str, numbers))}]"


def _table(sweep: Sweep) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("row", justify="right")
    for name in (*(n.replace("_", "-") for n in sweep.names), *_FIGURES):
        table.add_column(name, justify="right")
    problems = any(c.problem is not None for c in sweep.combinations)
    if problems:
        table.add_column("cannot be")
    for number, c in enumerate(sweep.combinations, start=1):
        values = [_shown(v) for v in c.values.values()]
        figures = ["-"] * len(_FIGURES) if c.plan is None else plan_cells(c.plan)
        table.add_row(str(number), *values, *figures, *([Text(c.problem or "")] if problems else []))
    return table


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_cells(plan: Plan) -> list[str]:
    """The cells of one combination's plan in the table of a sweep, in the order of `_FIGURES`."""
    part, predicted = plan.microbatches, plan.predictions
    memory = predicted.graph_memory_bytes
    return [
        f"{part.count:,}",
        f"{part.steps:,}",
        *(f"{n:,}" for n in (part.n_seqs.p50, part.n_seqs.p99, part.n_seqs.max)),
        _caps(plan),
        percent(predicted.fallback_rate.step),
        f"{predicted.relative_step_time:.3f}",
        "-" if memory is None else f"{memory / 2**30:.1f} GiB",
    ]


def _caps(plan: Plan) -> str:
    """The buckets' caps, each once. Dynamic context parallelism adds a cap's context-parallel size; a cap with several
    buckets has the longest documents of each of them behind it."""
    lengths: dict[str, list[int]] = {}
    for bucket in plan.graphs.buckets:
        lengths.setdefault(_cap(plan, bucket), []).append(bucket.max_seqlen)
    several = (
        cap + (f" (of {' or '.join(f'{n:,}' for n in of_cap)} tokens)" if len(of_cap) > 1 else "")
        for cap, of_cap in lengths.items()
    )
    return ", ".join(several) or "none"


def _cap(plan: Plan, bucket: BucketPart) -> str:
    if plan.training.max_seqlen_per_dp_cp_rank is None:
        return f"{bucket.max_seqs}"
    return f"{bucket.max_seqs} on {bucket.cp_size}"


def to_dict(sweep: Sweep) -> dict[str, Any]:
    """The JSON object as a dict."""
    return {
        "schema": SCHEMA,
        "dataset": {**asdict(sweep.dataset), "uris": list(sweep.dataset.uris)},
        "swept": list(sweep.names),
        "combinations": [_combination(c) for c in sweep.combinations],
    }


def _combination(c: Combination) -> dict[str, Any]:
    parts = ("training", "microbatches", "graphs", "predictions", "costs")
    plan = {} if c.plan is None else c.plan.model_dump(mode="json", by_alias=True)
    return {
        "settings": c.values,
        "problem": c.problem,
        **{name: plan.get(name) for name in parts},
        "assumptions": [asdict(a) for a in c.assumptions],
        "warnings": list(c.warnings),
    }


def to_json(sweep: Sweep) -> str:
    """The sweep as JSON text, indented."""
    return json_text(to_dict(sweep))
