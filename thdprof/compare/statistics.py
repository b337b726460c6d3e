"""Did training do what the plan predicted? A plan beside the statistics of a run, and what the two reporters show."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thdprof.dispatch import BY_SHAPE, SHAPE_NOT_ASKED, FallbackReason
from thdprof.errors import DataError
from thdprof.files import json_text
from thdprof.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = "thdprof.comparison/1"
_ROUNDING = 1e-12

Count = Annotated[int, Field(ge=0, strict=True)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of a statistics line; what a caller adds to it (step, loss) is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Replays(_Part):
    max_seqs: Count
    max_seqlen: Count
    cp_size: Count = 1
    count: Count


class _Decisions(_Part):
    replays: list[_Replays]
    fallbacks: dict[FallbackReason, Count]

    def asked(self) -> int:
        """Micro-batches whose shape was looked at."""
        fallbacks = sum(n for reason, n in self.fallbacks.items() if reason not in SHAPE_NOT_ASKED)
        return fallbacks + sum(r.count for r in self.replays)


class Observed(_Decisions):
    """A line of a statistics file, schema `thdprof.stats/1`."""

    schema_: Literal["thdprof.stats/1"] = Field(alias="schema")
    microbatches: Count
    decided: _Decisions | None = None
    """What shapes alone decide, where the run counted it."""
    replay_ms: Milliseconds | None = None
    eager_ms: Milliseconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShares:
    """One bucket's share of micro-batches."""

    max_seqs: int
    max_seqlen: int
    cp_size: int
    predicted_share: float
    """0 where the plan has no such bucket."""
    observed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's prediction beside what happened."""

    basis: Literal["replayed", "decided"]
    """Whether micro-batches replayed, or only their shapes were decided on, as on a machine without CUDA."""
    microbatches: int
    """Micro-batches that the run counted."""
    dispatched: int
    """Those whose shape was looked at; the observed shares are of them."""
    plan_microbatches: int
    predicted_fallback_rate: float
    """Share of micro-batches whose shape fits no bucket."""
    observed_fallback_rate: float
    fallbacks: dict[FallbackReason, int]
    """Fallbacks that the data alone gives, by reason."""
    other_fallbacks: dict[FallbackReason, int]
    """Fallbacks that no plan predicts, by reason."""
    buckets: tuple[BucketShares, ...]
    replay_ms: float | None
    """Mean of a replayed micro-batch's forward and backward."""
    eager_ms: float | None
    """Mean of an eager micro-batch's forward and backward."""
    plan_step_ms: float
    """Of the cost table's model: a step of all micro-batches of a rank."""
    plan_eager_step_ms: float
    """The same, all eagerly."""
    plan_costs: str
    """What the cost table measured."""
    tolerance: float

    @property
    def largest_difference(self) -> float:
        """Largest absolute difference of a share from its prediction."""
        shares = [abs(b.observed_share - b.predicted_share) for b in self.buckets]
        return max([abs(self.observed_fallback_rate - self.predicted_fallback_rate), *shares])

    @property
    def holds(self) -> bool:
        """Whether every share is within the tolerance."""
        return self.largest_difference <= self.tolerance + _ROUNDING


def read_stats(path: Path) -> Observed:
    """The last line of a statistics file: the counters at the run's end.

    Raises:
        DataError: it cannot be read, is empty, or its last line is not statistics.
    """
    last, number = "", 0
    try:
        with path.open(encoding="utf-8") as file:
            for at, line in enumerate(file, start=1):
                if not line.isspace():
                    last, number = line, at
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text: {error}") from error
    if not number:
        raise DataError(f"{path}: is empty: the run wrote no statistics (Stats.append_jsonl)")
    return _parse(last, where=f"{path}: line {number}")


def _parse(line: str, *, where: str) -> Observed:
    try:
        loaded = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; if the run was killed there, delete the line") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{where}: not statistics: holds a {type(loaded).__name__}, not an object")
    try:
        found = Observed.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise DataError(f"{where}: {field}: {first['msg']}{value}") from error
    counted = sum(found.fallbacks.values()) + sum(r.count for r in found.replays)
    if counted != found.microbatches:
        raise DataError(f"{where}: microbatches: {found.microbatches}, but replays and fallbacks add up to {counted}")
    return found


