"""What of a model cannot be trained by a plan, found before the first step: a sentence for each reason.

What its arguments and its type alone show stands in `thdprof.megatron_limits.trainer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from thdprof.compare.fit import describe, misfits
from thdprof.megatron_limits.trainer import FAMILIES, WITH_EXPERTS, refuse_experts, refuse_model_type
from thdprof.plan import Plan
from thdprof.runtime.graphs.module_state import describe_hooked_modules, find_hooked_modules, find_hooked_parameters
from thdprof.training import find_defaults, find_unread_fields
from thdprof.training.trainer_arguments import READ_ARGUMENTS, TRAINER_ARGUMENTS, trainer_settings
from thdprof.transformers.attention import SOFTCAPPED, Backend
from thdprof.transformers.decoder import OUTPUT_HOOKS

_READ = """
architectures attention_bias attention_dropout attn_logit_softcapping base_model_tp_plan bos_token_id
cache_implementation clip_qkv decoder_sparse_step dtype eos_token_id final_logit_softcapping head_dim hidden_act
hidden_activation hidden_size id2label initializer_range intermediate_size is_causal label2id layer_types
max_position_embeddings max_window_layers mlp_bias mlp_only_layers moe_intermediate_size norm_topk_prob
num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
output_attentions output_hidden_states output_router_logits pad_token_id quantization_config query_pre_attn_scalar
rms_norm_eps rope_parameters router_aux_loss_coef router_jitter_noise sliding_window tie_word_embeddings
transformers_version use_bidirectional_attention use_cache use_mrope use_sliding_window vocab_size
"""
_READ_CONFIG: frozenset[str] = frozenset(_READ.split())
"""Fields of these families' configs that thdprof reads, or that layers were checked with in graphs."""


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The module of a family whose `layers` its forward loops over; None where `model` holds none or several."""
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and getattr(getattr(module, "config", None), "model_type", None) in FAMILIES
    ]
    return found[0] if len(found) == 1 else None


def find_weights_dtype(model: nn.Module) -> str | None:
    """The dtype of the weights that layers compute with, such as "float32"; None where no decoder is found.

    Adapters have a dtype of their own: of several dtypes the shortest counts.
    """
    dtypes = {p.dtype for p in (decoder_of(model) or nn.Module()).parameters() if p.is_floating_point()}
    return str(min(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.") if dtypes else None


def refuse_model(model: nn.Module, *, backend: Backend | None, own_attention: bool, on_gpu: bool) -> Iterator[str]:
    """What the model does that a graph cannot follow.

    Args:
        backend: the package whose attention kernels are used; None: there is none.
        own_attention: whether the model keeps the attention that the user has chosen.
    """
    decoder = decoder_of(model)
    if decoder is None:
        yield from refuse_model_type(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        return
    config: Any = decoder.config
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        yield "the model is quantized: its layers were not checked in graphs; load it in bfloat16"
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        yield "the config asks for output_hidden_states or output_attentions, which a graph does not return"
    yield from _refuse_layers(decoder)
    yield from _refuse_adapters(model)
    if config.model_type in WITH_EXPERTS:
        yield from _refuse_experts(decoder, on_gpu=on_gpu)
    dropout = _dropout(decoder)
    checkpointed = [module for module in decoder.modules() if getattr(module, "gradient_checkpointing", False)]
    if config.model_type in WITH_EXPERTS and any(checkpoints_itself(module) for module in checkpointed):
        yield (
            "gradient checkpointing of layers with experts in this transformers, which loses their router logits: "
            "install transformers 5.17, or set gradient_checkpointing to False"
        )
    if dropout and checkpointed:
        yield (
            f"gradient checkpointing together with dropout ({dropout}): a graph cannot recompute with the same random "
            "numbers; set the dropout to 0, or gradient_checkpointing to False"
        )
    if own_attention or not on_gpu:
        return
    if backend is None:
        yield (
            "no variable-length attention is installed: install torch 2.10 or later, flash-attn or Transformer Engine"
        )
        return
    rate = _set_in(decoder, "attention_dropout")
    if backend != "flash_attn" and rate:
        yield f"attention_dropout {rate}: the attention of {backend} has none; set it to 0.0"
    softcap = _set_in(decoder, "attn_logit_softcapping")
    if backend not in SOFTCAPPED and softcap:
        yield (
            f"attn_logit_softcapping {softcap} (Gemma 2): the attention of {backend} cannot; install flash-attn, or "
            "set it to None in the config"
        )


def _set_in(decoder: nn.Module, name: str) -> float | None:
    """The value of `name` in the config, else in the first layer that has one; None where it is 0 or None in all."""
    values = (getattr(home, name, None) for home in (decoder.config, *decoder.modules()))
    return next((value for value in values if isinstance(value, int | float) and value), None)


def _refuse_layers(decoder: nn.Module) -> Iterator[str]:
    """Attention to later tokens, as the config or a layer requires it, and hooks on the layers and their parameters."""
    config: Any = decoder.config
    asking = [f"{name}.is_causal" for name, part in decoder.named_modules() if not getattr(part, "is_causal", True)]
    if not getattr(config, "is_causal", True):
        asking.insert(0, "config.is_causal")
    found = f"{asking[0]} is False" if asking else ""
    if getattr(config, "use_bidirectional_attention", None):
        found = f"config.use_bidirectional_attention is {config.use_bidirectional_attention!r}"
    if found:
        yield (
            f"{found}: tokens would attend to later ones, where the plan's graphs are causal within documents; use a "
            "causal model, or train without PlanCallback"
        )
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    if hooked := [*find_hooked_modules(layers, known=(OUTPUT_HOOKS,), name="layers")]:
        yield describe_hooked_modules(hooked)
    parameter = next(find_hooked_parameters(layers, name="layers"), None)
    if parameter is not None:
        yield f"{parameter} has a gradient hook, which a replay cannot run; use register_post_accumulate_grad_hook"


def _refuse_experts(decoder: nn.Module, *, on_gpu: bool) -> Iterator[str]:
    """Experts whose products read on the host, which on a processor is no harm."""
    dtypes = {p.dtype for name, p in decoder.named_parameters() if ".experts." in name and p.dim() == 3}  # no adapters
    yield from refuse_experts(
        getattr(decoder.config, "_experts_implementation", None),
        weights_dtype=str(max(dtypes, key=lambda dtype: dtype != torch.bfloat16)).removeprefix("torch.")
        if on_gpu and dtypes
        else None,
        groups_products=torch.cuda.get_device_capability()[0] == 9 if torch.cuda.is_available() else None,
    )


def _refuse_adapters(model: nn.Module) -> Iterator[str]:
    """Adapters of peft that add tokens, or whose layers read each micro-batch's text by hooks."""
    configs = [c for part in model.modules() if isinstance(c := getattr(part, "peft_config", None), Mapping)]
    for adapter in {id(one): one for config in configs for one in config.values()}.values():
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if getattr(adapter, "is_prompt_learning", False):
            yield f"peft_type {kind}: virtual tokens shift the documents' boundaries; use adapters of layers, as LoRA"
        if getattr(adapter, "alora_invocation_tokens", None):
            yield f"alora_invocation_tokens of {kind}: hooks switch it on by the text; a graph cannot; set it to None"
        if names := getattr(adapter, "target_parameters", None):
            yield (
                f"target_parameters of {kind} ({', '.join(sorted(names))}): adapters of experts and routers were not "
                "checked in graphs; set target_modules to [q_proj, k_proj, v_proj, o_proj], since peft's all-linear "
                "takes experts too"
            )


