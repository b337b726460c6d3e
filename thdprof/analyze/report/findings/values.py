"""The numbers of every finding by name, for programs.

A name ends in its unit: `_documents`, `_tokens`, `_microbatches`, `_share` (from 0 to 1), `_gib` or `_ms`. A
`relative_step_time` is the lowest and the highest mean step time divided by that of running all micro-batches eagerly;
null where times are not of the user's own model.
"""

from __future__ import annotations

from typing import Any

from thdprof.analyze.predictions import Range
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings.caps import CapCurve, Choice
from thdprof.analyze.report.findings.graphs import Memory
from thdprof.analyze.report.findings.run import Drift, Parts, Steps
from thdprof.analyze.report.findings.shapes import Distribution, Joint, Shapes

Values = dict[str, Any]


def shapes(finding: Shapes) -> Values:
    """Mean and percentiles of both measures."""

    def numbers(spread: Distribution) -> Values:
        return {"mean": spread.mean, **spread.percentiles}

    return {"n_seqs_documents": numbers(finding.n_seqs), "max_seqlen_tokens": numbers(finding.max_seqlen)}


def joint(finding: Joint) -> Values:
    """Longest documents of micro-batches over the P90 of documents, null where none is over it, and of the others."""
    return {
        "n_seqs_p90_documents": finding.border,
        "over_p90_share": finding.over_border,
        "max_seqlen_p50_over_p90_tokens": finding.long_many,
        "max_seqlen_p50_elsewhere_tokens": finding.long_few,
    }


def caps(finding: CapCurve, report: Report) -> Values:
    """Fallbacks and step time under the cap, and the recommended cap; null where the plan recommends none."""
    recommended = report.recommended_cap
    times = None if recommended is None else report.relative_step_times([recommended])
    return {
        "cap_documents": finding.cap,
        "replayed_share": 1 - finding.cap_rate.microbatch,
        "eager_microbatch_share": finding.cap_rate.microbatch,
        "eager_rank_step_share": finding.cap_rate.rank_step,
        "eager_step_share": finding.cap_rate.step,
        "relative_step_time": _pair(finding.cap_step_time),
        "recommended_cap_documents": recommended,
        "recommended_relative_step_time": None if times is None else _pair(times[0]),
    }


def _pair(times: Range | None) -> list[float] | None:
    return None if times is None else list(times)


def choice(finding: Choice, report: Report) -> Values:
    """The plan's graphs, its predictions, and the alternatives."""
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
        "times_origin": report.times.origin,
        "relative_step_time": _pair(report.times.relative_step_time),
        "eager_step_share": predicted.fallback_rate.step,
        "one_cap_documents": None if graphs.one_cap is None else graphs.one_cap.max_seqs,
        "alternatives": [
            {"name": a.name, "relative_step_time": _pair(a.relative_step_time), "eager_step_share": a.rate.step}
            for a in finding.alternatives
        ],
    }


def steps(finding: Steps, report: Report) -> Values:
    """Median documents of a micro-batch and of the fullest micro-batch of a step, and shares over the cap."""
    micro, largest = report.profile.histogram(), report.profile.histogram("step_max")
    over = report.profile.fallback_rate(finding.cap)
    return {
        "cap_documents": finding.cap,
        "microbatch_p50_documents": micro.percentile(50.0),
        "step_max_p50_documents": largest.percentile(50.0),
        "over_cap_microbatch_share": over.microbatch,
        "over_cap_rank_step_share": over.rank_step,
        "over_cap_step_share": over.step,
    }


def drift(finding: Drift) -> Values:
    """Percentiles of documents in every segment of the run, and its share of steps over the cap."""
    return {
        "cap_documents": finding.cap,
        "runs": finding.num_runs,
        "steps": finding.steps,
        "n_seqs_documents": {name: values.tolist() for name, values in finding.percentiles.items()},
        "step_max_p50_documents": finding.step_median.tolist(),
        "over_cap_step_share": finding.stalled.tolist(),
    }


def parts(finding: Parts | None) -> Values:
    """Percentiles of documents and share of steps over the cap in every part that is shown; empty for a single part."""
    if finding is None:
        return {}
    return {
        "cap_documents": finding.cap,
        "parts": [
            {
                "name": name,
                "n_seqs_documents": {p: values[i] for p, values in finding.percentiles.items()},
                "over_cap_step_share": finding.stalled[i],
            }
            for i, name in enumerate(finding.names)
        ],
        "left_out_parts": finding.left_out,
    }


def memory(finding: Memory) -> Values:
    """Slots, and graph memory of the busiest rank after offloading; null where the memory is not known."""
    captured, sizes = finding.num_buckets, finding.gib_by_buckets
    return {
        "captured_graphs": captured,
        "slots_by_rank": [list(rank) for rank in finding.slots] if captured else [],
        "graph_memory_gib": (sizes[captured - 1] if captured else 0.0) if sizes else None,
        "graph_memory_by_graphs_gib": list(sizes),
        "pinned_host_memory_gib": finding.host_gib,
    }


def observed(report: Report) -> Values:
    """Predicted shares and those that the run observed; empty without statistics of a run."""
    comparison = report.comparison
    if comparison is None:
        return {}
    return {
        "dispatched_microbatches": comparison.dispatched,
        "predicted_fallback_share": comparison.predicted_fallback_rate,
        "observed_fallback_share": comparison.observed_fallback_rate,
        "largest_difference_share": comparison.largest_difference,
        "holds": comparison.holds,
        "graphs": [
            {
                "max_seqs_documents": b.max_seqs,
                "max_seqlen_tokens": b.max_seqlen,
                "cp_size": b.cp_size,
                "predicted_share": b.predicted_share,
                "observed_share": b.observed_share,
            }
            for b in comparison.buckets
        ],
        "verified_microbatches": comparison.verified,
        "mismatches": comparison.mismatches,
        "suspicions": comparison.suspicions,
        "other_fallbacks_microbatches": {str(reason): n for reason, n in comparison.other_fallbacks.items()},
        "replay_ms": comparison.replay_ms,
        "eager_ms": comparison.eager_ms,
    }
