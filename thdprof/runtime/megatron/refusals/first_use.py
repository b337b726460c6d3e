"""Captures in the middle of a step, where the GPU may be waiting for a rank that waits for this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan


def refusals(config: Any, plan: Plan) -> Iterator[str]:
    """A line where a bucket's capture at its first use could stop the pipeline for good.

    A capture begins when all work of the GPU has ended. In a virtual pipeline with overlapped communication a receive
    of a later micro-batch may be among it, whose sender waits for what this rank computes next.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    if plan.graphs.impl not in ("chunk", "transformer_engine") or plan.graphs.capture != "first_use":
        return
    if (config.virtual_pipeline_model_parallel_size or 1) > 1 and getattr(config, "overlap_p2p_comm", False):
        yield (
            "graphs.capture is first_use, and overlap_p2p_comm is True in a virtual pipeline: a capture inside a "
            "step would wait for a receive whose sender waits for this rank; set graphs.capture to startup"
        )
