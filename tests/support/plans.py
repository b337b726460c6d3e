"""Plans of made-up runs, by the numbers that a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thdprof.plan import Plan, parse_plan


def percentiles(most: int) -> dict[str, float]:
    return {"mean": most / 4, "p50": most, "p90": most, "p95": most, "p99": most, "p99_9": most, "max": most}


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
    settings = {
        "seq_length": 256, "micro_batch_size": 1, "global_batch_size": 8, "data_parallel_size": 1,
        "context_parallel_size": 1, "pipeline_parallel_size": 1, "virtual_pipeline_size": None, "loader": "single",
        "data_sharding": True, "drop_last": True, "seed": 1234, "split": "969,30,1", "train_samples": None,
        "weights": None, "add_extra_token": True, "max_num_samples": None, "tail_policy": "none",
        "pad_to_max_length": False, "pad_seq_to_mult": 1, "packer": "first_fit_decreasing", "max_docs_per_pack": None,
    }  # fmt: skip
    settings |= training
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
            "eager_step_ms": None, "graph_memory_bytes": None,
        },
        "costs": {"name": "x", "calibrated": False, "hardware": "h", "attention": "a", "n_tokens": 256},
    }  # fmt: skip
    return parse_plan(values, where="plan")
