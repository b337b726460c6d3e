"""The settings of a recipe by name, and the register of the GPU rows of benchmarks/results that prove each of them.

A row is named by its file and its name there. A setting without one is accepted where no limit refuses it, but nothing
was measured of it. Whoever runs a row names it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from thdprof.megatron_limits import Run
from thdprof.megatron_limits.known_fields import OF_EXPERTS, OUTSIDE, READ, REPLACED

COMMUNICATION = (
    "tp_comm_overlap",
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)
"""Fields of the model that Bridge's CommOverlapConfig sets."""
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Numbers of ranks or chunks, which are settings above 1."""
_SWITCHES = (
    "sequence_parallel",
    "tp_comm_overlap",
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "multi_latent_attention",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_output_gate",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "moe_router_fusion",
    "moe_permute_fusion",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_router_padding_for_quantization",
    "moe_paged_stash",
    "fine_grained_activation_offloading",
    "use_transformer_engine_op_fuser",
    "cpu_offloading",
    "qk_clip",
    "enable_hyper_connections",
    "mtp_use_repeated_layer",
)
"""Fields that are settings by being on."""
_VALUES = (
    "recompute_granularity",
    "recompute_method",
    "softmax_type",
    "experimental_attention_variant",
    "moe_router_score_function",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
)
"""Fields whose value is the setting."""
_FP8_SWITCHES = (
    "fp8_param_gather",
    "fp8_dot_product_attention",
    "first_last_layers_bf16",
    "disable_parameter_transpose_cache",
)
_PRESENT = ("mtp_num_layers", "moe_shared_expert_intermediate_size", "moe_latent_size", "window_size", "quant_recipe")
"""Fields that are settings where they have a value."""
_OF_DDP = ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "ddp.use_distributed_optimizer", "ddp.nccl_ub")
_INSTANCES = "ddp.num_distributed_optimizer_instances"
_OFF = {"moe_router_load_balancing_type": ("none",), "softmax_type": ("vanilla",)}
_DEFAULTS = {"moe_router_score_function": ("softmax",)}


def find_settings(run: Run, given: Mapping[str, Any], trainer: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings that a run uses; a name that no register knows is a setting that nobody looked at.

    Args:
        run: the run, with its config.
        given: fields of TransformerConfig that somebody has set, by name.
        trainer: settings of the trainer by dotted names.
    """
    found = [*_of_parallelism(run), *_of_fields(run), *_of_precision(run), *_of_recompute(run)]
    found += [*_of_experts(run), *_of_layers(run), *_of_trainer(trainer), *_of_others(run, given)]
    return tuple(dict.fromkeys(found))


def _of_parallelism(run: Run) -> Iterator[str]:
    yield from (name for name in _SIZES if (run.field(name) or 1) > 1)
    if (run.context_parallel_size or 1) > 1:
        kinds = run.field("cp_comm_type") or "p2p"
        yield from (f"context_parallel_size {kind}" for kind in ([kinds] if isinstance(kinds, str) else kinds))
    if (run.pipeline_parallel_size or 1) > 1 and _uneven(run):
        yield "pipeline_model_parallel_layout"


def _uneven(run: Run) -> bool:
    names = ("layout", "first", "last")
    fields = ("pipeline_model_parallel_layout", *(f"num_layers_in_{name}_pipeline_stage" for name in names[1:]))
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return any(run.field(name) for name in (*fields, *counted))


def _of_fields(run: Run) -> Iterator[str]:
    dense = run.experts == "none"
    for name in _SWITCHES:
        if run.field(name) and not (dense and name.startswith(OF_EXPERTS)):
            yield name
    for name in _VALUES:
        value = run.field(name)
        inert = dense and name.startswith(OF_EXPERTS)
        if value is None or inert or name.startswith(("moe_token", "moe_flex", "recompute")):
            continue
        if value not in (*_OFF.get(name, ()), *_DEFAULTS.get(name, ())):
            yield f"{name} {value}"
    for name in _PRESENT:
        value = run.field(name)
        if value and not (dense and name.startswith(OF_EXPERTS)):
            yield f"{name}, of a file that is not read" if isinstance(value, str) else name


def _of_precision(run: Run) -> Iterator[str]:
    if run.field("fp8"):
        yield f"fp8_recipe {run.field('fp8_recipe')}"
        yield from (name for name in _FP8_SWITCHES if run.field(name))
    if run.field("fp4"):
        yield f"fp4_recipe {run.field('fp4_recipe')}"
        if run.field("fp4_param_gather"):
            yield "fp4_param_gather"


