"""The differences between two plans, and which of them exceed a tolerance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thdprof.errors import DataError
from thdprof.plan import Percentiles, Plan

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
"""Number of bytes at the beginning of a file from which its kind is recognised."""
_JSON_PLAN = re.compile(r'\s*\{\s*"schema"\s*:\s*"thdprof\.plan/')
_OBJECT = re.compile(r"^[ \t]*\{", re.MULTILINE)
_SCHEMA = re.compile(r"""^["']?schema["']?\s*:""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which two plans differ."""

    field: str
    """The field's path in the plan file; for a bucket, its shape."""
    before: Any
    after: Any
    """The values in the first and in the second plan; None if it has none."""
    measure: Literal["absolute", "relative"] | None
    """The unit of `change`: the difference of both values, or that difference divided by the larger value. None: the
    field is listed, but is not compared with the tolerance.
    """
    change: float | None
    """Size of the difference, at least 0; None if `measure` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Two plans side by side."""

    same_data: bool
    """Whether both plans were made from data with the same fingerprint."""
    differences: tuple[Difference, ...]
    """The differences, in the order of the plan file."""
    tolerance: float
    """Largest change that passes."""

    @property
    def largest_change(self) -> float:
        """The largest change; 0 if no difference has one."""
        return max((d.change for d in self.differences if d.change is not None), default=0.0)

    @property
    def past_tolerance(self) -> tuple[Difference, ...]:
        """The differences whose change is larger than the tolerance."""
        limit = self.tolerance + _ROUNDING
        return tuple(d for d in self.differences if d.change is not None and d.change > limit)

    @property
    def holds(self) -> bool:
        """Whether no change is larger than the tolerance."""
        return not self.past_tolerance


def compare_plans(first: Plan, second: Plan, *, tolerance: float) -> PlanComparison:
    """All differences between two plans.

    For predicted step times, and for percentiles from P50 on, the change is relative; for fallback rates it is the
    difference of both rates. All other fields, and times that only one plan has, are listed without a change.
    Exchanging the plans gives the same changes.

    `tolerance` is the largest change that passes.
    """
    found = _fields("", _values(first), _values(second))
    return PlanComparison(
        same_data=first.dataset.fingerprint == second.dataset.fingerprint,
        differences=tuple(_difference(*field) for field in found),
        tolerance=tolerance,
    )


def _values(plan: Plan) -> dict[str, Any]:
    """The plan's fields as a dict, with its buckets as shares by shape."""
    values = plan.model_dump(mode="json", by_alias=True)
    shares: dict[str, float] = {}
    for b, share in sorted(plan.shares.items(), key=lambda item: (item[0].cp_size, item[0])):
        shares[f"{b.max_seqs}x{b.max_seqlen}" + (f"/cp{b.cp_size}" if b.cp_size > 1 else "")] = share
    values["graphs"]["buckets"] = shares
    return values


def _fields(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Paths below `path` at which the values differ, each with both values."""
    if isinstance(before, dict) or isinstance(after, dict):
        before, after = before or {}, after or {}
        names = list(before) + [name for name in after if name not in before]
        for name in sorted(names, key=_shape) if path == "graphs.buckets" else names:
            yield from _fields(f"{path}.{name}".lstrip("."), before.get(name), after.get(name))
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            yield path, before, after
    elif before != after:
        yield path, before, after


def _shape(name: str) -> list[int]:
    """The numbers in a bucket's name: its context-parallel size, documents and tokens."""
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return [*numbers[2:], 1][:1] + numbers[:2]


def _difference(field: str, before: Any, after: Any) -> Difference:
    measure: Literal["absolute", "relative"] | None = None
    change = None
    known = before is not None and after is not None  # unlike the times of a plan whose model was not known
    if known and field in _RATES:
        measure, change = "absolute", abs(after - before)
    elif known and field in _RELATIVE:
        measure, change = "relative", abs(after - before) / max(abs(before), abs(after))
    return Difference(field=field, before=before, after=after, measure=measure, change=change)


def kind_of(path: Path) -> Literal["plan", "statistics"]:
    """Whether a file looks like a plan or like statistics of a run, by its beginning.

    Raises:
        DataError: the file cannot be read, or looks like neither.
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
