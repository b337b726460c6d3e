"""Shows a sweep on a terminal, a row for each combination and the quickest first, and as JSON: `thdprof.sweep/1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.report.shared import dataset_to_dict, name_dataset, plain_table, print_parts
from thdprof.analyze.sweep import Combination, Measure, Ranking, Rate, Sweep
from thdprof.plan import Plan
from thdprof.words import WIDEST, memory_size, percent, ratio, write_range

SCHEMA = "thdprof.sweep/1"
_STEPS = "steps with an\neager micro-batch"
_COUNTS = ("micro-batches", "steps", "P50", "P99", "max", "caps", _STEPS)
_PLAN_PARTS = ("training", "microbatches", "graphs", "predictions", "costs")
"""Parts of a plan that the JSON object has."""
_COSTS, _PEAK, _GRAPHS = "run costs", "peak memory", "graph memory"
_TIMED = ("step time", "tokens/s", "GPUs", "tokens/s a GPU", _COSTS, "saved", "verdict", _PEAK, _GRAPHS)
"""Columns beside the counts, of which a table has those that are known."""


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Write the report of `sweep` to `console`."""
    print_parts(_parts(sweep, console), console)


def _parts(sweep: Sweep, console: Console) -> Iterator[str | Table | Text]:
    data, ranking = sweep.dataset, sweep.ranking()
    rows = [sweep.combinations[place] for place in ranking.order]
    yield Text(f"{name_dataset(data)}: {data.rows:,} rows, {data.documents:,} documents, {data.tokens:,} tokens")
    for text, where in _by_row(rows, [[f"{a.flag} {a.value} ({a.why})" for a in c.assumptions] for c in rows]):
        yield Text(f"  assumed {text}{where}", style="dim")
    yield ""
    for table in _tables(sweep.names, rows, ranking, console):
        yield table
        yield ""
    for reason in dict.fromkeys(filter(None, (c.problem or c.blocked for c in rows))):
        numbers = [str(n) for n, c in enumerate(rows, start=1) if reason in (c.problem, c.blocked)]
        yield Text(f"row {', '.join(numbers)} cannot be: {reason}", style="red")
    yield "; ".join(_legend(rows, ranking))
    if ranking.measure is not None:
        yield Text(_ranked(ranking), style="bold")
    unranked = []
    for c in rows:
        what = "No ranking" if c.times is not None and c.times.origin != "none" else "No times and no ranking"
        unranked.append([] if c.unranked is None else [f"{what} by speed: {c.unranked}"])
    for text, where in _by_row(rows, unranked):
        yield Text(f"{text}{where}.", style="bold")
    for text, where in _by_row(rows, [list(c.warnings) for c in rows]):
        yield Text(f"warning: {text}{where}", style="yellow")


def _by_row(rows: Sequence[Combination], texts: Sequence[list[str]]) -> Iterator[tuple[str, str]]:
    """Each text of `texts` (a list for each row) once, with its rows, or with none where all analysed rows have it."""
    all_rows = [n for n, c in enumerate(rows, start=1) if c.plan is not None]
    found: dict[str, list[int]] = {}
    for number, of_row in enumerate(texts, start=1):
        for text in of_row:
            found.setdefault(text, []).append(number)
    for text, numbers in found.items():
        yield text, "" if numbers == all_rows else f" [row {', '.join(map(str, numbers))}]"


def _tables(names: Sequence[str], rows: Sequence[Combination], ranking: Ranking, console: Console) -> Iterator[Table]:
    """Settings, counts and times in one table; in two where it would be too wide."""
    cells = [_time_cells(c, ranking.measure) for c in rows]
    columns = _name_columns(cells)
    counted: list[list[str]] = [["row", *(n.replace("_", "-") for n in names), *_COUNTS]]
    timed = [columns, *([row.get(name, "-") for name in columns] for row in cells)]
    for number, c in enumerate(rows, start=1):
        values = [str(v).lower() if isinstance(v, bool) else str(v) for v in c.values.values()]
        counted.append([str(number), *values, *(["-"] * len(_COUNTS) if c.plan is None else plan_cells(c.plan))])
    whole = _make_table([a + b for a, b in zip(counted, timed, strict=True)])
    if not columns or console.measure(whole).maximum <= WIDEST:
        yield whole
        return
    yield _make_table(counted)
    yield _make_table([a[:1] + b for a, b in zip(counted, timed, strict=True)])


