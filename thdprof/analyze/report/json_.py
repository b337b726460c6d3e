"""An analysis as one JSON object, schema `thdprof.analysis/1`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thdprof.analyze.analysis import Analysis, CpSize
from thdprof.analyze.buckets.recommend import Candidate
from thdprof.analyze.report.model import model_dict
from thdprof.files import json_text
from thdprof.megatron_limits import DROPLESS_EXPERTS_RUN_EAGERLY, UP_TO_ROUTER

SCHEMA = "thdprof.analysis/1"


def _candidate(candidate: Candidate, *, timed: bool) -> dict[str, Any]:
    """One cap; its times are null unless `timed`, because they are of another model then."""
    return {
        "max_seqs": candidate.max_seqs,
        "coverage": candidate.coverage,
        "fallback_rate": candidate.fallback_rate.model_dump(),
        "relative_step_time": candidate.relative_step_time if timed else None,
        "padding_ms": candidate.padding_ms if timed else None,
    }


def _cp_size(size: CpSize) -> dict[str, Any]:
    return {**asdict(size), "n_seqs": size.n_seqs.model_dump(), "max_seqlen": size.max_seqlen.model_dump()}


def _captures(analysis: Analysis) -> dict[str, Any] | None:
    """The parts of the model to capture where dropless experts decide them; None where `--impl` does."""
    if not analysis.recommendation.buckets or analysis.settings.experts != "dropless":
        return None
    return {"impl": "transformer_engine", "modules": [*UP_TO_ROUTER], "why": DROPLESS_EXPERTS_RUN_EAGERLY}


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """The JSON object as a dict; it has the key `offload` if activations are moved to the host, and `overlap` if
    data-parallel communication overlaps.
    """
    chosen, offload, timed = analysis.recommendation, analysis.offload, analysis.times.origin != "none"
    return {
        "schema": SCHEMA,
        "dataset": {**asdict(analysis.dataset), "uris": list(analysis.dataset.uris)},
        "training": asdict(analysis.settings),
        "assumptions": [asdict(a) for a in analysis.assumptions],
        "model": model_dict(analysis),
        "gpu": analysis.gpu,
        "exact": analysis.microbatches.exact,
        "microbatches": len(analysis.microbatches),
        "steps": analysis.steps,
        "n_seqs": analysis.n_seqs.model_dump(),
        "max_seqlen": analysis.max_seqlen.model_dump(),
        "n_tokens_max": analysis.n_tokens_max,
        "cp_sizes": [_cp_size(size) for size in analysis.cp_sizes],
        "packing_efficiency": analysis.packing_efficiency,
        "packing_efficiency_without_cap": analysis.packing_efficiency_without_cap,
        "verdict": analysis.verdict.ruling,
        "verdict_reason": analysis.verdict.reason,
        "times": asdict(analysis.times),
        "worth": None if analysis.worth is None else asdict(analysis.worth),
        "candidates": [_candidate(c, timed=timed) for c in chosen.candidates],
        "recommendation": {
            "max_packed_seqs": max((b.max_seqs for b in chosen.buckets), default=None),
            "buckets": [
                {
                    "max_seqs": b.max_seqs,
                    "max_seqlen": b.max_seqlen,
                    "cp_size": b.cp_size,
                    "share": share,
                }
                for b, share in zip(chosen.buckets, chosen.shares, strict=True)
            ],
            "captures": _captures(analysis),
            "slots": analysis.slots,
            "fallback_rate": chosen.fallback_rate.model_dump(),
            "fallback_rate_upper_bound": chosen.fallback_rate_upper_bound,
            "relative_step_time": chosen.relative_step_time if timed else None,
            "step_ms": chosen.step_ms if timed else None,
            "eager_step_ms": chosen.eager_step_ms if timed else None,
            "graph_memory_bytes": chosen.graph_memory_bytes if timed else None,
            "one_cap": None if chosen.one_cap is None else _candidate(chosen.one_cap, timed=timed),
        },
        **({} if offload is None else {"offload": asdict(offload)}),
        "memory": None if analysis.memory is None else asdict(analysis.memory),
        "capture": None if analysis.capture is None else asdict(analysis.capture),
        **({} if (cut := analysis.overlap) is None else {"overlap": {**asdict(cut), "gained_ms": cut.gained_ms}}),
        "costs": {
            "name": analysis.costs.name,
            "calibrated": analysis.costs.calibrated,
            "modelled": analysis.costs.modelled,
            "hardware": analysis.costs.hardware,
            "attention": analysis.costs.attention,
            "n_tokens": analysis.costs.n_tokens,
        },
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
    }


def to_json(analysis: Analysis) -> str:
    """The analysis as JSON text, indented."""
    return json_text(to_dict(analysis))
