"""Activations on the host: what of `graphs.offload`, and of megatron-core's own offloading, the run cannot follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.offload.plan import EXPERT_MODULES, MODULES
from thdprof.runtime.megatron.layer_offload import uses_core

if TYPE_CHECKING:
    from thdprof.plan import OffloadPart, Plan

_ELEMENT_BYTES = 2
"""Bytes of an activation in bf16: megatron-core counts elements, the plan bytes."""
_UNFOLLOWED = {"delta_offload_bytes_across_pp_ranks": 0, "fine_grained_offloading_max_inflight_offloads": None}
"""Settings of megatron-core's own offloading that are not followed around graphs, each with the value to use."""


def refusals(config: Any, plan: Plan) -> Iterator[str]:
    """A line for everything of the plan's `graphs.offload` that the run cannot follow.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    offload = plan.graphs.offload
    if uses_core(config):
        yield from _of_core(config, offload, plan.graphs.impl)
    elif offload is not None:
        yield from _of_saved_tensors(offload)


def refusals_of_decoder(config: Any) -> Iterator[str]:
    """A line where a decoder that is to be measured would move its activations.

    Args:
        config: as `refusals` takes it.
    """
    if uses_core(config):
        yield "fine_grained_activation_offloading is True: a measured decoder keeps its activations; set it to False"


def _of_saved_tensors(offload: OffloadPart) -> Iterator[str]:
    """What thdprof's own offloading inside graphs cannot do."""
    if offload.delayed_commit:
        yield (
            "graphs.offload.delayed_commit is True: copies are part of the graphs, so that launching one queues them "
            "all and there is nothing to delay; set it to False, or build the model with "
            "fine_grained_activation_offloading, which delays those of dropless experts"
        )
    if unknown := [name for name in offload.modules if name != "all" and name not in MODULES]:
        why = (
            " (it needs use_transformer_engine_op_fuser, which was not checked)" if "fused_group_mlp" in unknown else ""
        )
        yield f"graphs.offload.modules has {', '.join(unknown)}{why}: choose all, or some of {', '.join(MODULES)}"


def _of_core(config: Any, offload: OffloadPart | None, impl: str) -> Iterator[str]:
    """Where megatron-core's own offloading would do something else than the plan says."""
    if impl != "transformer_engine":
        yield (
            f"fine_grained_activation_offloading is True: graphs.impl {impl} does not work with it; set it to False "
            "(graphs.offload moves the same tensors in chunk graphs), or set graphs.impl to transformer_engine"
        )
        return
    if config.cuda_graph_impl != "transformer_engine":
        yield (
            f"fine_grained_activation_offloading is True, and cuda_graph_impl is {config.cuda_graph_impl!r}: layers do "
            "not order their copies for graphs then; set it to 'transformer_engine'"
        )
        return
    if offload is None:
        yield (
            "fine_grained_activation_offloading is True, and the plan keeps all activations on the device: analyse "
            "with --offload, or set it to False"
        )
        return
    yield from _differences(config, offload)
    for field, value in _UNFOLLOWED.items():
        if (actual := getattr(config, field, value)) != value:
            yield f"{field} is {actual}: it is not followed around graphs of layers; set it to {value}"
    if getattr(config, "num_moe_experts", None) and config.moe_pad_expert_input_to_capacity:
        yield (
            "fine_grained_activation_offloading with moe_pad_expert_input_to_capacity: megatron-core does not support "
            "it where a layer's graph holds experts with token dropping; set it to False"
        )
    if offload.delayed_commit and not set(offload.modules) & set(EXPERT_MODULES):
        yield (
            "graphs.offload.delayed_commit is True: megatron-core delays copies of expert_fc1 and moe_act alone; set "
            "it to False"
        )


def _differences(config: Any, offload: OffloadPart) -> Iterator[str]:
    """Fields of the config whose values differ from the plan's."""
    pairs = [
        ("offload_modules", "modules", sorted(offload.modules)),
        ("activation_offload_fraction", "fraction", offload.fraction),
        ("delay_offload_until_cuda_graph", "delayed_commit", offload.delayed_commit),
        ("min_offloaded_tensor_size", f"min_bytes, {_ELEMENT_BYTES} an element,", offload.min_bytes // _ELEMENT_BYTES),
    ]
    for field, name, planned in pairs:
        value = getattr(config, field)
        actual = sorted(value or ()) if isinstance(planned, list) else value
        if actual != planned:
            yield f"{field} is {actual!r}, and by the plan's graphs.offload.{name} {planned!r}: set one to the other"