def unread_settings(args: Any, arguments: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Settings that are off their default and that thdprof has never looked at, as `name=value`."""
    config: Any = getattr(decoder_of(model), "config", None)
    values = getattr(config, "__dict__", {})
    return [
        *find_unread_fields(arguments, find_defaults(type(args)), READ_ARGUMENTS),
        *(f"config.{field}" for field in find_unread_fields(values, find_defaults(type(config)), _READ_CONFIG)),
    ]


def refuse_compiling(*, backend: Backend | None, own_attention: bool) -> Iterator[str]:
    """Why layers with this attention cannot be compiled; the arguments are those of `refuse_model`."""
    if own_attention or backend not in ("torch", None):
        whose = "the model" if own_attention else backend
        yield f"compile=True with the attention of {whose}: layers compile with torch's alone; give attention='torch'"


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether the class's own forward makes the checkpoint, as in transformers 5.24, and not its call."""
    return type(module).forward.__code__.co_name == "forward_with_checkpointing"


def _dropout(decoder: nn.Module) -> str:
    """The first dropout inside the layers that drops something; "" where there is none."""
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    for name, module in layers.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"{name}, p {module.p}"
    names = ("attention_dropout", "router_jitter_noise")
    return next((f"{name} {rate}" for name in names if (rate := _set_in(decoder, name))), "")


def compare_settings(plan: Plan, arguments: Mapping[str, Any], num_processes: int) -> tuple[list[str], list[str]]:
    """How the run differs from the one that the plan was made for: what refuses it, and what makes predictions untrue.

    Raises:
        UsageError: the order in which the run reads its data is not known.
    """
    run = {"sampling": "random"} | trainer_settings(
        arguments, where="the Trainer's arguments", num_processes=num_processes
    )
    accumulation = run.pop("gradient_accumulation", 1)
    if run.get("micro_batch_size") is not None:
        run["global_batch_size"] = run["micro_batch_size"] * accumulation * num_processes
    if plan.dataset.format not in ("lengths", "trl-text") and run.pop("packer", None) is not None:
        run.pop("shuffle_seed", None)  # rows that were saved after TRL packed them, and shuffled them last of all
    return describe(misfits(plan, run, data_paths=None), TRAINER_ARGUMENTS)
