"""A plan held against a dataset (`check`), a run's statistics or another plan (`compare`), as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.check import Check
from thdprof.analyze.report.shared import dataset_to_dict, name_dataset, plain_table, print_parts
from thdprof.compare.plans import PlanComparison
from thdprof.compare.statistics import Comparison
from thdprof.words import percentile_name, separate_shares

CHECK_SCHEMA = "thdprof.check/1"
COMPARISON_SCHEMA = "thdprof.comparison/1"
PLAN_COMPARISON_SCHEMA = "thdprof.plan-comparison/1"
_NAMES = ("p50", "p90", "p95", "p99", "p99_9", "max")
"""Percentiles of a check's table."""
_LEVELS = {
    "microbatch": "of micro-batches that run eagerly",
    "rank_step": "of (rank, step) pairs with one",
    "step": "of steps with one on any rank",
}
"""The label of each level's row in the table of shares."""
_VERDICTS = {
    "microbatch": "of micro-batches run eagerly",
    "rank_step": "of (rank, step) pairs have an eager micro-batch",
    "step": "of steps have an eager micro-batch",
}
"""The words that follow each level's rate in the verdict."""


def print_check(check: Check, console: Console) -> None:
    """Write the report of `check` to `console`."""
    print_parts(_check_parts(check), console)


def _check_parts(check: Check) -> Iterator[str | Table | Text]:
    changed = "as planned" if check.same_data else "other data than planned"
    origin = "replayed exactly" if check.table.exact else "not replayed exactly"
    if check.table.size_guessed:
        origin = "replayed with a pack size that is a guess"
    for reason in check.plan.predictions.refused:
        yield Text(f"refused  {reason}", style="bold red")
    yield Text(f"{name_dataset(check.dataset)}: {changed}, {origin}")
    yield ""
    yield _sizes(check)
    yield ""
    yield _shares(check)
    if check.reasons:
        yield Text("eager, by reason: " + ", ".join(f"{reason} {n:,}" for reason, n in check.reasons.items()))
    if (worst := check.worst) is not None:
        ranks = f" on {worst.cp_size} ranks" if worst.cp_size > 1 else ""
        yield Text(
            f"furthest over: {worst.n_seqs:,} documents, the longest {worst.max_seqlen:,} tokens, of "
            f"{worst.n_tokens:,} in all{ranks} (step {worst.step}, rank {worst.dp_rank}, micro-batch "
            f"{worst.microbatch}, from 0): {worst.reason}"
        )
    for note in check.notes:
        yield Text(f"warning: {note}", style="yellow")
    yield Text(verdict(check), style="bold")


def verdict(check: Check) -> str:
    """Whether the plan still fits, in one sentence."""
    if check.contradicted:
        return f"The plan is not what its own data and settings give: {', '.join(check.contradicted)} differ."
    if not check.buckets:
        return "Nothing to outgrow: the plan captures no graphs."
    fits = "fits" if check.holds else "does not fit"
    rate, planned, allowed = separate_shares(check.rate, check.planned_rate, check.max_fallback_rate)
    return f"The dataset {fits} the plan: {rate} {_VERDICTS[check.level]}, {planned} planned, {allowed} allowed."


def _sizes(check: Check) -> Table:
    before, now, microbatches = check.plan.dataset, check.dataset, check.plan.microbatches
    table = plain_table([""], ["planned", "now", ""])
    pairs = {
        "fingerprint": (before.fingerprint[:19], now.fingerprint[:19]),
        "files": (before.num_files, now.num_files),
        **{name: (getattr(before, name), getattr(now, name)) for name in ("rows", "documents", "tokens")},
        "micro-batches": (microbatches.count, len(check.table)),
        "steps": (microbatches.steps, check.table.num_steps),
    }
    for title, planned, present in (
        ("documents of a micro-batch", microbatches.n_seqs, check.profile.n_seqs.percentiles()),
        ("longest document", microbatches.max_seqlen, check.profile.max_seqlen.percentiles()),
    ):
        for name in _NAMES:
            pairs[f"{title}, {percentile_name(name)}"] = getattr(planned, name), getattr(present, name)
    pairs["tokens of the largest micro-batch"] = microbatches.n_tokens_max, int(check.table.n_tokens.max())
    for label, values in pairs.items():
        texts = [value if isinstance(value, str) else f"{value:,}" for value in values]
        table.add_row(label, *texts, "" if values[0] == values[1] else "changed")
    return table