def compare(plan: Plan, observed: Observed, *, tolerance: float, where: str = "statistics") -> Comparison:
    """The plan's prediction beside what a run observed.

    Args:
        plan: what `thdprof analyze` wrote.
        observed: counters of the run.
        tolerance: largest absolute difference of a share that is let pass.
        where: names the statistics in errors.

    Raises:
        DataError: no micro-batch's shape was looked at, so that there is nothing to compare.
    """
    captures = bool(plan.graphs.buckets)
    decisions: _Decisions = observed
    if captures and not observed.asked() and observed.decided is not None:
        decisions = observed.decided
    # a plan without buckets predicts that all run eagerly, for whatever reason
    by_shape = BY_SHAPE if captures else frozenset(FallbackReason)
    dispatched = decisions.asked() if captures else observed.microbatches
    if not dispatched:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(observed.fallbacks.items())) or "none ran"
        raise DataError(f"{where}: no micro-batch was dispatched by its shape ({reasons}): nothing to compare")
    fallbacks = {reason: n for reason, n in sorted(decisions.fallbacks.items()) if reason in by_shape and n}
    return Comparison(
        basis="replayed" if decisions is observed else "decided",
        microbatches=observed.microbatches,
        dispatched=dispatched,
        plan_microbatches=plan.microbatches.count,
        predicted_fallback_rate=plan.predictions.fallback_rate.microbatch,
        observed_fallback_rate=sum(fallbacks.values()) / dispatched,
        fallbacks=fallbacks,
        other_fallbacks={r: n for r, n in sorted(observed.fallbacks.items()) if r not in by_shape and n},
        buckets=_shares(plan, decisions, dispatched),
        replay_ms=observed.replay_ms,
        eager_ms=observed.eager_ms,
        plan_step_ms=plan.predictions.step_ms,
        plan_eager_step_ms=plan.predictions.eager_step_ms,
        plan_costs=f"{plan.costs.name} on {plan.costs.hardware}",
        tolerance=tolerance,
    )


def _shares(plan: Plan, decisions: _Decisions, dispatched: int) -> tuple[BucketShares, ...]:
    """Shares of the plan's buckets and of any others that the run replayed, ascending."""
    predicted = {(b.max_seqs, b.max_seqlen, b.cp_size): b.share for b in plan.graphs.buckets}
    counts = {(r.max_seqs, r.max_seqlen, r.cp_size): r.count for r in decisions.replays}
    return tuple(
        BucketShares(
            max_seqs=key[0],
            max_seqlen=key[1],
            cp_size=key[2],
            predicted_share=predicted.get(key, 0.0),
            observed_share=counts.get(key, 0) / dispatched,
        )
        for key in sorted({*predicted, *counts})
    )


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON text, indented, schema `thdprof.comparison/1`."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "holds": comparison.holds,
        "largest_difference": comparison.largest_difference,
        **asdict(comparison),
    }
    return json_text(values)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Write the comparison to `console`."""

    seen, planned = comparison.microbatches, comparison.plan_microbatches
    lines: list[str | Table] = [f"{seen:,} micro-batches observed, {planned:,} in the plan"]
    if comparison.basis == "decided":
        lines.append("nothing was replayed; what the shapes decide is compared")
    lines += ["", _share_table(comparison)]
    for title, reasons in (("by shape", comparison.fallbacks), ("not predicted", comparison.other_fallbacks)):
        if reasons:
            lines.append(f"eager, {title}: " + ", ".join(f"{reason} {n:,}" for reason, n in reasons.items()))
    lines.append(f"plan: a step {comparison.plan_step_ms:.2f} ms, all eagerly {comparison.plan_eager_step_ms:.2f} ms")
    lines.append(f"  ({comparison.plan_costs})")
    for title, ms in (("a replayed", comparison.replay_ms), ("an eager", comparison.eager_ms)):
        if ms is not None:
            lines.append(f"run: {title} micro-batch {ms:.2f} ms")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))


def _share_table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("share of micro-batches")
    for name in ("predicted", "observed", "difference"):
        table.add_column(name, justify="right")
    rows = [("eager by shape", comparison.predicted_fallback_rate, comparison.observed_fallback_rate)]
    for b in comparison.buckets:
        label = f"{b.max_seqs:,} documents of {b.max_seqlen:,} tokens"
        label += f", context-parallel size {b.cp_size}" if b.cp_size > 1 else ""
        rows.append((label, b.predicted_share, b.observed_share))
    for label, predicted, found in rows:
        table.add_row(label, f"{predicted:.3%}", f"{found:.3%}", f"{found - predicted:+.3%}")
    return table
