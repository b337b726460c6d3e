"""The model that an analysis is of: as an object of the JSON report, and as one line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thdprof.analyze.analysis import Analysis
from thdprof.training import Model

_DERIVED = ("head_dim", "query_groups", "ffn_size", "expert_ffn_size", "moe_layers")


def model_dict(analysis: Analysis) -> dict[str, Any] | None:
    """All fields of the model, the sizes that follow from them, and where it was read; None where it is not known."""
    model = analysis.model
    if model is None:
        return None
    derived = {name: getattr(model, name) for name in _DERIVED}
    return {**asdict(model), **derived, "gpu": analysis.gpu, "source": analysis.model_source}


def model_line(analysis: Analysis) -> str | None:
    """The model in one line; None where it is not known."""
    model = analysis.model
    if model is None:
        return None
    parts = [*_shape(model), *_parallelism(model), *_precision(model)]
    source = "" if analysis.model_source is None else f" (from {analysis.model_source})"
    gpu = "" if analysis.gpu is None else f" on {analysis.gpu}"
    return f"model: {', '.join(parts)}{gpu}{source}"


def _shape(model: Model) -> list[str]:
    layers = f"{model.num_layers} layers" if model.num_layers > 1 else "1 layer"
    parts = [f"{layers} {model.hybrid_layer_pattern}" if model.hybrid_layer_pattern else layers]
    parts.append(f"hidden {model.hidden_size}")
    if model.hybrid_layer_pattern is None or "*" in model.hybrid_layer_pattern:
        heads = f"{model.num_attention_heads} heads"
        if model.multi_latent_attention:
            parts.append(f"{heads} (latent, rank {model.kv_lora_rank})")
        else:
            groups = f" in {model.query_groups} groups" if model.query_groups < model.num_attention_heads else ""
            parts.append(f"{heads}{groups} of {model.head_dim}")
    if model.moe_layers < model.num_layers and (
        model.hybrid_layer_pattern is None or "-" in model.hybrid_layer_pattern
    ):
        parts.append(f"ffn {model.ffn_size}{' gated' if model.gated_linear_unit else ''}")
    if model.num_experts is not None:
        parts.append(f"{model.num_experts} experts of {model.expert_ffn_size}, {model.moe_router_topk} a token")
    if model.vocab_size is not None:
        parts.append(f"vocabulary {model.vocab_size}")
    return parts


def _parallelism(model: Model) -> list[str]:
    parts = [f"TP {model.tensor_model_parallel_size}{' with SP' if model.sequence_parallel else ''}"]
    if model.expert_model_parallel_size > 1:
        parts.append(f"EP {model.expert_model_parallel_size}")
    return parts


def _precision(model: Model) -> list[str]:
    parts = [model.precision if model.fp8_recipe is None else f"{model.precision} with FP8 {model.fp8_recipe}"]
    if model.recompute_granularity is not None:
        parts.append(f"recompute {model.recompute_granularity}")
    if model.lora_dim is not None:
        parts.append(f"adapters of rank {model.lora_dim}")
    return parts
