"""The settings of a recipe by name, the rows of benchmarks/results that prove them, and what recipes' models have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from thdprof.megatron_limits import Run
from thdprof.megatron_limits.known_fields import OF_EXPERTS, OUTSIDE, READ, REPLACED

_PARTS = {
    *("fp8", "fp8_recipe", "fp4", "fp4_recipe", "recompute_granularity", "recompute_method", "recompute_modules"),
    *("context_parallel_size", "cp_comm_type", "expert_model_parallel_size", "moe_router_load_balancing_type"),
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_pad_expert_input_to_capacity"),
    *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("hybrid_layer_pattern", "position_embedding_type", "offload_modules", "attention_dropout", "hidden_dropout"),
}
"""Fields whose settings are named together with other fields."""
_UNNAMED = OUTSIDE | _PARTS
_UNNAMED_PARTS = (*REPLACED, "freeze_", "dsa_")
"""Beginnings of further fields that are no settings."""
_OF_FP8 = {
    "fp8_param_gather",
    "fp8_dot_product_attention",
    "first_last_layers_bf16",
    "disable_parameter_transpose_cache",
}
"""Fields that mean nothing without FP8."""
_SIZES = {"moe_router_num_groups", "expert_tensor_parallel_size", "ddp.num_distributed_optimizer_instances"} | {
    f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline")
}
"""Numbers that are settings above 1."""
_USUAL = ("none", "vanilla", "softmax")
"""Values that are no settings: what has them is off, or as it is everywhere."""


def find_settings(run: Run, given: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[str]:
    """Names of the settings that a run uses; a name that no register knows is a setting that nobody looked at.

    Args:
        run: the run.
        given: fields of TransformerConfig that somebody has set, by name.
        trainer: settings of the trainer by dotted names.
    """
    found = [*_fields_by_name(run, given), *_parallelism(run, given), *_precision(given), *_experts(run, given)]
    found += [name for name in trainer if name in READ and _is_on(name, trainer[name])]
    pattern = given.get("hybrid_layer_pattern") or ""
    found += ["Mamba layers" + " with experts" * ("E" in pattern)] * ("M" in pattern)
    found += [f"layers of {kind}" for kind in run.layers or ()]
    found += [f"{run.model} model"] * (run.model is not None)
    found += [f"wrapper {run.wrapper}"] * (run.wrapper != "DistributedDataParallel")
    found += [f"offload_modules {module}" for module in run.offload_modules or ()]
    found += ["dropout"] * bool(given.get("attention_dropout") or given.get("hidden_dropout"))
    found += [f"peft {trainer['peft']}"] * bool(trainer["peft"])
    found += ["packed dataset of Megatron-Bridge"] * bool(trainer.get("dataset.enable_offline_packing"))
    return sorted({*found})


def _is_on(name: str, value: Any) -> bool:
    if name in _SIZES:
        return (value or 1) > 1
    is_empty = isinstance(value, Iterable) and not isinstance(value, str) and not list(value)
    return not is_empty and value not in (None, False, *_USUAL)


def _fields_by_name(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are settings of their own."""
    for name, value in given.items():
        is_idle = run.experts == "none" and name.startswith(OF_EXPERTS)
        is_idle |= (name in _OF_FP8 and not given.get("fp8")) or (name == "fp4_param_gather" and not given.get("fp4"))
        if name in _UNNAMED or name.startswith(_UNNAMED_PARTS) or is_idle or not _is_on(name, value):
            continue
        if name == "quant_recipe" and isinstance(value, str):
            yield f"{name}, of a file that is not read"
        elif name not in READ:
            yield f"{name} {value!r}"
        else:
            yield f"{name} {value}" if isinstance(value, str) else name


