"""A run as the table of limits knows it, from the run's TransformerConfig, plan and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from thdprof.megatron_limits import Run, limits_of, takes_unmeasured
from thdprof.runtime.megatron.layer_offload import uses_core
from thdprof.runtime.megatron.refusals.dynamic_cp import is_dynamic

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.refusals.facts import Facts
    from thdprof.training import Experts


def refusals(config: Any, plan: Plan, facts: Facts, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for every row of the table that the run meets.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
        facts: what else is known of the run.
        environment: environment variables by name.
    """
    training, graphs = plan.training, plan.graphs
    captures = facts.replay and graphs.impl != "none"
    offload = graphs.offload if captures else None
    run = Run(
        impl=graphs.impl,
        modules=tuple(graphs.modules) if captures else None,
        pipeline_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        dynamic_cp=is_dynamic(plan),
        packer=training.packer,
        max_seqlen_per_dp_cp_rank=training.max_seqlen_per_dp_cp_rank,
        bucket_cp_sizes=tuple(bucket.cp_size for bucket in graphs.buckets),
        experts=_experts_of(config),
        offload_modules=None if offload is None else tuple(offload.modules),
        core_offload=uses_core(config),
        layers_per_graph=graphs.layers_per_graph if captures else None,
        position_embedding=facts.position_embedding,
        model=facts.model,
        wrapper=facts.wrapper,
        unmeasured=takes_unmeasured(environment),
        config=config,
    )
    return (limit.in_fields(run) for limit in limits_of(run))


def refusals_of_decoder(config: Any, facts: Facts, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for every row of the table that whole-decoder graphs (`chunk`) meet, whatever the plan.

    Args:
        config: as `refusals` takes it.
        facts: what else is known of the model.
        environment: environment variables by name.
    """
    run = Run(
        impl="chunk",
        modules=(),
        position_embedding=facts.position_embedding,
        model=facts.model,
        wrapper=facts.wrapper,
        context_parallel_size=getattr(config, "context_parallel_size", None),
        experts=_experts_of(config),
        unmeasured=takes_unmeasured(environment),
        config=config,
    )
    return (limit.in_fields(run) for limit in limits_of(run))


def _experts_of(config: Any) -> Experts:
    if not getattr(config, "num_moe_experts", None):
        return "none"
    return "padded" if config.moe_pad_expert_input_to_capacity else "dropless"
