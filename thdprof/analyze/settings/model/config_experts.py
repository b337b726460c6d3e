"""The experts of a config.json: how many, how wide, in which layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thdprof.analyze.settings.model.config_keys import Config

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
DENSE_WIDTH = "intermediate_size_mlp"
"""Key of Llama 4 for the width of layers without experts; intermediate_size is that of an expert and the shared one."""
_ONLY_EXPERTS = ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid", "gpt_oss")
"""Types whose intermediate_size is the width of an expert."""


def read_experts(config: Config, model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Model` for experts; empty where the model has none.

    `values` holds the fields that are known already.

    Raises:
        DataError: a key has an impossible value.
    """
    name = next((name for name in _EXPERTS if config.has(name)), None)
    if name is None or not config.count(name):
        return {}
    width = config.size("moe_intermediate_size", default=None)
    if width is None and (model_type in _ONLY_EXPERTS or config.has(DENSE_WIDTH)):
        width = config.size("intermediate_size")
    layers = None if "num_moe_layers" in values else _layers(config, values["num_layers"])
    return {
        "num_experts": config.size(name),
        "moe_router_topk": config.size(*_TOP_K),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": _shared(config, width),
        **({} if layers is None else {"num_moe_layers": layers}),
    }


def refuse_unknown_experts(config: Config) -> None:
    """Refuse a model of an unknown type with experts under unknown names, which would be taken for one without.

    Raises:
        DataError: naming the key that says so.
    """
    if config.has(*_EXPERTS):
        return
    for key, value in config.content.items():
        if value and ("expert" in str(key) or "moe" in str(key)):
            raise config.refused(str(key), "has experts under names that are not known; leave --model out")


def _shared(config: Config, width: int | None) -> int | None:
    """Width inside all shared experts together; None without any."""
    given = config.size(
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=None,
    )
    number = 1 if config.has(DENSE_WIDTH) else config.count("n_shared_experts", "num_shared_experts")
    if given is not None:
        return given
    return number * width if number and width is not None else None


def _layers(config: Config, num_layers: int) -> int:
    """How many layers hold experts: not the first ones, every so many-th, and none that are listed."""
    first = config.count("first_k_dense_replace")
    every = config.size("moe_layer_freq", default=1) if not isinstance(config.value("moe_layer_freq"), list) else 1
    step = config.size("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    listed = config.value("moe_layer_freq")
    if isinstance(listed, list):
        if len(listed) != num_layers or any(entry not in (0, 1) for entry in listed):
            raise config.refused("moe_layer_freq", f"must hold 0 or 1 for each of the {num_layers} layers")
        return sum(listed)
    dense = set(config.entries("mlp_only_layers") or ()) if _hashable(config) else set()
    return sum(
        1
        for layer in range(min(num_layers, 1_000_000))
        if layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _hashable(config: Config) -> bool:
    entries = config.entries("mlp_only_layers") or []
    if any(isinstance(entry, bool) or not isinstance(entry, int) for entry in entries):
        raise config.refused("mlp_only_layers", "must be a list of whole numbers")
    return True
