"""Refuses, all at once, the settings of a Megatron run that graphs cannot serve: pure decisions without a model.

What analysis knows too stands in the table of `thdprof.megatron_limits`. This module asks it about the run, and adds
what only the run itself can know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thdprof.compare.fit import find_lacking_slots
from thdprof.errors import UsageError
from thdprof.megatron_limits import Facts, Run, limits_of
from thdprof.megatron_limits.command_line import refused_allocator
from thdprof.megatron_limits.run import is_dynamic
from thdprof.offload import EXPERT_MODULES, MODULES
from thdprof.plan import OffloadPart, Plan
from thdprof.runtime.graphs.module_state import describe_hooked_modules
from thdprof.runtime.megatron.layer_offload import uses_core

__all__ = ["Facts", "SettingsError", "check", "check_decoder", "is_dynamic"]

_DELTA_NET = "GatedDeltaNet"
_ELEMENT_BYTES = 2
"""Bytes of an activation in bf16: megatron-core counts elements, the plan bytes."""
_UNFOLLOWED = {"delta_offload_bytes_across_pp_ranks": 0, "fine_grained_offloading_max_inflight_offloads": None}
"""Settings of megatron-core's own offloading that are not followed around graphs, each with the value to use."""


class SettingsError(ValueError):
    """Settings that training with graphs cannot serve; every one is named, with the value to use instead."""


