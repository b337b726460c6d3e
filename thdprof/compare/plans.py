"""What differs between two plans, how much of it counts, and what the two reporters show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thdprof.errors import DataError
from thdprof.files import json_text
from thdprof.plan import Percentiles, Plan

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "thdprof.plan-comparison/1"
_ROUNDING = 1e-12
_LEVELS = ("microbatch", "rank_step", "step")
_RATES = frozenset(f"predictions.fallback_rate.{level}" for level in _LEVELS)
_RELATIVE = frozenset(
    (
        "predictions.step_ms",
        "predictions.relative_step_time",
        *(f"microbatches.{of}.{p}" for of in ("n_seqs", "max_seqlen") for p in Percentiles.model_fields if p != "mean"),
    )
)
_SNIFFED_BYTES = 2**16
_JSON_PLAN = re.compile(r'\s*\{\s*"schema"\s*:\s*"thdprof\.plan/')
_OBJECT = re.compile(r"^[ \t]*\{", re.MULTILINE)
_SCHEMA = re.compile(r"""^["']?schema["']?\s*:""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which two plans differ."""

    field: str
    """Its path in the plan file; of a bucket, its shape."""
    before: Any
    """In the first plan; None where it has none."""
    after: Any
    """In the second plan; None where it has none."""
    measure: Literal["absolute", "relative"] | None
    """How `change` is meant: the difference, or the difference divided by the larger of both; None for a field that
    is listed and does not count."""
    change: float | None
    """Size of the difference, at least 0, where it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Two plans side by side."""

    same_data: bool
    """Whether both were made from data of one fingerprint."""
    differences: tuple[Difference, ...]
    """In the order of the plan file."""
    tolerance: float
    """Largest change that is let pass."""

    @property
    def largest_change(self) -> float:
        """The largest change that counts."""
        return max((d.change for d in self.differences if d.change is not None), default=0.0)

    @property
    def past_tolerance(self) -> tuple[Difference, ...]:
        """The differences that are too large."""
        limit = self.tolerance + _ROUNDING
        return tuple(d for d in self.differences if d.change is not None and d.change > limit)

    @property
    def holds(self) -> bool:
        """Whether no difference is too large."""
        return not self.past_tolerance


def compare_plans(first: Plan, second: Plan, *, tolerance: float) -> PlanComparison:
    """Every field in which two plans differ.

    The predicted step times and the percentiles from P50 on count by their relative change, the fallback rates by their
    difference; everything else is listed and does not count. The plans' order makes no difference to either.
    """
    found = _fields("", _values(first), _values(second))
    return PlanComparison(
        same_data=first.dataset.fingerprint == second.dataset.fingerprint,
        differences=tuple(_difference(*field) for field in found),
        tolerance=tolerance,
    )


def _values(plan: Plan) -> dict[str, Any]:
    """The plan's fields as a dict, its buckets as shares by shape."""
    values = plan.model_dump(mode="json", by_alias=True)
    shares: dict[str, float] = {}
    for b in sorted(plan.graphs.buckets, key=lambda b: (b.cp_size, b.max_seqs, b.max_seqlen)):
        name = f"{b.max_seqs}x{b.max_seqlen}" + (f"/cp{b.cp_size}" if b.cp_size > 1 else "")
        shares[name] = shares.get(name, 0.0) + b.share
    values["graphs"]["buckets"] = shares
    return values


def _fields(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Paths below `path` whose values differ, with both."""
    if isinstance(before, dict) or isinstance(after, dict):
        before, after = before or {}, after or {}
        names = list(before) + [name for name in after if name not in before]
        for name in sorted(names, key=_shape) if path == "graphs.buckets" else names:
            yield from _fields(f"{path}.{name}".lstrip("."), before.get(name), after.get(name))
    elif before != after and not _alike(before, after):
        yield path, before, after


def _alike(before: Any, after: Any) -> bool:
    """Whether two numbers differ by rounding alone."""
    numbers = isinstance(before, float) and isinstance(after, float)
    return numbers and math.isclose(before, after, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _shape(name: str) -> list[int]:
    """Numbers of a bucket's name: its context-parallel size, documents, tokens."""
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return [*numbers[2:], 1][:1] + numbers[:2]


def _difference(field: str, before: Any, after: Any) -> Difference:
    measure: Literal["absolute", "relative"] | None = None
    change = None
    if field in _RATES:
        measure, change = "absolute", abs(after - before)
    elif field in _RELATIVE:
        measure, change = "relative", abs(after - before) / max(abs(before), abs(after))
    return Difference(field=field, before=before, after=after, measure=measure, change=change)


def kind_of(path: Path) -> Literal["plan", "statistics"]:
    """What a file holds, by its beginning: a plan, or what is to be read as statistics of a run.

    Raises:
        DataError: it cannot be read, or looks like neither.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if _JSON_PLAN.match(head):
        return "plan"
    if not head.strip() or _OBJECT.match(head.lstrip()):
        return "statistics"
    if _SCHEMA.search(head):
        return "plan"
    if _OBJECT.search(head):
        return "statistics"
    raise DataError(f"{path}: neither a plan (schema thdprof.plan/1) nor statistics of a run (thdprof.stats/1)")


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
    from rich.table import Table

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
    text = value if isinstance(value, str) else json_text(value, indent=None)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-19:]}"
