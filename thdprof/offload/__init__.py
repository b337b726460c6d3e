"""Offloading of activations to host memory: which tensors move, and the memory that this frees. No torch."""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": (
        "linear_qkv",
        "linear_q",
        "linear_kv",
        "linear_q_proj",  # this and the rest are multi-latent attention's
        "linear_qkv_down_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "q_layernorm",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "kv_layernorm",
    ),
    "core_attn": ("core_attention",),
    "attn_proj": ("linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
    "mlp_fc1": ("mlp.linear_fc1",),
    "mlp_act": ("mlp",),
    "mlp_fc2": ("mlp.linear_fc2",),
    "expert_fc1": ("experts.linear_fc1",),
    "moe_act": ("experts",),
    "expert_fc2": ("experts.linear_fc2",),
}
"""Name of a part of a Megatron layer -> ends of the names of the modules that save its tensors. `mlp_act` is everything
that the feed-forward network saves outside its linear layers, including routers.
"""
EXPERT_MODULES = ("expert_fc1", "moe_act")
"""Parts inside experts that megatron-core's own offloading moves."""
CORE_MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", *EXPERT_MODULES)
"""Parts that megatron-core's own offloading moves around graphs of layers, as groups of tensors."""
CORE_MODULES_WITH_EXPERTS = tuple(name for name in CORE_MODULES if name != "mlp_norm")
"""Parts that it moves where a layer is captured up to its experts: the input of the norm before them then stays."""