def _of_recompute(run: Run) -> Iterator[str]:
    granularity = run.field("recompute_granularity")
    if granularity == "full":
        yield f"recompute_granularity full, {run.field('recompute_method')}"
    elif granularity:
        for module in run.field("recompute_modules") or ("core_attn",):
            yield f"recompute_modules {module}"


def _of_experts(run: Run) -> Iterator[str]:
    if run.experts in (None, "none"):
        return
    kind = "padded" if run.experts == "padded" else "dropless"
    dispatcher = run.field("moe_token_dispatcher_type") or "alltoall"
    backend = f" {run.field('moe_flex_dispatcher_backend') or 'deepep'}" if dispatcher == "flex" else ""
    yield f"{kind} experts, {dispatcher}{backend}"
    if (run.field("expert_model_parallel_size") or 1) > 1:
        yield f"expert_model_parallel_size, {kind}"
    balancing = run.field("moe_router_load_balancing_type")
    for one in [balancing] if isinstance(balancing, str) else balancing or ():
        if one not in _OFF["moe_router_load_balancing_type"]:
            yield f"moe_router_load_balancing_type {one}"
    if (run.field("moe_router_num_groups") or 1) > 1:
        yield "moe_router_num_groups"


def _of_layers(run: Run) -> Iterator[str]:
    pattern = run.field("hybrid_layer_pattern") or ""
    if "M" in pattern:
        yield "Mamba layers with experts" if "E" in pattern else "Mamba layers"
    yield from (f"layers of {kind}" for kind in run.layers or ())
    if run.model is not None:
        yield f"{run.model} model"
    if run.wrapper not in (None, "", "DistributedDataParallel"):
        yield f"wrapper {run.wrapper}"
    for module in run.offload_modules or ():
        yield f"offload_modules {module}"
    if any(run.field(name) for name in ("attention_dropout", "hidden_dropout")):
        yield "dropout"


def _of_trainer(trainer: Mapping[str, Any]) -> Iterator[str]:
    if trainer.get("peft"):
        yield f"peft {trainer['peft']}"
    if trainer.get("dataset.enable_offline_packing"):
        yield "packed dataset of Megatron-Bridge"
    yield from (name for name in _OF_DDP if trainer.get(name))
    if (trainer.get(_INSTANCES) or 1) > 1:
        yield _INSTANCES


