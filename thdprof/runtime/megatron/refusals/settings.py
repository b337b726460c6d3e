"""What of a Megatron configuration the graphs cannot serve: pure decisions, each with the setting to change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron.offload import groups
from thdprof.runtime.megatron.refusals import dynamic_cp

if TYPE_CHECKING:
    from thdprof.plan import Plan


class SettingsError(ValueError):
    """Settings that training with graphs cannot serve; every one is named, with the value to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the run besides its TransformerConfig and plan."""

    num_chunks: int
    """Model chunks of this rank."""
    position_embedding: str = "rope"
    """Of the model: rope, yarn, mrope, learned_absolute or none."""
    graph_safe_rng: bool = True
    """Whether every state of Megatron's RNG tracker can be registered with a graph."""
    foreign_hooks: tuple[str, ...] = ()
    """Submodules with forward or backward hooks that a replay would not run."""
    foreign_layers: tuple[str, ...] = ()
    """Classes of layers, or of parts of layers, that were not looked at in a graph."""
    has_mamba: bool = False
    """Whether a decoder has MambaLayers."""
    mamba_outside: bool = False
    """Whether a model has MambaLayers outside its decoder."""
    wrapper: str = "DistributedDataParallel"
    """Class that wraps the chunks; empty: none."""
    data_parallel_size: int = 1
    replay: bool = True
    """Whether graphs are captured, and not only inputs padded for them."""


