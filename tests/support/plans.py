"""Plans of made-up runs, by the numbers that a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from thdprof.plan import Plan, parse_plan
from thdprof.training import TrainingSettings


def percentiles(most: int) -> dict[str, float]:
    return {"mean": most / 4, "p50": most, "p90": most, "p95": most, "p99": most, "p99_9": most, "max": most}


def training_part(**settings: Any) -> dict[str, Any]:
    """The `training` of a plan, complete."""
    part: dict[str, Any] = TypeAdapter(TrainingSettings).dump_python(TrainingSettings(**settings), mode="json")
    return part


def plan_of_shares(
    shares: Sequence[float],
    *,
    count: int,
    steps: int,
    dataset_format: str = "megatron",
    exact: bool = True,
    cp_sizes: Sequence[int] = (),
    **training: Any,
) -> Plan:
    """A plan whose buckets hold 8, 16, 24, ... documents of 256 tokens, with these shares; the rest runs eagerly.

    Every model chunk has one slot.
    """
    eager = max(0.0, 1 - sum(shares))
    rates = dict.fromkeys(("microbatch", "rank_step", "step"), eager)
    settings = training_part(**{"seq_length": 256, "global_batch_size": 8, "loader": "single", **training})
    longest = settings.get("max_seqlen_per_dp_cp_rank") or 256
    slots = [[1] * (settings["virtual_pipeline_size"] or 1)] * settings["pipeline_parallel_size"]
    values = {
        "schema": "thdprof.plan/1",
        "written_by": "0.1.0",
        "dataset": {
            "uris": ["data/text_document.idx"], "format": dataset_format, "fingerprint": "blake2b:00",
            "rows": count, "documents": 10 * count, "tokens": 256 * count,
        },
        "training": settings,
        "microbatches": {
            "exact": exact, "count": count, "steps": steps, "n_seqs": percentiles(64), "max_seqlen": percentiles(256),
            "n_tokens_max": 256, "n_tokens_constant": True,
        },
        "graphs": {
            "impl": "chunk",
            "buckets": [
                {"max_seqs": 8 * (i + 1), "max_seqlen": longest, "cp_size": size, "share": share}
                for i, (share, size) in enumerate(zip(shares, cp_sizes or [1] * len(shares), strict=True))
            ],
            "one_cap": None, "slots": slots, "tail_policy": "none",
        },
        "predictions": {
            "fallback_rate": rates, "fallback_rate_upper_bound": 1.0, "relative_step_time": None, "step_ms": None,
            "eager_step_ms": None, "graph_memory_bytes": None, "times": {"origin": "none", "basis": "x"},
        },
        "costs": {"name": "x", "calibrated": False, "hardware": "h", "attention": "a", "n_tokens": 256},
    }  # fmt: skip
    return parse_plan(values, where="plan")