def _shares(check: Check) -> Table:
    before, now = check.plan.predictions.fallback_rate, check.fallback_rate
    rows = [(label, getattr(before, name), getattr(now, name)) for name, label in _LEVELS.items()]
    rows += [(f"in {_name_bucket(b)}", b.planned_share, b.share) for b in check.buckets]
    table = plain_table(["share ..."], ["planned", "now", ""])
    for label, planned, present in rows:
        change = "" if planned == present else f"{present - planned:+.3%}"
        table.add_row(label, f"{planned:.3%}", f"{present:.3%}", change)
    return table


def _name_bucket(bucket: Any) -> str:
    size = f", context-parallel size {bucket.cp_size}" if bucket.cp_size > 1 else ""
    return f"{bucket.max_seqs:,} documents of {bucket.max_seqlen:,} tokens{size}"


def check_to_dict(check: Check) -> dict[str, Any]:
    """The JSON object, schema `thdprof.check/1`, as a dict."""
    plan, before, profile = check.plan, check.plan.microbatches, check.profile
    value: dict[str, Any] = to_jsonable_python(
        {
            "schema": CHECK_SCHEMA,
            "holds": check.holds,
            "refused": plan.predictions.refused,
            "level": check.level,
            "max_fallback_rate": check.max_fallback_rate,
            "fallback_rate": {
                name: _pair(getattr(plan.predictions.fallback_rate, name), getattr(check.fallback_rate, name))
                for name in _LEVELS
            },
            "fallback_rate_unpadded": check.fallback_rate_unpadded,
            "dataset_changed": not check.same_data,
            "dataset": _pair(dataset_to_dict(plan.dataset), dataset_to_dict(check.dataset)),
            "exact": check.table.exact,
            "microbatches": _pair(before.count, len(check.table)),
            "steps": _pair(before.steps, check.table.num_steps),
            "n_seqs": _pair(before.n_seqs, profile.n_seqs.percentiles()),
            "max_seqlen": _pair(before.max_seqlen, profile.max_seqlen.percentiles()),
            "n_tokens_max": _pair(before.n_tokens_max, int(check.table.n_tokens.max())),
            "reasons": check.reasons,
            "buckets": check.buckets,
            "worst": check.worst,
            "warnings": check.notes,
        }
    )
    return value


def _pair(planned: object, now: object) -> dict[str, object]:
    return {"planned": planned, "now": now}


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """The JSON object, schema `thdprof.comparison/1`, as a dict."""
    largest = {"largest_difference": comparison.largest_difference}
    return {"schema": COMPARISON_SCHEMA, "holds": comparison.holds, **largest, **asdict(comparison)}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Write the comparison to `console`: a table of shares, the reasons of eager micro-batches, and times."""
    seen, planned = comparison.microbatches - comparison.evaluated, comparison.plan_microbatches
    evaluated = f"; {comparison.evaluated:,} of evaluation, eager" if comparison.evaluated else ""
    lines: list[str | Table | Text] = [f"WRONG NUMBERS: {comparison.wrong_numbers}"] if comparison.wrong_numbers else []
    lines.append(f"{seen:,} micro-batches observed, {planned:,} in the plan{evaluated}")
    if comparison.of_this_plan is False:
        lines.append("the run followed another plan: other data, settings or buckets")
    if not comparison.all_ranks:
        lines.append("counters of rank 0 alone: the run ended with an error")
    if comparison.basis == "decided":
        lines.append("nothing was replayed; what the shapes decide is compared")
    table = plain_table(["share of micro-batches"], ["predicted", "observed", "difference"])
    rows = [("eager by shape", comparison.predicted_fallback_rate, comparison.observed_fallback_rate)]
    rows += [(_name_bucket(b), b.predicted_share, b.observed_share) for b in comparison.buckets]
    for label, predicted, observed in rows:
        table.add_row(label, f"{predicted:.3%}", f"{observed:.3%}", f"{observed - predicted:+.3%}")
    lines += ["", table]
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
    print_parts(lines, console)


def plan_comparison_to_dict(comparison: PlanComparison) -> dict[str, Any]:
    """The JSON object, schema `thdprof.plan-comparison/1`, as a dict."""
    largest = {"largest_change": comparison.largest_change}
    return {"schema": PLAN_COMPARISON_SCHEMA, "holds": comparison.holds, **largest, **asdict(comparison)}


def print_plan_comparison(comparison: PlanComparison, console: Console) -> None:
    """Write the comparison to `console`; changes past the tolerance are marked."""
    if not comparison.differences:
        console.print("the plans are the same", highlight=False)
        return
    table = plain_table(["what changed"], ["first", "second", "change"])
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
    fields = "1 field differs" if count == 1 else f"{count} fields differ"
    print_parts([f"{same}; {fields}", "", table], console)


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
