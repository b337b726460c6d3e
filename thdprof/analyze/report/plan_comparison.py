"""The comparison of two plans, for a terminal and as JSON, schema `thdprof.plan-comparison/1`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from thdprof.compare.plans import PlanComparison
from thdprof.files import json_text

SCHEMA = "thdprof.plan-comparison/1"


def to_json(comparison: PlanComparison) -> str:
    """The comparison as JSON text, indented, schema `thdprof.plan-comparison/1`."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "holds": comparison.holds,
        "largest_change": comparison.largest_change,
        **asdict(comparison),
    }
    return json_text(values)


def print_plan_comparison(comparison: PlanComparison, console: Console) -> None:
    """Write the comparison to `console`; changes past the tolerance are marked."""
    if not comparison.differences:
        console.print("the plans are the same", highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("what changed")
    for name in ("first", "second", "change"):
        table.add_column(name, justify="right")
    table.add_column("")
    past = comparison.past_tolerance
    for d in comparison.differences:
        share = d.measure == "absolute" or d.field.startswith("graphs.buckets.")
        table.add_row(
            d.field.removeprefix("graphs.") if d.field.startswith("graphs.buckets.") else d.field,
            _text(d.before, share=share),
            _text(d.after, share=share),
            "" if d.change is None else f"{d.change:.3%}",
            "past the tolerance" if d in past else "",
        )
    same = "the same data" if comparison.same_data else "other data"
    count = len(comparison.differences)
    console.print(f"{same}; {'1 field differs' if count == 1 else f'{count} fields differ'}", highlight=False)
    console.print()
    console.print(table, highlight=False, markup=False)


def _text(value: Any, *, share: bool) -> str:
    if value is None:
        return "-"
    if share:
        return f"{value:.3%}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-19:]}"
