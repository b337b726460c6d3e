"""A plan as it shows itself in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.notebook_html import table
from thdprof.words import counted

if TYPE_CHECKING:
    from thdprof.plan import Plan


def plan_html(plan: Plan) -> str:
    """The plan's buckets and predictions as two small tables."""
    data, found = plan.dataset, plan.predictions
    source = data.uris[0] if len(data.uris) == 1 else f"{len(data.uris)} files"
    shares = [f"{b.share:.2%}" for b in plan.graphs.buckets]
    buckets = [
        (b.max_seqs, b.max_seqlen, b.cp_size, share) for b, share in zip(plan.graphs.buckets, shares, strict=True)
    ]
    facts: list[tuple[str, str]] = [
        ("data", f"{source} ({data.format}), {counted(data.rows, 'row')}, {counted(data.documents, 'document')}"),
        ("micro-batches", f"{plan.microbatches.count:,} in {counted(plan.microbatches.steps, 'step')}, {_how(plan)}"),
        ("step time, eager = 1", f"{found.relative_step_time:.3f}"),
        ("steps with an eager micro-batch", f"{found.fallback_rate.step:.2%}"),
        ("slots on the busiest pipeline rank", str(max(sum(rank) for rank in plan.graphs.slots))),
        ("times are of", f"{plan.costs.name} on {plan.costs.hardware}"),
    ]
    if found.graph_memory_bytes is not None:
        facts.insert(5, ("graph memory", f"{found.graph_memory_bytes / 2**30:.2f} GiB"))
    graphs = table(
        f"Plan: graphs to capture ({plan.graphs.impl})",
        ["documents", "longest document, tokens", "context-parallel size", "share of micro-batches"],
        buckets or [("none: run eagerly", "", "", "")],
    )
    return graphs + table("What it rests on, and predicts", [], facts)


def _how(plan: Plan) -> str:
    return "replayed exactly" if plan.microbatches.exact else "not replayed exactly"
