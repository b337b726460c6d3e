"""Ranks that see other micro-batches but communicate inside the decoder: they capture together, and decide alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan


def shared_by(config: Any, plan: Plan) -> tuple[str, ...]:
    """The settings by which such ranks communicate inside what the plan captures; empty where they do not.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    tensor_size = config.tensor_model_parallel_size
    shared = []
    experts_captured = experts_communicate(config, plan)
    if experts_captured and (getattr(config, "expert_model_parallel_size", 1) or 1) > 1:
        shared.append(f"expert_model_parallel_size is {config.expert_model_parallel_size}")
    if experts_captured and (getattr(config, "expert_tensor_parallel_size", None) or tensor_size) > tensor_size:
        shared.append(f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}")
    if averages_over_all_ranks(config):
        shared.append("moe_router_load_balancing_type has global_aux_loss")
    return tuple(shared)


def experts_communicate(config: Any, plan: Plan) -> bool:
    """Whether ranks that share experts communicate inside what the plan captures: in whole layers they exchange tokens
    there, and in the preprocessing of the alltoall dispatcher the numbers of tokens.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    modules = plan.graphs.modules
    preprocessed = "moe_preprocess" in modules and config.moe_token_dispatcher_type == "alltoall"
    return preprocessed or "moe_router" not in modules


def averages_over_all_ranks(config: Any) -> bool:
    """Whether routers add up their loads over all data-parallel ranks, by Megatron's global_aux_loss."""
    balancing = getattr(config, "moe_router_load_balancing_type", None) or ()
    return "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing)


def refusals(config: Any, plan: Plan) -> Iterator[str]:
    """A line for every part of the plan by which such ranks would capture at different moments.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    if plan.graphs.impl not in ("chunk", "transformer_engine"):
        return
    shared = shared_by(config, plan)
    if not shared:
        return
    if plan.graphs.capture != "startup":
        yield f"{shared[0]}: ranks with other micro-batches must capture together; set graphs.capture to startup"
    if not plan.microbatches.n_tokens_constant:
        yield (
            f"{shared[0]}: ranks capture at the first micro-batch of the captured size, and micro-batches differ in "
            "their size; pad every micro-batch to one length and analyse again"
        )