def _make_table(rows: Sequence[Sequence[str]]) -> Table:
    table = plain_table([], rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _time_cells(c: Combination, measure: Measure | None) -> dict[str, str]:
    """The cells of a row beside the counts, by their columns: none on time where no row can be ranked by a measure."""
    cells = {}
    if measure is not None and c.times is not None and c.times.relative_step_time is not None:
        cells["step time"] = ratio(c.times.relative_step_time)
    if c.rate is not None:
        cells["tokens/s"] = write_range((c.rate.low, c.rate.high))
        size = None if c.plan is None else c.plan.predictions.graph_memory_bytes
        cells[_GRAPHS] = "-" if size is None else memory_size(size / 2**30)
    if c.rate is not None and measure == "tokens_per_second_per_gpu":
        one = c.rate.per_gpu()
        cells |= {"GPUs": f"{c.rate.gpus:,}", "tokens/s a GPU": write_range((one.low, one.high))}
    if c.worth is not None and c.worth.gpu_hour_price is not None and c.worth.saved is not None:
        low, high = (hours * c.worth.gpu_hour_price for hours in c.worth.gpu_hours)
        cells |= {_COSTS: write_range((low, high)), "saved": write_range(c.worth.saved)}
    if measure is not None and c.verdict is not None and c.verdict.ruling is not None:
        cells["verdict"] = c.verdict.ruling
    if c.memory is not None:
        cells[_PEAK] = memory_size(c.memory.peak_bytes / 2**30)
    return cells


def _name_columns(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """The columns that any row has, in order."""
    names = [name for name in _TIMED if any(name in row for row in cells)]
    return [name for name in names if name != _GRAPHS or _PEAK not in names]


def _legend(rows: Sequence[Combination], ranking: Ranking) -> Iterator[str]:
    columns = _name_columns([_time_cells(c, ranking.measure) for c in rows])
    yield "P50, P99, max: documents of a micro-batch"
    if ranking.measure is not None:
        gpus = {c.rate.gpus for c in rows if c.rate is not None}
        over = f"all {max(gpus):,} GPUs" if gpus != {1} else "1 GPU"
        yield "step time: eager = 1"
        yield f"tokens/s: of documents, over {over if len(gpus) == 1 else 'all GPUs of the run'}"
    if _COSTS in columns:
        yield f"{_COSTS}, saved: of the steps analysed"
    if _PEAK in columns or _GRAPHS in columns:
        yield f"{_PEAK if _PEAK in columns else _GRAPHS}: of a pipeline rank"


def _ranked(ranking: Ranking) -> str:
    """What the rows are ranked by, and whether another row is first at an end of the range."""
    by = (
        "tokens/s"
        if ranking.measure == "tokens_per_second"
        else "tokens/s a GPU, since the rows have different numbers of GPUs"
    )
    line = f"Ranked by {by}"
    ends = {"slowest": ranking.first_on_slow_host, "quickest": ranking.first_on_quick_host}
    others = [
        f"on the {host} host row {ranking.order.index(first) + 1} would be first"
        for host, first in ends.items()
        if first is not None and first != ranking.order[0]
    ]
    return "; ".join([line + (", on a host in the middle of the range" if others else ""), *others]) + "."


def plan_cells(plan: Plan) -> list[str]:
    """The cells of one combination's plan in the table of a sweep, in the order of `_COUNTS`."""
    part = plan.microbatches
    return [
        f"{part.count:,}",
        f"{part.steps:,}",
        *(f"{n:,}" for n in (part.n_seqs.p50, part.n_seqs.p99, part.n_seqs.max)),
        _caps(plan),
        percent(plan.predictions.fallback_rate.step),
    ]


def _caps(plan: Plan) -> str:
    """The buckets' caps, each once. Dynamic context parallelism adds a cap's context-parallel size; a cap with several
    buckets has the longest documents of each of them behind it."""
    lengths: dict[str, list[int]] = {}
    for bucket in plan.graphs.buckets:
        on = "" if plan.training.max_seqlen_per_dp_cp_rank is None else f" on {bucket.cp_size}"
        lengths.setdefault(f"{bucket.max_seqs}{on}", []).append(bucket.max_seqlen)
    several = (
        cap + (f" (of {' or '.join(f'{n:,}' for n in of_cap)} tokens)" if len(of_cap) > 1 else "")
        for cap, of_cap in lengths.items()
    )
    return ", ".join(several) or "none"


def to_dict(sweep: Sweep) -> dict[str, Any]:
    """The JSON object as a dict: combinations in the order of their values, each with its rank."""
    ranking = sweep.ranking()
    value: dict[str, Any] = to_jsonable_python(
        {
            "schema": SCHEMA,
            "dataset": dataset_to_dict(sweep.dataset),
            "swept": sweep.names,
            "ranked_by": ranking.measure,
            "combinations": [
                _combination(c, place) for c, place in zip(sweep.combinations, ranking.ranks, strict=True)
            ],
        }
    )
    return value


def _combination(c: Combination, place: int | None) -> dict[str, Any]:
    return {
        "settings": c.values,
        "problem": c.problem,
        "blocked": c.blocked,
        "refused": [] if c.plan is None else c.plan.predictions.refused,
        "rank": place,
        "unranked": c.unranked,
        "tokens_per_second": _rate(c.rate),
        "tokens_per_second_per_gpu": _rate(None if c.rate is None else c.rate.per_gpu()),
        "verdict": None if c.verdict is None else c.verdict.ruling,
        "verdict_reason": None if c.verdict is None else c.verdict.reason,
        **{name: getattr(c, name) for name in ("times", "worth", "memory")},
        **{name: getattr(c.plan, name, None) for name in _PLAN_PARTS},
        "assumptions": c.assumptions,
        "warnings": c.warnings,
    }


def _rate(rate: Rate | None) -> dict[str, float] | None:
    return None if rate is None else {"low": rate.low, "middle": rate.middle, "high": rate.high}
