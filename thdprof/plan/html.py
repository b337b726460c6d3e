"""A plan in a notebook: its buckets, and what it rests on and predicts."""

from __future__ import annotations

from thdprof.plan.parts import DatasetPart, GraphsPart, MicrobatchesPart, PredictionsPart
from thdprof.words import counted, html_table


def html_of(
    data: DatasetPart,
    microbatches: MicrobatchesPart,
    graphs: GraphsPart,
    predictions: PredictionsPart,
    *,
    times_of: str | None,
) -> str:
    """A plan's buckets and predictions as two small tables.

    Args:
        data: the plan's part dataset.
        microbatches: the plan's part microbatches.
        graphs: the plan's part graphs.
        predictions: the plan's part predictions.
        times_of: the model and the GPU that times are of; None: they are of another model.
    """
    source = data.uris[0] if len(data.uris) == 1 else f"{len(data.uris)} files"
    shares = [f"{b.share:.2%}" for b in graphs.buckets]
    buckets = [(b.max_seqs, b.max_seqlen, b.cp_size, share) for b, share in zip(graphs.buckets, shares, strict=True)]
    facts: list[tuple[str, str]] = [
        ("data", f"{source} ({data.format}), {counted(data.rows, 'row')}, {counted(data.documents, 'document')}"),
        ("micro-batches", f"{microbatches.count:,} in {counted(microbatches.steps, 'step')}, {_how(microbatches)}"),
        ("step time, eager = 1", _relative(predictions)),
        ("steps with an eager micro-batch", f"{predictions.fallback_rate.step:.2%}"),
        ("slots on the busiest pipeline rank", str(max(sum(rank) for rank in graphs.slots))),
    ]
    if predictions.relative_step_time is not None and times_of is not None:
        if predictions.graph_memory_bytes is not None:
            facts.append(("graph memory", f"{predictions.graph_memory_bytes / 2**30:.2f} GiB"))
        facts.append(("times are of", times_of))
    captured = html_table(
        f"Plan: graphs to capture ({graphs.impl})",
        ["documents", "longest document, tokens", "context-parallel size", "share of micro-batches"],
        buckets or [("none: run eagerly", "", "", "")],
    )
    return captured + html_table("What it rests on, and predicts", [], facts)


def _relative(predictions: PredictionsPart) -> str:
    """The relative step time as a range, or that it is not known."""
    times = predictions.times
    if predictions.relative_step_time is None:
        return "not known" if times is None else f"not known: {times.basis}"
    if times is None or times.relative_step_time is None or times.origin != "modelled":
        return f"{predictions.relative_step_time:.3f}"
    low, high = times.relative_step_time
    return f"{low:.2f} to {high:.2f}, modelled"


def _how(microbatches: MicrobatchesPart) -> str:
    return "replayed exactly" if microbatches.exact else "not replayed exactly"
