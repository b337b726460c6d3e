"""Ranks that see other micro-batches but communicate inside the decoder: they must capture at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan


def refusals(config: Any, plan: Plan) -> Iterator[str]:
    """A line for every part of the plan by which such ranks would capture at different moments.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    if plan.graphs.impl not in ("chunk", "transformer_engine"):
        return
    tensor_size = config.tensor_model_parallel_size
    balancing = getattr(config, "moe_router_load_balancing_type", None) or ()
    shared = []
    experts_captured = "moe_router" not in plan.graphs.modules
    if experts_captured and getattr(config, "expert_model_parallel_size", 1) > 1:
        shared.append(f"expert_model_parallel_size is {config.expert_model_parallel_size}")
    if experts_captured and (getattr(config, "expert_tensor_parallel_size", None) or tensor_size) > tensor_size:
        shared.append(f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}")
    if "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        shared.append("moe_router_load_balancing_type has global_aux_loss")
    if not shared:
        return
    if plan.graphs.capture != "startup":
        yield f"{shared[0]}: ranks with other micro-batches must capture together; set graphs.capture to startup"
    if not plan.microbatches.n_tokens_constant:
        yield (
            f"{shared[0]}: ranks capture at the first micro-batch of the captured size, and micro-batches differ in "
            "their size; pad every micro-batch to one length and analyse again"
        )
