"""Predicts what capturing the plan's graphs takes, once in a run."""

from __future__ import annotations

from collections.abc import Sequence

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.times.results import Capture
from thdprof.dispatch import WARMUP_PASSES

OVERHEAD_SECONDS = (0.02, 0.2)
"""Time of one capture besides its passes: memory is given back and asked for again, and the graph is instantiated. The
range was set by the eleven runs of several GPUs in benchmarks/results/megatron.jsonl, whose libraries were loaded: all
lie in it or within 1% of it."""


def predict_capture(*, num_buckets: int, slots: Sequence[Sequence[int]], costs: CostTable) -> Capture | None:
    """What the captures of the pipeline rank that has most take; None without graphs, or without times of the model.

    Each bucket is captured in each slot of each model chunk: WARMUP_PASSES eager passes, forward and backward, and one
    that is captured, which takes the host as long. What libraries and kernels need at their first use is not counted:
    an eager run needs it too.

    Args:
        num_buckets: shapes that are captured.
        slots: slots of each model chunk, for every pipeline rank.
        costs: the cost table, whose times are of all layers of one rank.
    """
    graphs, chunks = max((num_buckets * sum(rank), len(rank)) for rank in slots)
    if not graphs or costs.origin == "none":
        return None
    passes = graphs * (WARMUP_PASSES + 1)
    ranges = [point.range_ms or (point.ms, point.ms) for point in costs.eager]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    low, high = (
        passes * ms / chunks / 1000 + graphs * overhead
        for ms, overhead in zip((lowest, highest), OVERHEAD_SECONDS, strict=True)
    )
    return Capture(graphs=graphs, passes=passes, seconds=(low, high))