def check(config: Any, plan: Plan, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a run that graphs cannot serve, with everything that is in the way.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.

    Raises:
        SettingsError: one line for every setting in the way, with the value to use.
    """
    impl, run = plan.graphs.impl, Run.from_config(config, plan, facts, environment)
    lines = [*_refuse_planned_run(config, plan, facts), *_refuse_dynamic_cp(config, plan)]
    lines += (limit.describe_in_fields(run) for limit in limits_of(run))
    if impl != "none":  # which captures nothing
        lines += [*_refuse_kind(config, impl, facts), *refuse_layer_graphs(config, plan)]
        lines += refuse_model(config, facts, environment, impl, dynamic=is_dynamic(plan))
        if facts.replay:
            lines += [
                *_refuse_operations(config, plan, facts),
                *_refuse_adapters(facts),
                *_refuse_offloading(config, plan),
            ]
            lines += _refuse_capture(config, plan)
    _refuse("install graphs", lines)


def check_decoder(config: Any, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a decoder that graphs of the whole decoder (`chunk`) cannot serve, whatever the plan.

    The arguments and the error are those of `check`.
    """
    run = Run.from_decoder(config, facts, environment)
    lines = [*(limit.describe_in_fields(run) for limit in limits_of(run)), *_refuse_kind(config, "chunk", facts)]
    if uses_core(config):
        lines.append(
            "fine_grained_activation_offloading is True: a measured decoder keeps its activations; set it to False"
        )
    lines += [*refuse_model(config, facts, environment, "chunk", dynamic=False), *_refuse_adapters(facts)]
    _refuse("measure a decoder", lines)


def _refuse(action: str, lines: Sequence[str]) -> None:
    if lines:
        raise SettingsError(f"thdprof cannot {action}:\n" + "\n".join(f"- {line}" for line in lines))


# --- the plan ---------------------------------------------------------------------------------------------------------


def _refuse_planned_run(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """Plans of another run, or for something else than Megatron."""
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
    yield from _refuse_groups(config, plan)
    if plan.graphs.no_grad == "replay":
        yield "graphs.no_grad is replay: Megatron's evaluation runs eagerly; set it to eager"


def _refuse_groups(config: Any, plan: Plan) -> Iterator[str]:
    """A line where the interleaved schedule groups micro-batches so that the plan has too few slots."""
    training = plan.training
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or training.pipeline_parallel_size
    planned = training.microbatch_group
    if (training.virtual_pipeline_size or 1) == 1 or not plan.captured or group == planned:
        return
    case = f"microbatch_group_size_per_vp_stage is {group}, the plan was made for {planned}"
    try:
        needed = find_lacking_slots(plan, global_batch_size=training.global_batch_size, group=group)
    except UsageError:
        yield f"{case}: Megatron takes no such group with the plan's micro-batches a step; set it to {planned}"
        return
    if needed:
        has_most = max(n for rank in plan.graphs.slots for n in rank)
        yield (
            f"{case}: a model chunk has up to {needed} micro-batches in flight, and at most {has_most} slots; set it "
            f"to {planned}, or analyse with microbatch_group_size {group} in --settings"
        )


def _refuse_capture(config: Any, plan: Plan) -> Iterator[str]:
    """Moments of capture at which ranks or micro-batches would wait for each other."""
    graphs = plan.graphs
    if graphs.impl not in ("chunk", "transformer_engine"):
        return
    if shared := shared_by(config, plan):
        if graphs.capture != "startup":
            yield f"{shared[0]}: ranks with other micro-batches must capture together; set graphs.capture to startup"
        if not plan.microbatches.n_tokens_constant:
            yield (
                f"{shared[0]}: ranks capture at the first micro-batch of the captured size, and micro-batches differ "
                "in their size; pad every micro-batch to one length and analyse again"
            )
    # A capture begins when all work of the GPU has ended. In a virtual pipeline with overlapped communication a receive
    # of a later micro-batch may be among it, whose sender waits for what this rank computes next.
    is_virtual = (config.virtual_pipeline_model_parallel_size or 1) > 1
    if graphs.capture == "first_use" and is_virtual and getattr(config, "overlap_p2p_comm", False):
        yield (
            "graphs.capture is first_use, and overlap_p2p_comm is True in a virtual pipeline: a capture inside a "
            "step would wait for a receive whose sender waits for this rank; set graphs.capture to startup"
        )


# --- ranks that communicate inside the decoder ------------------------------------------------------------------------


COMMUNICATING = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Fields of the configuration that say over how many ranks the passes of a decoder communicate."""


def communicates(config: Any, *, data_parallel_size: int) -> bool:
    """Whether passes of a decoder communicate with other ranks, forward or backward.

    They do over the ranks that share its tensors (tensor parallelism), its tokens (context parallelism), its experts
    (expert and expert tensor parallelism); and, where routers are balanced over the global batch, over all data-
    parallel ranks, which then count tokens together in every forward. Balancing by micro-batch or by sequence counts
    tokens over tensor and context parallel ranks alone.
    """
    sizes = [getattr(config, field, None) or 1 for field in COMMUNICATING]
    if getattr(config, "num_moe_experts", None) and averages_over_all_ranks(config):
        sizes.append(data_parallel_size)
    return max(sizes) > 1


def shared_by(config: Any, plan: Plan) -> tuple[str, ...]:
    """The settings of a TransformerConfig by which such ranks communicate inside what the plan captures; empty where
    they do not.
    """
    tensor_size = config.tensor_model_parallel_size
    shared = []
    experts_captured = experts_communicate(config, plan)
    if experts_captured and (getattr(config, "expert_model_parallel_size", 1) or 1) > 1:
        shared.append(f"expert_model_parallel_size is {config.expert_model_parallel_size}")
    if experts_captured and _expert_tensor_size(config) > tensor_size:
        shared.append(f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}")
    if averages_over_all_ranks(config):
        shared.append("moe_router_load_balancing_type has global_aux_loss")
    return tuple(shared)


def experts_communicate(config: Any, plan: Plan) -> bool:
    """Whether ranks that share experts communicate inside what the plan captures: in whole layers they exchange tokens
    there, and in the preprocessing of the alltoall dispatcher the numbers of tokens.
    """
    modules = plan.graphs.modules
    preprocessed = "moe_preprocess" in modules and config.moe_token_dispatcher_type == "alltoall"
    return preprocessed or "moe_router" not in modules


def averages_over_all_ranks(config: Any) -> bool:
    """Whether routers add up their loads over all data-parallel ranks, by Megatron's global_aux_loss."""
    balancing = getattr(config, "moe_router_load_balancing_type", None) or ()
    return "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing)


def count_token_shards(config: Any) -> int:
    """Number of ranks that share a micro-batch's tokens out among them, besides context parallelism."""
    return int(config.tensor_model_parallel_size) if config.sequence_parallel else 1


def _expert_tensor_size(config: Any) -> int:
    return int(getattr(config, "expert_tensor_parallel_size", None) or config.tensor_model_parallel_size)


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Sizes of the groups that megatron-core 0.19 makes of `num_ranks` data-parallel x context-parallel ranks.

    These are the powers of two up to half of the largest one in `num_ranks`, and all ranks.
    """
    powers = (1 << i for i in range(1, num_ranks.bit_length() - 1))
    return tuple(sorted({1, *powers, num_ranks}))


def _refuse_dynamic_cp(config: Any, plan: Plan) -> Iterator[str]:
    """Settings of config and plan that do not fit the plan's context-parallel sizes."""
    graphs, training = plan.graphs, plan.training
    if not is_dynamic(plan):
        if getattr(config, "hybrid_context_parallel", False):
            yield (
                "hybrid_context_parallel is True, the plan has one context-parallel size for all micro-batches: set it "
                "to False, or analyse with --packer balanced_cp"
            )
        return
    if graphs.impl != "none" and graphs.capture != "startup":
        yield (
            f"graphs.capture is {graphs.capture}: ranks of every group must capture together, whatever the size of "
            "their micro-batch; set it to startup"
        )
    num_ranks = training.data_parallel_size * training.context_parallel_size
    sizes = group_sizes(num_ranks)
    for size in sorted({b.cp_size for b in graphs.buckets} - {*sizes}):
        made = ", ".join(map(str, sizes))
        yield f"a bucket's cp_size is {size}: megatron-core makes groups of {made} of {num_ranks} ranks; leave it out"
    shards = count_token_shards(config)
    tokens_of_rank = training.max_seqlen_per_dp_cp_rank or 0
    if tokens_of_rank % shards:
        yield (
            f"max_seqlen_per_dp_cp_rank is {tokens_of_rank}: sequence parallelism shares it out among {shards} ranks; "
            "analyse with a multiple"
        )
    kinds = getattr(config, "cp_comm_type", None) or "p2p"
    if other := sorted({kinds} - {"p2p"} if isinstance(kinds, str) else {*kinds} - {"p2p"}):
        yield f"cp_comm_type is {other[0]!r}: only rings were checked with groups that change; set it to 'p2p'"
    if not config.calculate_per_token_loss:
        yield (
            "calculate_per_token_loss is False: a token would weigh more in a micro-batch of fewer of them; set it to "
            "True"
        )


# --- the model and its graphs -------------------------------------------------------------------------------------


def _refuse_kind(config: Any, impl: str, facts: Facts) -> Iterator[str]:
    """Lines where the model was built for graphs of another kind than `impl`, which is not "none", and settings with
    which Megatron's own layer graphs cannot leave some micro-batches to run eagerly.
    """
    wanted = "none" if impl == "chunk" else impl
    as_it_is = (
        impl == "transformer_engine" and config.cuda_graph_impl == "none"
    )  # layers hear of a split while they run
    if config.cuda_graph_impl != wanted and impl != "module" and not as_it_is:
        yield f"cuda_graph_impl is {config.cuda_graph_impl!r}, graphs.impl {impl} needs {wanted!r}"
    if impl != "local":
        return
    if (size := _expert_tensor_size(config)) > config.tensor_model_parallel_size:
        yield (
            f"expert_tensor_parallel_size is {size}, tensor_model_parallel_size {config.tensor_model_parallel_size}: "
            "ranks that share experts may record other buckets; set graphs.impl to chunk"
        )
    if modules := _captured_modules(config):
        yield f"cuda_graph_modules is {modules}: only graphs of whole layers are led; set it to []"
    if getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None) == "block":
        yield "inference_cuda_graph_scope is 'block': layers have no graphs of their own then; set it to 'layer'"
    if not facts.wrapper:
        yield "the model is not wrapped: Megatron's graphs add to main_grad; wrap it in DistributedDataParallel"


def _refuse_operations(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """A line where a spec of one's own has fused operations in layers that graphs hold whole."""
    known = getattr(config, "use_transformer_engine_op_fuser", False)  # which the table of limits refuses
    if plan.graphs.impl in ("chunk", "local") and facts.fused_operations and not known:
        yield (
            f"{facts.fused_operations[0]} runs by Transformer Engine's fused operations, which keep the parameters of "
            "a capture and train no others: build the layers without them, or set graphs.impl to transformer_engine"
        )


def refuse_layer_graphs(config: Any, plan: Plan) -> Iterator[str]:
    """A line for every setting that Transformer Engine's graphs of layers cannot serve, or for parts of layers in a
    plan for graphs of another kind.
    """
    planned = list(plan.graphs.modules)
    if plan.graphs.impl != "transformer_engine":
        if planned:
            yield (
                f"graphs.modules is {planned}: a part of a layer is captured by graphs.impl transformer_engine alone; "
                "set graphs.impl to it, or graphs.modules to []"
            )
        return
    modules = _captured_modules(config)
    if config.cuda_graph_impl == "transformer_engine" and sorted(modules) != sorted(planned):
        plan_captures = f"the plan's graphs.modules is {planned}" if planned else "the plan captures whole layers"
        yield f"cuda_graph_modules is {modules}: {plan_captures}; set it to {planned}"
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and plan.training.micro_batch_size > 1:
        yield (
            f"overlap_moe_expert_parallel_comm is True, and a micro-batch has {plan.training.micro_batch_size} "
            "samples: the nodes of its schedule give routers no samples behind a graph; set micro_batch_size to 1"
        )
    if getattr(config, "cuda_graph_retain_backward_graph", False):
        yield (
            "cuda_graph_retain_backward_graph is True: a slot's memory is given back after its backward; set it to "
            "False"
        )


def _captured_modules(config: Any) -> list[str]:
    """The names in the model's `cuda_graph_modules`."""
    return [getattr(module, "name", str(module)) for module in getattr(config, "cuda_graph_modules", None) or ()]


def refuse_model(
    config: Any, facts: Facts, environment: Mapping[str, str], impl: str, *, dynamic: bool
) -> Iterator[str]:
    """MambaLayers, the RNG tracker, hooks, foreign layers and the CUDA allocator.

    `dynamic` says whether the plan is of dynamic context parallelism.
    """
    if facts.has_mamba and not getattr(config, "use_mamba_mem_eff_path", True):
        yield "use_mamba_mem_eff_path is False: Megatron's other path takes no packed input; set it to True"
    if facts.has_mamba and dynamic:
        yield (
            "the decoder has MambaLayers, which exchange tokens over groups of one size, and the plan is of dynamic "
            "context parallelism: analyse a run with one size"
        )
    if not facts.graph_safe_rng:
        yield (
            "the RNG tracker's states cannot be registered with a graph: call model_parallel_cuda_manual_seed(..., "
            "te_rng_tracker=True), or --te-rng-tracker"
        )
    if facts.foreign_hooks:
        yield describe_hooked_modules(facts.foreign_hooks)
    if _DELTA_NET in facts.foreign_layers and impl != "transformer_engine" and facts.replay:
        yield (
            f"the decoder has {_DELTA_NET}, which reads the boundaries on the host in every pass: analyse with --impl "
            "transformer_engine, whose graphs of the other layers leave those that have one to run eagerly"
        )
    if foreign := {*facts.foreign_layers} - {_DELTA_NET}:
        yield (
            f"the decoder has {', '.join(sorted(foreign))}: only attention, MLP, experts and MambaLayers were "
            "checked in a graph; use those alone, or set graphs.impl to none and graphs.buckets to []"
        )
    yield from refused_allocator(environment)


def _refuse_adapters(facts: Facts) -> Iterator[str]:
    """Adapters and gradient hooks that a replay cannot serve."""
    if facts.fused_adapters:
        yield (
            f"{_few(facts.fused_adapters)} runs through Transformer Engine's operation fuser, which keeps parameters "
            "of its own past a capture; set use_transformer_engine_op_fuser to False"
        )
    if facts.hooked_parameters:
        yield (
            f"{_few(facts.hooked_parameters)} has a gradient hook, which a replay cannot run; for adapters of experts "
            "set experts_shared_outer_loras or share_expert_adapters to False, or leave their linear_fc1 and "
            "linear_fc2 out of target_modules"
        )


def _few(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


# --- activations on the host --------------------------------------------------------------------------------------


def _refuse_offloading(config: Any, plan: Plan) -> Iterator[str]:
    """What of the plan's `graphs.offload`, and of megatron-core's own offloading, the run cannot follow."""
    offload = plan.graphs.offload
    if uses_core(config):
        yield from _refuse_core(config, offload, plan.graphs.impl)
        return
    if offload is None:
        return
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


def _refuse_core(config: Any, offload: OffloadPart | None, impl: str) -> Iterator[str]:
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
