"""Plans of another run, or for something else than Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.training.pipeline_slots import slots

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.refusals.facts import Facts


def refusals(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """A line for every part of the plan that does not fit the run.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
        facts: what else is known of the run.
    """
    training = plan.training
    if plan.graphs.impl == "module":
        yield (
            "the plan's graphs.impl is module, which is for thdprof.runtime.graphed: analyse with --impl chunk, or set "
            "it to chunk, local or transformer_engine"
        )
    pairs = [
        ("pipeline_model_parallel_size", config.pipeline_model_parallel_size, training.pipeline_parallel_size),
        (
            "virtual_pipeline_model_parallel_size",
            config.virtual_pipeline_model_parallel_size or 1,
            training.virtual_pipeline_size or 1,
        ),
        ("context_parallel_size", config.context_parallel_size, training.context_parallel_size),
        ("data-parallel size", facts.data_parallel_size, training.data_parallel_size),
    ]
    for name, actual, planned in pairs:
        if actual != planned:
            yield f"{name} is {actual}, the plan was made for {planned}: analyse for this run"
    chunks_with_slots = {len(chunks) for chunks in plan.graphs.slots}
    if chunks_with_slots != {facts.num_chunks}:
        yield f"{facts.num_chunks} model chunks on this rank, the plan has slots for {sorted(chunks_with_slots)}"
    yield from _of_groups(config, plan)
    if plan.graphs.no_grad == "replay":
        yield "graphs.no_grad is replay: Megatron's evaluation runs eagerly; set it to eager"


def _of_groups(config: Any, plan: Plan) -> Iterator[str]:
    """A line where the interleaved schedule groups micro-batches so that the plan has too few slots."""
    training = plan.training
    if (training.virtual_pipeline_size or 1) == 1 or not plan.captured:
        return
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or training.pipeline_parallel_size
    planned = training.microbatch_group
    if group == planned:
        return
    each = training.micro_batch_size * training.data_parallel_size
    case = f"microbatch_group_size_per_vp_stage is {group}, the plan was made for {planned}"
    try:
        needed = slots(
            pipeline_size=training.pipeline_parallel_size,
            num_chunks=training.virtual_pipeline_size or 1,
            num_microbatches=max(1, training.global_batch_size // each),
            group=group,
        )
    except UsageError:
        yield f"{case}: Megatron takes no such group with the plan's micro-batches a step; set it to {planned}"
        return
    there = plan.graphs.slots
    if any(n > p for mine, has in zip(needed, there, strict=False) for n, p in zip(mine, has, strict=False)):
        most, has_most = (max(n for rank in counts for n in rank) for counts in (needed, there))
        yield (
            f"{case}: a model chunk has up to {most} micro-batches in flight, and at most {has_most} slots; set it to "
            f"{planned}, or analyse with microbatch_group_size {group} in --settings"
        )
