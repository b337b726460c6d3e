"""The numbers of every finding by name, for programs: documents, tokens, shares from 0 to 1, GiB and milliseconds.

A unit is in the name: `_documents`, `_tokens`, `_share`, `_gib`, `_ms`; `relative_step_time` is of all eager = 1.
"""

from __future__ import annotations

from typing import Any

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings.caps import CapCurve, Choice
from thdprof.analyze.report.findings.graphs import Memory
from thdprof.analyze.report.findings.run import Drift, Parts, Steps
from thdprof.analyze.report.findings.shapes import Distribution, Joint, Shapes

Values = dict[str, Any]


def shapes(found: Shapes) -> Values:
    """Mean and percentiles of both measures."""

    def told(spread: Distribution) -> Values:
        return {"mean": spread.mean, **spread.percentiles}

    return {"n_seqs_documents": told(found.n_seqs), "max_seqlen_tokens": told(found.max_seqlen)}


def joint(found: Joint) -> Values:
    """Longest documents where documents are many, and elsewhere; null where none has more than P90."""
    return {
        "n_seqs_p90_documents": found.border,
        "over_p90_share": found.over_border,
        "max_seqlen_p50_over_p90_tokens": found.long_many,
        "max_seqlen_p50_elsewhere_tokens": found.long_few,
    }


def caps(found: CapCurve, report: Report) -> Values:
    """What the cap would do, and the quickest of the curve."""
    rate = report.profile.fallback_rate(found.cap)
    quickest = int(found.relative_step_time.argmin())
    return {
        "cap_documents": found.cap,
        "replayed_share": 1 - rate.microbatch,
        "eager_microbatch_share": rate.microbatch,
        "eager_rank_step_share": rate.rank_step,
        "eager_step_share": rate.step,
        "relative_step_time": found.cap_step_time,
        "quickest_cap_documents": int(found.max_seqs[quickest]),
        "quickest_relative_step_time": float(found.relative_step_time[quickest]),
    }


def choice(found: Choice, report: Report) -> Values:
    """The plan's graphs, what it predicts, and the alternatives."""
    graphs, predicted = report.plan.graphs, report.plan.predictions
    return {
        "impl": graphs.impl,
        "graphs": [
            {
                "max_seqs_documents": b.max_seqs,
                "max_seqlen_tokens": b.max_seqlen,
                "cp_size": b.cp_size,
                "share": b.share,
            }
            for b in graphs.buckets
        ],
        "relative_step_time": predicted.relative_step_time,
        "eager_step_share": predicted.fallback_rate.step,
        "one_cap_documents": None if graphs.one_cap is None else graphs.one_cap.max_seqs,
        "alternatives": [
            {"name": a.name, "relative_step_time": a.relative_step_time, "eager_step_share": a.stalled}
            for a in found.alternatives
        ],
    }


def steps(found: Steps, report: Report) -> Values:
    """Documents of micro-batches and of the fullest of a step, and shares over the cap."""
    micro, largest = report.profile.histogram(), report.profile.histogram("step_max")
    over = report.profile.fallback_rate(found.cap)
    return {
        "cap_documents": found.cap,
        "microbatch_p50_documents": micro.percentile(50.0),
        "step_max_p50_documents": largest.percentile(50.0),
        "over_cap_microbatch_share": over.microbatch,
        "over_cap_rank_step_share": over.rank_step,
        "over_cap_step_share": over.step,
    }


def drift(found: Drift) -> Values:
    """Percentiles of every segment of the run, and the steps over the cap."""
    return {
        "cap_documents": found.cap,
        "runs": found.num_runs,
        "steps": found.steps,
        "n_seqs_documents": {name: values.tolist() for name, values in found.percentiles.items()},
        "step_max_p50_documents": found.step_median.tolist(),
        "over_cap_step_share": found.stalled.tolist(),
    }


def parts(found: Parts | None) -> Values:
    """Percentiles and steps over the cap of every part that is shown; nothing where there is one only."""
    if found is None:
        return {}
    return {
        "cap_documents": found.cap,
        "parts": [
            {
                "name": name,
                "n_seqs_documents": {p: values[i] for p, values in found.percentiles.items()},
                "over_cap_step_share": found.stalled[i],
            }
            for i, name in enumerate(found.names)
        ],
        "left_out_parts": found.left_out,
    }


def memory(found: Memory) -> Values:
    """Slots, and memory of the busiest rank, after offloading; null where it is not known."""
    captured, sizes = found.num_buckets, found.gib_by_buckets
    return {
        "captured_graphs": captured,
        "slots_by_rank": [list(rank) for rank in found.slots] if captured else [],
        "graph_memory_gib": (sizes[captured - 1] if captured else 0.0) if sizes else None,
        "graph_memory_by_graphs_gib": list(sizes),
        "pinned_host_memory_gib": found.host_gib,
    }


def observed(report: Report) -> Values:
    """Predicted and seen shares; nothing without statistics."""
    found = report.comparison
    if found is None:
        return {}
    return {
        "dispatched_microbatches": found.dispatched,
        "predicted_fallback_share": found.predicted_fallback_rate,
        "observed_fallback_share": found.observed_fallback_rate,
        "largest_difference_share": found.largest_difference,
        "holds": found.holds,
        "graphs": [
            {
                "max_seqs_documents": b.max_seqs,
                "max_seqlen_tokens": b.max_seqlen,
                "cp_size": b.cp_size,
                "predicted_share": b.predicted_share,
                "observed_share": b.observed_share,
            }
            for b in found.buckets
        ],
        "other_fallbacks_microbatches": {str(reason): n for reason, n in found.other_fallbacks.items()},
        "replay_ms": found.replay_ms,
        "eager_ms": found.eager_ms,
    }
