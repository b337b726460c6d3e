"""The comparison of a plan with a run's statistics, for a terminal and as JSON, schema `thdprof.comparison/1`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from thdprof.compare.statistics import Comparison
from thdprof.files import json_text

SCHEMA = "thdprof.comparison/1"


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
    """Write the comparison to `console`: a table of shares, the reasons of eager micro-batches, and times."""
    seen, planned = comparison.microbatches - comparison.evaluated, comparison.plan_microbatches
    evaluated = f"; {comparison.evaluated:,} of evaluation, eager" if comparison.evaluated else ""
    lines: list[str | Table] = [f"WRONG NUMBERS: {comparison.wrong_numbers}"] if comparison.wrong_numbers else []
    lines.append(f"{seen:,} micro-batches observed, {planned:,} in the plan{evaluated}")
    if comparison.of_this_plan is False:
        lines.append("the run followed another plan: other data, settings or buckets")
    if not comparison.all_ranks:
        lines.append("counters of rank 0 alone: the run ended with an error")
    if comparison.basis == "decided":
        lines.append("nothing was replayed; what the shapes decide is compared")
    lines += ["", _share_table(comparison)]
    for title, reasons in (("by shape", comparison.fallbacks), ("not predicted", comparison.other_fallbacks)):
        if reasons:
            lines.append(f"eager, {title}: " + ", ".join(f"{reason} {n:,}" for reason, n in reasons.items()))
    if comparison.verified or comparison.mismatches or comparison.suspicions:
        unconfirmed = f", {comparison.suspicions:,} suspicions not confirmed" if comparison.suspicions else ""
        mismatches = f"{comparison.mismatches:,} mismatches{unconfirmed}"
        lines.append(f"verified: {comparison.verified:,} micro-batches, {mismatches}")
    if comparison.plan_step_ms is not None and comparison.plan_eager_step_ms is not None:
        lines.append(
            f"plan: a step {comparison.plan_step_ms:.2f} ms, all eagerly {comparison.plan_eager_step_ms:.2f} ms"
        )
    lines.append(f"  ({comparison.plan_costs})")
    for title, ms in (("a replayed", comparison.replay_ms), ("an eager", comparison.eager_ms)):
        if ms is not None:
            lines.append(f"run: {title} micro-batch {ms:.2f} ms")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))


def _share_table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("share of micro-batches")
    for name in ("predicted", "observed", "difference"):
        table.add_column(name, justify="right")
    rows = [("eager by shape", comparison.predicted_fallback_rate, comparison.observed_fallback_rate)]
    for b in comparison.buckets:
        label = f"{b.max_seqs:,} documents of {b.max_seqlen:,} tokens"
        label += f", context-parallel size {b.cp_size}" if b.cp_size > 1 else ""
        rows.append((label, b.predicted_share, b.observed_share))
    for label, predicted, observed in rows:
        table.add_row(label, f"{predicted:.3%}", f"{observed:.3%}", f"{observed - predicted:+.3%}")
    return table