def _parallelism(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    if (run.context_parallel_size or 1) > 1:
        kinds = given.get("cp_comm_type") or "p2p"
        yield from (f"context_parallel_size {kind}" for kind in ([kinds] if isinstance(kinds, str) else kinds))
    layouts = [name for name in _PARTS if "_pipeline_stage" in name or name.endswith("_layout")]
    layouts += ["account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"]
    if (run.pipeline_parallel_size or 1) > 1 and any(map(given.get, layouts)):
        yield "pipeline_model_parallel_layout"


def _precision(given: Mapping[str, Any]) -> Iterator[str]:
    """Quantization and recomputation."""
    yield from (f"{kind}_recipe {given.get(f'{kind}_recipe')}" for kind in ("fp8", "fp4") if given.get(kind))
    granularity = given.get("recompute_granularity")
    if granularity == "full":
        yield f"recompute_granularity full, {given.get('recompute_method')}"
    elif granularity:
        yield from (f"recompute_modules {module}" for module in given.get("recompute_modules") or ("core_attn",))


def _experts(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    if run.experts == "none":
        return
    dispatcher = given.get("moe_token_dispatcher_type") or "alltoall"
    backend = f" {given.get('moe_flex_dispatcher_backend') or 'deepep'}" if dispatcher == "flex" else ""
    yield f"{run.experts} experts, {dispatcher}{backend}"
    if (given.get("expert_model_parallel_size") or 1) > 1:
        yield f"expert_model_parallel_size, {run.experts}"
    balancing = given.get("moe_router_load_balancing_type")
    for kind in [balancing] if isinstance(balancing, str) else balancing or ():
        if kind not in _USUAL:
            yield f"moe_router_load_balancing_type {kind}"


_ROWS = """
DeepSeek-V3, PP 2 by a layout | moe_router_force_load_balancing; moe_router_enable_expert_bias
DeepSeek-V3, PP 2 by a layout | pipeline_model_parallel_layout; recompute_modules mla_up_proj
gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm | add_bias_linear; window_size
gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm | recompute_modules moe_act
gpt-oss, learnable softmax, biases, windows, recompute moe_act and layernorm | softmax_type learnable
EP 2 | expert_model_parallel_size, padded; moe_grouped_gemm; moe_router_load_balancing_type aux_loss
dropless, group-limited routing, expert bias, seq_aux_loss | moe_router_num_groups; moe_router_score_function sigmoid
dropless, group-limited routing, expert bias, seq_aux_loss | moe_router_load_balancing_type seq_aux_loss
Qwen3-Next, gated delta nets, global_aux_loss | attention_output_gate; layers of gated_delta_net
Qwen3-Next, gated delta nets, global_aux_loss | moe_router_load_balancing_type global_aux_loss
DP 2, distributed optimizer, both overlaps | ddp.use_distributed_optimizer; ddp.overlap_grad_reduce
DP 2, distributed optimizer, both overlaps | ddp.overlap_param_gather
DP 2, two instances of the distributed optimizer | ddp.num_distributed_optimizer_instances
TP 2, sequence parallel | tensor_model_parallel_size; sequence_parallel
Qwen3-30B-A3B, forced load balancing | qk_layernorm; moe_permute_fusion
FP8 current, PP 2 by a layout, output layer's weight gradients deferred, no cache of transposes |
    defer_embedding_wgrad_compute; disable_parameter_transpose_cache
Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed, FP8 current in FP8 |
    overlap_moe_expert_parallel_comm; delay_wgrad_compute
dropless, one GPU, recompute moe and layernorm, shared experts, dropout | recompute_modules moe
dropless, one GPU, recompute moe and layernorm, shared experts, dropout | moe_shared_expert_intermediate_size
PP 2 | pipeline_model_parallel_size
PP 2, VPP 2, --sft | virtual_pipeline_model_parallel_size
CP 2 | context_parallel_size p2p
CP 2, all to all | context_parallel_size a2a
CP 2, all gather | context_parallel_size all_gather
one GPU, experts padded to capacity | padded experts, alltoall
dropless, one GPU | dropless experts, alltoall
dropless, EP 2 | expert_model_parallel_size, dropless
Qwen3-30B-A3B, EP 2, HybridEP, forced load balancing | dropless experts, flex hybridep
dropless, EP 2, dropout, shared experts overlapped | moe_shared_expert_overlap
dropless, one GPU, permute and router fusion | moe_router_fusion
TP 2, user buffers, dropout | tp_comm_overlap
one GPU, multi-token prediction | mtp_num_layers
one GPU, latent attention | multi_latent_attention
one GPU, dropout | dropout
one GPU, FP8 current | fp8_recipe tensorwise
one GPU, FP8 delayed, dropout | fp8_recipe delayed
one GPU, FP8 blockwise | fp8_recipe blockwise
one GPU, FP8 current, --fp8-param-gather | fp8_param_gather
one GPU, FP8 by the names of modules | quant_recipe
TP 2, sequence parallel, FP8 current, recompute full uniform | recompute_granularity full, uniform
recompute full block, dropout | recompute_granularity full, block
recompute core_attn, dropout | recompute_modules core_attn
recompute mlp and layernorm, dropout | recompute_modules mlp; recompute_modules layernorm
LoRA, TP 2, sequence parallel, dropout | peft LoRA
DoRA, dropout | peft DoRA
canonical LoRA | peft CanonicalLoRA
pretrain_hybrid.py, Mamba, attention, experts | Mamba layers with experts
pretrain_hybrid.py, Mamba and attention, dropout | Mamba layers
hybridep.md: experts padded to capacity, up to the router (`hybrid_ep_padded`) | padded experts, flex hybridep
settings.md: FP8 current, parameters in FP8, dropless experts, first layer in bf16 | first_last_layers_bf16
vision.md: Qwen3-VL, whole chunk | vision-language model
bridge.md: replayed, padded eager (`replay=False`) | packed dataset of Megatron-Bridge
megatron-beyond-gpt.md: exact-offload | fine_grained_activation_offloading; offload_modules core_attn
megatron-beyond-gpt.md: exact-offload | offload_modules attn_proj
"""
"""A row of benchmarks/results, in trainer-rows.md unless a file is named, and the settings that it proves."""
_MODELS = """
meta-llama/ |
Qwen/Qwen3-VL | @EXPERTS @QWEN3 @PICTURES
Qwen/Qwen3.5 | @EXPERTS @QWEN3 @PICTURES @DELTA_NETS
Qwen/Qwen3-Next | @EXPERTS @QWEN3 @DELTA_NETS moe_router_load_balancing_type=global_aux_loss
Qwen/Qwen3-30B | @EXPERTS @QWEN3
Qwen/Qwen3-235B | @EXPERTS @QWEN3
deepseek-ai/DeepSeek-V3 | @EXPERTS @LATENT @SIGMOID moe_router_num_groups=8 moe_router_group_topk=4 mtp_num_layers=1
deepseek-ai/DeepSeek-V4 | @EXPERTS @LATENT experimental_attention_variant=dsv4_hybrid enable_hyper_connections
moonshotai/Kimi-K2 | @EXPERTS @LATENT @SIGMOID
zai-org/GLM-5 | @EXPERTS @LATENT @SIGMOID experimental_attention_variant=dsa
openai/gpt-oss | @EXPERTS position_embedding_type=yarn add_bias_linear softmax_type=learnable window_size
nvidia/NVIDIA-Nemotron-3 | @EXPERTS @BIAS moe_latent_size=1024 moe_shared_expert_intermediate_size=5376
    hybrid_layer_pattern=MEM* mtp_num_layers=2 position_embedding_type=none
HybridModelProvider | moe_grouped_gemm moe_permute_fusion position_embedding_type=none
WanModelProvider | kind=diffusion
@EXPERTS | num_moe_experts=128 moe_grouped_gemm moe_permute_fusion
@QWEN3 | qk_layernorm moe_router_load_balancing_type=aux_loss
@PICTURES | kind=vision-language position_embedding_type=mrope
@DELTA_NETS | layers=gated_delta_net attention_output_gate moe_shared_expert_intermediate_size=512
@BIAS | moe_router_enable_expert_bias moe_router_load_balancing_type=seq_aux_loss
@LATENT | @BIAS multi_latent_attention moe_shared_expert_intermediate_size=2048
@SIGMOID | moe_router_score_function=sigmoid
"""
"""Fields of TransformerConfig by the beginning of a model's name, or by the class of its provider, as Bridge 0.6.2 sets
them from a config.json that is not downloaded here. `kind` and `layers` are those of `Run`. A word with @ stands for
the fields of its own line.
"""


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """What stands before and behind the bar of each line; an indented line goes on with the one before it."""
    for line in text.replace("\n   ", "").strip().splitlines():
        name, _, words = line.partition(" |")
        yield name, words.strip()


PROVED = {
    setting: (row if ".md: " in row else f"trainer-rows.md: {row}",)
    for row, settings in _lines(_ROWS)
    for setting in settings.split("; ")
}
"""Rows of benchmarks/results by the name of the setting, as `find_settings` gives it, that they prove."""


def find_architecture(name: str | None, provider: str) -> dict[str, Any] | None:
    """The fields of a model, or None where neither its name nor its provider is known.

    Args:
        name: the model's name on the Hugging Face Hub; None where the recipe gives the architecture itself.
        provider: name of the class that holds the model's settings.
    """
    models = dict(_lines(_MODELS))
    fitting = [known for known in models if (name or provider).startswith(known)]
    return _fields_of(max(fitting, key=len), models) if fitting else None


def _fields_of(name: str, models: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in models[name].split():
        field, _, value = word.partition("=")
        if word.startswith("@"):
            fields |= _fields_of(word, models)
        else:
            fields[field] = (value,) if field == "layers" else int(value) if value.isdigit() else value or True
    return fields
