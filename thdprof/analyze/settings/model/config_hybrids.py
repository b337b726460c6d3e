"""Hybrids of a config.json: Mamba, attention, MLP and experts in one stack, as letters of Megatron's pattern."""

from __future__ import annotations

from typing import Any

from thdprof.analyze.settings.model.config_keys import Config
from thdprof.analyze.settings.model.layers import hybrid_layers
from thdprof.errors import DataError

_NAMED = {"mamba": "M", "mamba2": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_TYPES = ("nemotron_h", "mamba2", "bamba", "granitemoehybrid")
_UNKNOWN_KEYS = {
    "linear_num_key_heads": "layers of linear attention",
    "linear_attn_config": "layers of linear attention",
    "ssm_cfg": "layers of Mamba 1",
    "mamba_d_ssm": "layers with Mamba and attention side by side",
    "mamba_dt_rank": "layers of Mamba 1",
    "time_step_rank": "layers of Mamba 1",
    "lru_width": "recurrent layers",
    "num_experts_per_layer": "layers with different experts",
    "block_configs": "layers of different sizes",
    "index_topk": "sparse attention",
    "encoder_layers": "an encoder",
}
"""Keys of models with layers that are not known, with the words for them."""

_OTHER_LAYERS = ("mamba", "ssm", "linear_attn", "linear_attention", "delta", "rwkv", "conv_", "lru", "recurrent")
"""Parts of the names of keys that only models with other layers have."""


def refuse_unknown_layers(config: Config, model_type: str) -> None:
    """Refuse a model whose times would be those of another, since some of its layers are not known.

    Raises:
        DataError: naming the key that says so.
    """
    if model_type in _TYPES:
        return
    for key, words in _UNKNOWN_KEYS.items():
        if config.has(key):
            raise DataError(f"{config.shown}: has {words} ({key}), which are not known; leave --model out")
    kinds = config.value("layer_types", "layers_block_type") or []
    attention = ("full_attention", "sliding_attention", "chunked_attention", "attention")
    for kind in kinds if isinstance(kinds, list) else []:
        if kind not in attention:
            raise DataError(f"{config.shown}: has layers of kind {kind!s:.40}, which are not known; leave --model out")


def refuse_unknown_kinds(config: Config) -> None:
    """Refuse a model of an unknown type whose keys tell of layers other than attention and MLP.

    Raises:
        DataError: naming the key that says so.
    """
    for key, value in config.content.items():
        word = next((word for word in _OTHER_LAYERS if word in str(key).lower()), None)
        if value and word is not None:
            raise config.refused(str(key), "has layers of kinds that are not known; leave --model out")


def is_hybrid(config: Config, model_type: str) -> bool:
    """Whether the model has layers of several kinds, or of Mamba alone."""
    return model_type in _TYPES or config.has("hybrid_override_pattern")


def read_hybrid(config: Config, model_type: str) -> dict[str, Any]:
    """The fields of `Model` that a hybrid has.

    Raises:
        DataError: the kinds of its layers are missing or not known.
    """
    pattern = _pattern(config, model_type)
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(pattern),
        **({"num_moe_layers": pattern.count("E")} if "E" in pattern else {}),
        "mamba_state_dim": config.size("ssm_state_size", "mamba_d_state", "state_size", default=128),
        "mamba_head_dim": config.size("mamba_head_dim", "mamba_d_head", *_own("head_dim", model_type), default=64),
        "mamba_num_groups": config.size("n_groups", "mamba_n_groups", default=8 if model_type != "bamba" else 1),
        "mamba_num_heads": config.size(
            "mamba_num_heads", "mamba_n_heads", *_own("num_heads", model_type), default=None
        ),
        **({"kv_channels": None} if model_type == "mamba2" else {}),
    }


def _own(name: str, model_type: str) -> tuple[str, ...]:
    """`name` where a pure Mamba model has it for its own heads."""
    return (name,) if model_type == "mamba2" else ()


def _pattern(config: Config, model_type: str) -> str:
    text = config.text("hybrid_override_pattern")
    if text is not None:
        try:
            return hybrid_layers(text).pattern
        except ValueError as error:
            raise config.refused("hybrid_override_pattern", str(error)) from error
    layers = config.size("num_hidden_layers", "n_layer")
    if layers > 10_000:
        raise config.refused("num_hidden_layers", "is more layers than any model has")
    if model_type == "mamba2":
        return "M" * layers
    kinds = config.entries("layers_block_type") or config.entries("layer_types")
    if model_type == "bamba" and kinds is None:
        with_attention = config.entries("attn_layer_indices") or []
        kinds = ["attention" if layer in with_attention else "mamba" for layer in range(layers)]
    if kinds is None:
        raise DataError(f"{config.shown}: lacks hybrid_override_pattern, the kinds of its layers")
    letters = [_NAMED.get(kind) if isinstance(kind, str) else None for kind in kinds]
    if None in letters:
        raise DataError(f"{config.shown}: layer {letters.index(None)}: its kind is not known")
    behind = ""
    if model_type in ("bamba", "granitemoehybrid"):  # an MLP or experts behind each mixer
        behind = "E" if config.count("num_local_experts") else "-"
    return "".join(f"{letter}{behind}" for letter in letters)
