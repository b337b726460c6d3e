"""What the models of recipes are made of, where a recipe names a model and its configuration lies elsewhere.

Bridge reads these from a model's config.json on the Hugging Face Hub. Nothing is downloaded here: the families that
performance recipes train are told by their names, with the fields that Bridge 0.6.2 gives their providers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXPERTS: Mapping[str, Any] = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
_LATENT: Mapping[str, Any] = {
    **_EXPERTS,
    "multi_latent_attention": True,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_QWEN3 = {**_EXPERTS, "num_moe_experts": 128, "qk_layernorm": True, "moe_router_load_balancing_type": "aux_loss"}
_HYBRID = {
    **_EXPERTS,
    "num_moe_experts": 512,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "hybrid_layer_pattern": "MEM*",
    "mtp_num_layers": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "position_embedding_type": "none",
}
_PICTURES = {**_QWEN3, "kind": "vision-language", "position_embedding_type": "mrope"}
_DELTA_NETS = {
    "layers": ("gated_delta_net",),
    "attention_output_gate": True,
    "moe_shared_expert_intermediate_size": 512,
}

BY_NAME: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/": {},
    "Qwen/Qwen3-VL": _PICTURES,
    "Qwen/Qwen3.5": {**_PICTURES, **_DELTA_NETS},
    "Qwen/Qwen3-Next": {
        **_QWEN3,
        **_DELTA_NETS,
        "num_moe_experts": 512,
        "moe_router_load_balancing_type": "global_aux_loss",
    },
    "Qwen/Qwen3-30B": _QWEN3,
    "Qwen/Qwen3-235B": _QWEN3,
    "deepseek-ai/DeepSeek-V3": {
        **_LATENT,
        "num_moe_experts": 256,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_score_function": "sigmoid",
        "mtp_num_layers": 1,
    },
    "deepseek-ai/DeepSeek-V4": {
        **_LATENT,
        "num_moe_experts": 256,
        "experimental_attention_variant": "dsv4_hybrid",
        "enable_hyper_connections": True,
    },
    "moonshotai/Kimi-K2": {**_LATENT, "num_moe_experts": 384, "moe_router_score_function": "sigmoid"},
    "zai-org/GLM-5": {
        **_LATENT,
        "num_moe_experts": 256,
        "experimental_attention_variant": "dsa",
        "moe_router_score_function": "sigmoid",
    },
    "openai/gpt-oss": {
        **_EXPERTS,
        "num_moe_experts": 128,
        "position_embedding_type": "yarn",
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (127, 0),
    },
    "nvidia/NVIDIA-Nemotron-3": _HYBRID,
}
"""Fields of TransformerConfig by the beginning of a model's name, the longest that fits. `kind` and `layers` are those
of `Run.model` and `Run.layers`.
"""
BY_CLASS: Mapping[str, Mapping[str, Any]] = {
    "HybridModelProvider": {**_EXPERTS, "position_embedding_type": "none"},
    "WanModelProvider": {"kind": "diffusion"},
}
"""The same by the class of a model's provider."""


def find_architecture(name: str | None, provider: str) -> Mapping[str, Any] | None:
    """The fields of a model, or None where neither its name nor its provider is known.

    Args:
        name: the model's name on the Hugging Face Hub; None where the recipe gives the architecture itself.
        provider: name of the class that holds the model's settings.
    """
    if name is None:
        return BY_CLASS.get(provider)
    fitting = [beginning for beginning in BY_NAME if name.startswith(beginning)]
    return BY_NAME[max(fitting, key=len)] if fitting else None