def check(config: Any, plan: Plan, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what cannot work, all of it at once.

    Args:
        config: megatron.core.transformer.TransformerConfig, or what has its fields.
        plan: what training is to follow.
        facts: of the run.
        environment: environment variables.

    Raises:
        SettingsError: one line for every setting.
    """
    said = [*_of_plan(config, plan, facts)]
    if plan.graphs.impl != "none":  # which captures nothing
        said += [*_of_config(config, plan.graphs.impl, facts), *_of_local(config, plan, facts)]
        said += [*_of_transformer_engine(config, plan), *_of_mamba(config, facts), *_of_run(facts, environment)]
        said += [*_of_dynamic_mamba(plan, facts)]
        if facts.replay:
            said += [*groups.complaints(config, plan)]
            said += [*_of_experts(config, plan.graphs.modules), *_of_shared_captures(config, plan)]
    _refuse("install graphs", said)


def check_decoder(config: Any, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what graphs of a whole decoder cannot serve, whatever the plan.

    Args:
        config: as `check` takes it.
        facts: of the model.
        environment: environment variables.

    Raises:
        SettingsError: one line for every setting.
    """
    said = [*_of_config(config, "chunk", facts), *_of_experts(config, ()), *groups.of_decoder(config)]
    _refuse("measure a decoder", [*said, *_of_mamba(config, facts), *_of_run(facts, environment)])


def _refuse(what: str, said: Sequence[str]) -> None:
    if said:
        raise SettingsError(f"thdprof cannot {what}:\n" + "\n".join(f"- {line}" for line in said))


def _of_plan(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    training, impl = plan.training, plan.graphs.impl
    if impl == "module":
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
    for name, here, planned in pairs:
        if here != planned:
            yield f"{name} is {here}, the plan was made for {planned}: analyse for this run"
    with_slots = {len(chunks) for chunks in plan.graphs.slots}
    if with_slots != {facts.num_chunks}:
        yield f"{facts.num_chunks} model chunks on this rank, the plan has slots for {sorted(with_slots)}"
    yield from dynamic_cp.refusals(config, plan)
    if plan.graphs.no_grad == "replay":
        yield "graphs.no_grad is replay: Megatron's evaluation runs eagerly; set it to eager"


def _of_config(config: Any, impl: str, facts: Facts) -> Iterator[str]:
    wanted = "none" if impl == "chunk" else impl
    if config.cuda_graph_impl != wanted and impl != "module":
        yield f"cuda_graph_impl is {config.cuda_graph_impl!r}, graphs.impl {impl} needs {wanted!r}"
    for name, allowed, why in _UNSUPPORTED:
        value = getattr(config, name, None)
        if value and value != allowed:
            yield f"{name} is {value!r}: {why}; set it to {allowed!r}"
    if getattr(config, "multi_latent_attention", False):
        yield from _of_latent_attention(config, impl)
    elif facts.position_embedding in ("rope", "yarn") and not getattr(config, "apply_rope_fusion", True):
        yield "apply_rope_fusion is False: without it RoPE reads the boundaries on the host; set it to True"


def _of_latent_attention(config: Any, impl: str) -> Iterator[str]:
    """Multi-latent attention, whose layers make their rotary tables themselves."""
    rope = getattr(config, "rope_type", "yarn")
    if rope != "yarn":
        yield (
            f"rope_type is {rope!r}: with multi-latent attention only yarn's RoPE is fused, and an unfused one reads "
            "the boundaries on the host; set it to 'yarn', and apply_rope_fusion to True"
        )
    elif not getattr(config, "apply_rope_fusion", True):
        yield "apply_rope_fusion is False: without it RoPE reads the boundaries on the host; set it to True"
    if getattr(config, "cache_mla_latents", False):
        yield "cache_mla_latents is True: megatron-core refuses it in training; set it to False"
    variant = getattr(config, "experimental_attention_variant", None)
    if variant is not None:
        yield f"experimental_attention_variant is {variant!r}: it was not checked in a graph; set it to None"
    if impl == "local":
        yield (
            "multi_latent_attention is True: it was not checked in Megatron's own layer graphs; set graphs.impl to "
            "chunk or transformer_engine"
        )


def _of_shared_captures(config: Any, plan: Plan) -> Iterator[str]:
    """Ranks that see other micro-batches but communicate inside the decoder must capture at the same moment."""
    if plan.graphs.impl not in ("chunk", "transformer_engine"):
        return
    tensor = config.tensor_model_parallel_size
    routing = getattr(config, "moe_router_load_balancing_type", None) or ()
    shared = []
    experts_captured = "moe_router" not in plan.graphs.modules
    if experts_captured and getattr(config, "expert_model_parallel_size", 1) > 1:
        shared.append(f"expert_model_parallel_size is {config.expert_model_parallel_size}")
    if experts_captured and (getattr(config, "expert_tensor_parallel_size", None) or tensor) > tensor:
        shared.append(f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}")
    if "global_aux_loss" in ([routing] if isinstance(routing, str) else routing):
        shared.append("moe_router_load_balancing_type has global_aux_loss")
    if not shared:
        return
    if plan.graphs.capture != "startup":
        yield f"{shared[0]}: ranks with other micro-batches must capture together; set graphs.capture to startup"
    if not plan.microbatches.n_tokens_constant:
        yield (
            f"{shared[0]}: ranks capture at the first micro-batch of the captured size, and micro-batches differ in "
            "theirs; pad every micro-batch to one length and analyse again"
        )


_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("fp8", None, "scales are not kept across replays of packed graphs"),
    ("fp4", None, "scales are not kept across replays of packed graphs"),
    ("recompute_granularity", None, "graphs keep activations, and recomputing in them was not checked"),
    ("cpu_offloading", False, "megatron-core refuses it with graphs"),
    ("overlap_moe_expert_parallel_comm", False, "its schedule goes past the decoder's forward"),
    ("delay_wgrad_compute", False, "its weight gradients are not part of a backward pass"),
    ("quant_recipe", None, "cached quantized weights would not be renewed in replays"),
    ("use_kitchen", False, "cached quantized weights would not be renewed in replays"),
    ("moe_enable_routing_replay", False, "it keeps routing decisions in Python"),
    (
        "moe_paged_stash",
        False,
        "it needs moe_expert_rank_capacity_factor, which megatron-core takes with the flex dispatcher's hybridep "
        "(DeepEP's package) and ncclep (NCCL 2.30.4, torch 2.11 has 2.28.9) alone, neither of which was run; dropless "
        "experts run eagerly (graphs.modules)",
    ),
    ("qk_clip", False, "it keeps a maximum in Python"),
    ("log_max_attention_logit", False, "it keeps a maximum in Python"),
    ("tp_comm_overlap", False, "its buffers were not checked in a graph"),
)
"""Field, value to set, reason."""


def _of_transformer_engine(config: Any, plan: Plan) -> Iterator[str]:
    """What Transformer Engine's graphs of layers cannot serve."""
    planned = list(plan.graphs.modules)
    if plan.graphs.impl != "transformer_engine":
        if planned:
            yield (
                f"graphs.modules is {planned}: a part of a layer is captured by graphs.impl transformer_engine alone; "
                "set graphs.impl to it, or graphs.modules to []"
            )
        return
    modules = [getattr(module, "name", str(module)) for module in getattr(config, "cuda_graph_modules", None) or ()]
    if sorted(modules) != sorted(planned):
        what = f"the plan's graphs.modules is {planned}" if planned else "the plan captures whole layers"
        yield f"cuda_graph_modules is {modules}: {what}; set it to {planned}"
    if getattr(config, "cuda_graph_retain_backward_graph", False):
        yield (
            "cuda_graph_retain_backward_graph is True: a slot's memory is given back after its backward; set it to "
            "False"
        )


def _of_experts(config: Any, planned: Sequence[str]) -> Iterator[str]:
    """Experts that are padded to capacity are captured; dropless ones run eagerly behind their router's graph."""
    modules = sorted(planned)
    if not getattr(config, "num_moe_experts", None):
        if modules:
            yield f"graphs.modules is {modules}: the model has no experts; analyse with --experts none"
        return
    padded = config.moe_pad_expert_input_to_capacity
    if not padded and modules != ["attn", "moe_router"]:
        yield (
            "moe_pad_expert_input_to_capacity is False: dropless routing reads token counts on the host, so no layer "
            "is captured whole; analyse with --experts dropless (graphs.impl transformer_engine, graphs.modules attn "
            "and moe_router), or set it to True with a moe_expert_capacity_factor"
        )
    if padded and modules:
        yield (
            f"graphs.modules is {modules}: experts are padded to capacity, and their layers are captured whole; "
            "analyse with --experts padded"
        )
    allowed = ("alltoall",) if padded else ("alltoall", "allgather")
    if config.moe_token_dispatcher_type not in allowed:
        yield (
            f"moe_token_dispatcher_type is {config.moe_token_dispatcher_type!r}: it was not checked in a graph; set "
            f"it to {' or '.join(map(repr, allowed))}"
        )


def _of_local(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """What Megatron's own layer graphs cannot do with micro-batches that run eagerly at times."""
    if plan.graphs.impl != "local":
        return
    for name, allowed, why in _UNSUPPORTED_LOCAL:
        value = getattr(config, name, None)
        if value and value != allowed:
            yield f"{name} is {value!r}: {why}"
    shards = config.tensor_model_parallel_size
    if (experts := getattr(config, "expert_tensor_parallel_size", None) or shards) > shards:
        yield (
            f"expert_tensor_parallel_size is {experts}, tensor_model_parallel_size {shards}: ranks that share experts "
            "may record other buckets; set graphs.impl to chunk"
        )
    if modules := [getattr(m, "name", m) for m in getattr(config, "cuda_graph_modules", ())]:
        yield f"cuda_graph_modules is {modules}: only graphs of whole layers are led; set it to []"
    if getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None) == "block":
        yield "inference_cuda_graph_scope is 'block': layers have no graphs of their own then; set it to 'layer'"
    if not facts.wrapper:
        yield "the model is not wrapped: Megatron's graphs add to main_grad; wrap it in DistributedDataParallel"


_UNSUPPORTED_LOCAL: tuple[tuple[str, Any, str], ...] = (
    (
        "pipeline_model_parallel_size",
        1,
        "Megatron's layer graphs then take turns by micro-batch, and one that runs eagerly would let them overwrite "
        "each other; set graphs.impl to chunk",
    ),
    (
        "expert_model_parallel_size",
        1,
        "ranks that share experts may record other buckets, and making graphs communicates; set graphs.impl to chunk",
    ),
    (
        "mtp_num_layers",
        None,
        "the layers of multi-token prediction have graphs too, and take boundaries that are not padded; set "
        "graphs.impl to chunk",
    ),
    ("gtp_weight_remat_size", 1, "weights are gathered in the order of the graphs; set it to 1"),
)
"""Field, allowed value, reason and remedy."""


def _of_dynamic_mamba(plan: Plan, facts: Facts) -> Iterator[str]:
    if facts.has_mamba and dynamic_cp.is_dynamic(plan):
        yield (
            "the decoder has MambaLayers, which exchange tokens over groups of one size, and the plan is of dynamic "
            "context parallelism: analyse a run with one size"
        )


def _of_mamba(config: Any, facts: Facts) -> Iterator[str]:
    """What state-space layers want."""
    if facts.has_mamba and not getattr(config, "use_mamba_mem_eff_path", True):
        yield "use_mamba_mem_eff_path is False: Megatron's other path takes no packed input; set it to True"
    if facts.mamba_outside:
        yield (
            "multi-token prediction has MambaLayers, which run outside the decoder and get no seq_idx there, so that "
            "documents would mix; use attention and MLP layers in its pattern"
        )


def _of_run(facts: Facts, environment: Mapping[str, str]) -> Iterator[str]:
    if facts.position_embedding == "mrope":
        yield "position_embedding_type is 'mrope': its table differs between micro-batches; set it to 'rope'"
    if not facts.graph_safe_rng:
        yield (
            "the RNG tracker's states cannot be registered with a graph: call model_parallel_cuda_manual_seed(..., "
            "te_rng_tracker=True), or --te-rng-tracker"
        )
    if facts.foreign_hooks:
        named = ", ".join(facts.foreign_hooks[:3]) + (", ..." if len(facts.foreign_hooks) > 3 else "")
        yield f"modules with hooks, which a replay does not run: {named}; remove the hooks"
    if facts.foreign_layers:
        yield (
            f"the decoder has {', '.join(facts.foreign_layers)}: only attention, MLP, experts and MambaLayers were "
            "looked at in a graph; use those alone, or set graphs.impl to none and graphs.buckets to []"
        )
    if facts.wrapper not in ("", "DistributedDataParallel"):
        yield f"the model is wrapped in {facts.wrapper}, which moves parameters; use DistributedDataParallel"
    allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and environment.get("NCCL_GRAPH_REGISTER") != "0":
        yield "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: set NCCL_GRAPH_REGISTER=0, as Megatron asks"