def _of_others(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are on and that none of the names above is made of."""
    for name, value in given.items():
        if name in READ or name in OUTSIDE or name.startswith((*REPLACED, "freeze_", "dsa_")):
            continue
        if run.experts == "none" and name.startswith(OF_EXPERTS):
            continue
        if value is None or value is False or (_is_empty(value)):
            continue
        yield f"{name} {value!r}"


def _is_empty(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and not list(value)


_OWN_LOOP, _BEYOND, _BRIDGE = "megatron.md", "megatron-beyond-gpt.md", "bridge.md"
_ROWS = "trainer-rows.md"
_COMMUNICATION, _EXPERTS, _HYBRID_EP = "communication.md", "experts.md", "hybridep.md"
_SETTINGS, _VISION = "settings.md", "vision.md"
_DEFERRED = f"{_ROWS}: FP8 current, PP 2 by a layout, output layer's weight gradients deferred, no cache of transposes"

_DEEPSEEK = f"{_ROWS}: DeepSeek-V3, PP 2 by a layout"
_QWEN3 = f"{_ROWS}: Qwen3-30B-A3B, forced load balancing"
_GPT_OSS = f"{_ROWS}: gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm"
_OVERLAPPED = f"{_ROWS}: Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed, FP8 current in FP8"
_QWEN3_NEXT = f"{_ROWS}: Qwen3-Next, gated delta nets, global_aux_loss"
_BIASED = f"{_ROWS}: dropless, group-limited routing, expert bias, seq_aux_loss"

PROVED: Mapping[str, tuple[str, ...]] = {
    "tensor_model_parallel_size": (f"{_ROWS}: TP 2, sequence parallel", f"{_ROWS}: TP 2, --sft"),
    "sequence_parallel": (f"{_ROWS}: TP 2, sequence parallel", f"{_ROWS}: TP 2, sequence parallel, dropout"),
    "pipeline_model_parallel_size": (f"{_ROWS}: PP 2", f"{_ROWS}: PP 2, dropout"),
    "virtual_pipeline_model_parallel_size": (f"{_ROWS}: PP 2, VPP 2, --sft", f"{_OWN_LOOP}: exact-pp2-vpp2-dp2"),
    "context_parallel_size p2p": (f"{_ROWS}: CP 2", f"{_ROWS}: CP 2, --sft"),
    "padded experts, alltoall": (f"{_ROWS}: one GPU, experts padded to capacity", f"{_OWN_LOOP}: exact-moe"),
    "dropless experts, flex hybridep": (
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, forced load balancing",
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, FP8 current, parameters in FP8",
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, communication overlapped",
    ),
    "padded experts, flex hybridep": (
        f"{_HYBRID_EP}: experts padded to capacity, up to the router (`hybrid_ep_padded`)",
    ),
    "dropless experts, alltoall": (f"{_ROWS}: dropless, one GPU", f"{_BEYOND}: exact-moe-dropless"),
    "expert_model_parallel_size, padded": (f"{_ROWS}: EP 2", f"{_OWN_LOOP}: exact-pp2-ep2-moe"),
    "expert_model_parallel_size, dropless": (
        f"{_ROWS}: dropless, EP 2",
        f"{_ROWS}: EP 2, dropless, FP8 current, parameters in FP8",
    ),
    "moe_router_force_load_balancing": (_QWEN3, _DEEPSEEK),
    "moe_router_enable_expert_bias": (_BIASED, _DEEPSEEK),
    "moe_shared_expert_overlap": (
        f"{_ROWS}: dropless, EP 2, dropout, shared experts overlapped",
        f"{_ROWS}: DeepSeek-V3, EP 2, FP8 blockwise",
    ),
    "pipeline_model_parallel_layout": (_DEEPSEEK, _DEFERRED, f"{_ROWS}: PP 2, uneven layers, multi-token prediction"),
    "recompute_modules mla_up_proj": (_DEEPSEEK,),
    "add_bias_linear": (_GPT_OSS,),
    "window_size": (_GPT_OSS,),
    "softmax_type learnable": (
        f"{_ROWS}: gpt-oss, learnable softmax, biases, windows, recompute moe_act and layernorm",
    ),
    "overlap_moe_expert_parallel_comm": (
        _OVERLAPPED,
        f"{_ROWS}: dropless, EP 2, overlapped communication",
    ),
    "delay_wgrad_compute": (
        _OVERLAPPED,
        f"{_ROWS}: dropless, EP 2, overlapped communication, delayed weight gradients",
    ),
    "recompute_modules moe": (
        f"{_ROWS}: dropless, one GPU, recompute moe and layernorm, shared experts, dropout",
        f"{_ROWS}: one GPU, experts, recompute moe",
    ),
    "moe_shared_expert_intermediate_size": (
        f"{_ROWS}: dropless, one GPU, recompute moe and layernorm, shared experts, dropout",
    ),
    "qk_layernorm": (_QWEN3,),
    "moe_router_num_groups": (
        _BIASED,
        f"{_EXPERTS}: experts padded to capacity, group-limited routing, expert bias, `seq_aux_loss`",
    ),
    "moe_router_load_balancing_type seq_aux_loss": (
        _BIASED,
        f"{_EXPERTS}: experts padded to capacity, group-limited routing, expert bias, `seq_aux_loss`",
    ),
    "tp_comm_overlap": (
        f"{_ROWS}: TP 2, user buffers, dropout",
        f"{_COMMUNICATION}: TP 2, sequence parallel, user buffers",
    ),
    "moe_grouped_gemm": (f"{_ROWS}: EP 2",),
    "moe_router_load_balancing_type aux_loss": (f"{_ROWS}: EP 2",),
    "moe_router_score_function sigmoid": (_BIASED, f"{_ROWS}: one GPU, experts, expert bias"),
    "moe_permute_fusion": (f"{_ROWS}: dropless, one GPU, permute and router fusion", _QWEN3),
    "moe_router_fusion": (f"{_ROWS}: dropless, one GPU, permute and router fusion",),
    "mtp_num_layers": (f"{_ROWS}: one GPU, multi-token prediction", f"{_ROWS}: dropless, EP 2, multi-token prediction"),
    "fp8_recipe tensorwise": (
        f"{_ROWS}: one GPU, FP8 current",
        f"{_ROWS}: one GPU, layer graphs, FP8 current, --fp8-param-gather, dropout",
    ),
    "fp8_recipe delayed": (
        f"{_ROWS}: one GPU, FP8 delayed, dropout",
        f"{_SETTINGS}: FP8 delayed, parameters gathered in FP8",
    ),
    "fp8_recipe blockwise": (
        f"{_ROWS}: one GPU, FP8 blockwise",
        f"{_ROWS}: dropless, DP 2, FP8 blockwise, --fp8-param-gather, both overlaps",
    ),
    "fp8_param_gather": (
        f"{_ROWS}: one GPU, FP8 current, --fp8-param-gather",
        f"{_ROWS}: dropless, EP 2, FP8 current, --fp8-param-gather, both overlaps",
    ),
    "first_last_layers_bf16": (f"{_SETTINGS}: FP8 current, parameters in FP8, dropless experts, first layer in bf16",),
    "defer_embedding_wgrad_compute": (_DEFERRED,),
    "disable_parameter_transpose_cache": (
        _DEFERRED,
        f"{_SETTINGS}: FP8 current, nothing kept (`disable_parameter_transpose_cache`), layer graphs",
    ),
    "quant_recipe": (
        f"{_ROWS}: one GPU, FP8 by the names of modules",
        f"{_ROWS}: dropless, one GPU, FP8 by the names of modules",
    ),
    "recompute_granularity full, uniform": (
        f"{_ROWS}: TP 2, sequence parallel, FP8 current, recompute full uniform",
        f"{_ROWS}: recompute full uniform, dropout",
    ),
    "recompute_granularity full, block": (f"{_ROWS}: recompute full block, dropout",),
    "recompute_modules core_attn": (f"{_ROWS}: recompute core_attn, dropout",),
    "recompute_modules mlp": (f"{_ROWS}: recompute mlp and layernorm, dropout",),
    "recompute_modules moe_act": (f"{_ROWS}: one GPU, experts, recompute moe_act and layernorm", _GPT_OSS),
    "recompute_modules layernorm": (f"{_ROWS}: recompute mlp and layernorm, dropout", _GPT_OSS),
    "peft LoRA": (f"{_ROWS}: LoRA, TP 2, sequence parallel, dropout", f"{_SETTINGS}: LoRA, CP 2"),
    "peft DoRA": (f"{_ROWS}: DoRA, dropout",),
    "peft CanonicalLoRA": (f"{_ROWS}: canonical LoRA",),
    "multi_latent_attention": (f"{_ROWS}: one GPU, latent attention", f"{_BEYOND}: exact-mla"),
    "attention_output_gate": (_QWEN3_NEXT, f"{_ROWS}: Qwen3-Next, EP 2, FP8 current in FP8"),
    "layers of gated_delta_net": (_QWEN3_NEXT, f"{_ROWS}: Qwen3-Next, EP 2, FP8 current in FP8"),
    "moe_router_load_balancing_type global_aux_loss": (
        _QWEN3_NEXT,
        f"{_ROWS}: dropless, EP 2, global_aux_loss, z-loss",
    ),
    "Mamba layers with experts": (f"{_ROWS}: pretrain_hybrid.py, Mamba, attention, experts",),
    "Mamba layers": (f"{_ROWS}: pretrain_hybrid.py, Mamba and attention, dropout", f"{_BEYOND}: exact-mamba"),
    "dropout": (f"{_ROWS}: one GPU, dropout",),
    "ddp.use_distributed_optimizer": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_grad_reduce": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_param_gather": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.num_distributed_optimizer_instances": (f"{_ROWS}: DP 2, two instances of the distributed optimizer",),
    "context_parallel_size a2a": (f"{_ROWS}: CP 2, all to all",),
    "context_parallel_size all_gather": (f"{_ROWS}: CP 2, all gather", f"{_ROWS}: CP 2, all gather, --sft"),
    "vision-language model": (
        f"{_VISION}: Qwen3-VL, whole chunk",
        f"{_VISION}: Qwen3-VL, dropless experts, layers up to the router",
    ),
    "packed dataset of Megatron-Bridge": (f"{_BRIDGE}: replayed, padded eager (`replay=False`)",),
    "fine_grained_activation_offloading": (f"{_BEYOND}: exact-offload",),
    "offload_modules core_attn": (f"{_BEYOND}: exact-offload",),
    "offload_modules attn_proj": (f"{_BEYOND}: exact-offload",),
}
"""Rows by the name of a setting, as `find_settings` gives it."""
