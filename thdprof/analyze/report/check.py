"""Reports a check of a plan: as text for a terminal, and as one JSON object of schema `thdprof.check/1`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.check import Check, Overshoot
from thdprof.analyze.report.words import apart
from thdprof.files import json_text

SCHEMA = "thdprof.check/1"
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
_PERCENTILES = {"p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99", "p99_9": "P99.9", "max": "max"}


def print_check(check: Check, console: Console) -> None:
    """Write the report of `check` to `console`."""
    for part in _parts(check):
        console.print(part, highlight=False, soft_wrap=not isinstance(part, Table))


def _parts(check: Check) -> Iterator[str | Table | Text]:
    data = check.dataset
    source = data.uris[0] if len(data.uris) == 1 else f"{data.uris[0]} and {len(data.uris) - 1} more"
    changed = "as planned" if check.same_data else "other data than planned"
    yield Text(f"{source} ({data.format}): {changed}, {_origin(check)}")
    yield ""
    yield _sizes(check)
    yield ""
    yield _shares(check)
    if check.reasons:
        yield Text("eager, by reason: " + ", ".join(f"{reason} {n:,}" for reason, n in check.reasons.items()))
    if check.worst is not None:
        yield Text(f"furthest over: {_overshoot(check.worst)}")
    for note in check.notes:
        yield Text(f"warning: {note}", style="yellow")
    yield Text(verdict(check), style="bold")


def _origin(check: Check) -> str:
    if check.size_guessed:
        return "replayed with a pack size that is a guess"
    return "replayed exactly" if check.exact else "not replayed exactly"


def _overshoot(worst: Overshoot) -> str:
    ranks = f" on {worst.cp_size} ranks" if worst.cp_size > 1 else ""
    return (
        f"{worst.n_seqs:,} documents, the longest {worst.max_seqlen:,} tokens, of {worst.n_tokens:,} in all{ranks} "
        f"(step {worst.step}, rank {worst.dp_rank}, micro-batch {worst.microbatch}, from 0): {worst.reason}"
    )


def verdict(check: Check) -> str:
    """Whether the plan still fits, in one sentence."""
    if not check.buckets:
        return "Nothing to outgrow: the plan captures no graphs."
    fits = "fits" if check.holds else "does not fit"
    rate, planned, allowed = apart(check.rate, check.planned_rate, check.max_fallback_rate)
    return f"The dataset {fits} the plan: {rate} {_VERDICTS[check.level]}, {planned} planned, {allowed} allowed."


def _sizes(check: Check) -> Table:
    before, now, microbatches = check.plan.dataset, check.dataset, check.plan.microbatches
    table = _table("")
    pairs = {
        "fingerprint": (_short(before.fingerprint), _short(now.fingerprint)),
        "files": (len(before.uris), len(now.uris)),
        "rows": (before.rows, now.rows),
        "documents": (before.documents, now.documents),
        "tokens": (before.tokens, now.tokens),
        "micro-batches": (microbatches.count, check.microbatches),
        "steps": (microbatches.steps, check.steps),
    }
    for title, planned, present in (
        ("documents of a micro-batch", microbatches.n_seqs, check.n_seqs),
        ("longest document", microbatches.max_seqlen, check.max_seqlen),
    ):
        for name, label in _PERCENTILES.items():
            pairs[f"{title}, {label}"] = getattr(planned, name), getattr(present, name)
    pairs["tokens of the largest micro-batch"] = microbatches.n_tokens_max, check.n_tokens_max
    for label, values in pairs.items():
        texts = [value if isinstance(value, str) else f"{value:,}" for value in values]
        table.add_row(label, *texts, "" if values[0] == values[1] else "changed")
    return table


def _shares(check: Check) -> Table:
    table = _table("share ...")
    for name, label in _LEVELS.items():
        planned = getattr(check.plan.predictions.fallback_rate, name)
        _add_share(table, label, planned, getattr(check.fallback_rate, name))
    for b in check.buckets:
        label = f"in {b.max_seqs:,} documents of {b.max_seqlen:,} tokens"
        label += f", context-parallel size {b.cp_size}" if b.cp_size > 1 else ""
        _add_share(table, label, b.planned_share, b.share)
    return table


def _add_share(table: Table, label: str, planned: float, present: float) -> None:
    table.add_row(label, f"{planned:.3%}", f"{present:.3%}", "" if planned == present else f"{present - planned:+.3%}")


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in ("planned", "now", ""):
        table.add_column(name, justify="right")
    return table


def _short(fingerprint: str) -> str:
    return fingerprint[:19]


def to_dict(check: Check) -> dict[str, Any]:
    """The JSON object as a dict."""
    plan = check.plan
    return {
        "schema": SCHEMA,
        "holds": check.holds,
        "level": check.level,
        "max_fallback_rate": check.max_fallback_rate,
        "fallback_rate": {
            name: {"planned": getattr(plan.predictions.fallback_rate, name), "now": getattr(check.fallback_rate, name)}
            for name in _LEVELS
        },
        "fallback_rate_unpadded": None
        if check.fallback_rate_unpadded is None
        else check.fallback_rate_unpadded.model_dump(),
        "dataset_changed": not check.same_data,
        "dataset": {
            "planned": plan.dataset.model_dump(mode="json"),
            "now": {**asdict(check.dataset), "uris": list(check.dataset.uris)},
        },
        "exact": check.exact,
        "microbatches": {"planned": plan.microbatches.count, "now": check.microbatches},
        "steps": {"planned": plan.microbatches.steps, "now": check.steps},
        "n_seqs": {"planned": plan.microbatches.n_seqs.model_dump(), "now": check.n_seqs.model_dump()},
        "max_seqlen": {"planned": plan.microbatches.max_seqlen.model_dump(), "now": check.max_seqlen.model_dump()},
        "n_tokens_max": {"planned": plan.microbatches.n_tokens_max, "now": check.n_tokens_max},
        "reasons": check.reasons,
        "buckets": [asdict(b) for b in check.buckets],
        "worst": None if check.worst is None else asdict(check.worst),
        "warnings": list(check.notes),
    }


def to_json(check: Check) -> str:
    """The check as JSON text, indented."""
    return json_text(to_dict(check))
