"""Families of models by the `model_type` of their config.json: what their code fixes and the file does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from thdprof.analyze.settings.model.config_keys import Config
from thdprof.training import Norm

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What all models of one type share."""

    gated_linear_unit: bool = True
    """Whether the MLP is gated."""
    normalization: Norm = "RMSNorm"
    """Kind of normalization."""
    rotary: bool = True
    """Whether positions are rotary embeddings."""
    qk_layernorm: bool = False
    """Whether queries and keys are normalized."""
    add_bias_linear: bool = False
    """Whether all linear layers have biases."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights where the file does not say."""
    defaults: Mapping[str, Any] = _NONE
    """Values of keys that transformers fills in for this type; files that it writes may leave them out."""


_LLAMA = Family()
_GEMMA = replace(_LLAMA, tied=True, defaults={"head_dim": 256})
_GPT = Family(gated_linear_unit=False, normalization="LayerNorm", add_bias_linear=True)
_GEMMA3 = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_QWEN3 = replace(_LLAMA, qk_layernorm=True, defaults={"head_dim": 128})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "qwen2", "phi3", "granite", "qwen2_moe", "granitemoe", "granitemoeshared"), _LLAMA),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "llama4", "llama4_text"), _LLAMA),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"), _LLAMA),
        **dict.fromkeys(("cohere", "cohere2"), replace(_LLAMA, normalization="LayerNorm", tied=True)),
        **dict.fromkeys(("mistral", "mixtral"), replace(_LLAMA, defaults={"num_key_value_heads": 8})),
        **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
        **dict.fromkeys(("gemma", "gemma2"), _GEMMA),
        **dict.fromkeys(("gemma3", "gemma3_text"), replace(_GEMMA, qk_layernorm=True, defaults=_GEMMA3)),
        **dict.fromkeys(("olmo2", "olmo3", "olmoe"), replace(_LLAMA, qk_layernorm=True)),
        "olmo": replace(_LLAMA, normalization="LayerNorm"),
        "glm4_moe": replace(_LLAMA, defaults={"head_dim": 128}),
        "gpt2": replace(_GPT, rotary=False, tied=True, defaults={"resid_pdrop": 0.1, "attn_pdrop": 0.1}),
        "gpt_neox": _GPT,
        "starcoder2": replace(_GPT, tied=True),
        "nemotron": replace(_GPT, add_bias_linear=False),
        "nemotron_h": replace(_LLAMA, gated_linear_unit=False, rotary=False),
        "mamba2": replace(_LLAMA, gated_linear_unit=False, rotary=False, defaults={"num_attention_heads": 1}),
        "bamba": _LLAMA,
        "granitemoehybrid": replace(_LLAMA, rotary=False),
    }
)
"""Every family by its model type."""


def guessed(config: Config) -> Family:
    """The family of a type that is not in the table, by its keys."""
    activation = config.value("hidden_act", "activation_function", "hidden_activation")
    gated = activation in ("silu", "swish", "swiglu", "geglu") or config.has("rms_norm_eps")
    layer_norm = config.has("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "do_layer_norm_before")
    layer_norm = layer_norm and not config.has("rms_norm_eps")
    bias = config.value("use_bias", "bias")
    return Family(
        gated_linear_unit=gated,
        normalization="LayerNorm" if layer_norm else "RMSNorm",
        rotary=config.has("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_dim"),
        add_bias_linear=bias if isinstance(bias, bool) else layer_norm,
        tied=True,
    )
