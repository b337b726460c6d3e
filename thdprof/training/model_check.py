"""What cannot be of a model: sizes that do not divide one another, and parts that contradict each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from thdprof.errors import UsageError
from thdprof.training.model import Model
from thdprof.training.model_fields import model_definitions, read_field

HYBRID_LETTERS = "M*-E"
"""Kinds of a hybrid's layers: Mamba, attention, MLP, experts."""
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
"""Parts of a layer that megatron-core's selective recompute knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProblem:
    """Something that cannot be of a model."""

    field: str
    """The field of `Model` that has to change."""
    text: str
    """What is wrong with its value and what it must be, as the end of a sentence."""


def check_model(model: Model) -> None:
    """Refuse a model that no training builds.

    Raises:
        UsageError: naming the field, its value and what it must be.
    """
    for field in fields(Model):
        value = getattr(model, field.name)
        if value is not None or field.default is not None:
            read_field(field.name, value)
    for problem in problems(model):
        raise UsageError(f"{shown_field(model, problem.field)}: {problem.text}")


def shown_field(model: Model, name: str) -> str:
    """The field and its value as messages name them; without a value where it is null."""
    value = getattr(model, name)
    return model_definitions()[name].shown(*(() if value is None else (value,)))


def problems(model: Model) -> Iterator[ModelProblem]:
    """Everything that cannot be of `model`, whose fields are each of the right type and within bounds."""
    yield from _of_attention(model)
    yield from _of_the_mlp(model)
    yield from _of_experts(model)
    yield from _of_a_hybrid(model)
    yield from _of_recompute(model)
    yield from _of_buckets(model)


def _of_attention(model: Model) -> Iterator[ModelProblem]:
    if model.hybrid_layer_pattern is not None and "*" not in model.hybrid_layer_pattern:
        return
    heads, tp = model.num_attention_heads, model.tensor_model_parallel_size
    if heads % tp:
        yield ModelProblem(
            field="num_attention_heads", text=f"must be a multiple of tensor_model_parallel_size, which is {tp}"
        )
    if not model.multi_latent_attention:
        if model.kv_channels is None and model.hidden_size % heads:
            yield ModelProblem(
                field="hidden_size",
                text=f"must be a multiple of num_attention_heads, which is {heads}; or give kv_channels, the width of "
                "a head",
            )
        groups = model.query_groups
        if heads % groups:
            yield ModelProblem(
                field="num_query_groups", text=f"num_attention_heads, which is {heads}, must be a multiple of it"
            )
        elif groups % tp and tp % groups:
            yield ModelProblem(
                field="num_query_groups",
                text=f"must be a multiple or a divisor of tensor_model_parallel_size, which is {tp}",
            )


def _of_the_mlp(model: Model) -> Iterator[ModelProblem]:
    tp = model.tensor_model_parallel_size
    if model.ffn_size < 1:
        yield ModelProblem(field="hidden_size", text="its MLP would have no width; give ffn_hidden_size")
    elif model.ffn_hidden_size is not None and model.ffn_hidden_size % tp:
        yield ModelProblem(
            field="ffn_hidden_size", text=f"must be a multiple of tensor_model_parallel_size, which is {tp}"
        )
    if model.vocab_size is not None and model.vocab_size % tp:
        yield ModelProblem(
            field="vocab_size",
            text=f"must be padded to a multiple of tensor_model_parallel_size, which is {tp}",
        )


def _of_experts(model: Model) -> Iterator[ModelProblem]:
    ranks = model.expert_model_parallel_size
    if model.num_experts is None:
        if ranks > 1:
            yield ModelProblem(field="expert_model_parallel_size", text="needs num_experts; a model without has none")
        if model.num_moe_layers:
            yield ModelProblem(field="num_moe_layers", text="needs num_experts")
        return
    if model.num_experts % ranks:
        yield ModelProblem(
            field="num_experts", text=f"must be a multiple of expert_model_parallel_size, which is {ranks}"
        )
    if model.moe_router_topk > model.num_experts:
        yield ModelProblem(field="moe_router_topk", text=f"is more than num_experts, which is {model.num_experts}")
    if model.moe_layers > model.num_layers:
        yield ModelProblem(field="num_moe_layers", text=f"is more than num_layers, which is {model.num_layers}")


def _of_a_hybrid(model: Model) -> Iterator[ModelProblem]:
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    kinds = Counter(pattern)
    unknown = sorted(set(kinds) - set(HYBRID_LETTERS))
    if unknown:
        yield ModelProblem(
            field="hybrid_layer_pattern", text=f"{unknown[0]!r} is no kind of layer; known are {HYBRID_LETTERS}"
        )
    elif len(pattern) != model.num_layers:
        yield ModelProblem(
            field="num_layers", text=f"hybrid_layer_pattern has {len(pattern)} letters, each of which is a layer"
        )
    elif kinds["E"] != model.moe_layers:
        field = "num_experts" if model.num_experts is None else "num_moe_layers"
        yield ModelProblem(field=field, text=f"hybrid_layer_pattern has experts (E) in {kinds['E']} of its layers")
    if kinds["M"]:
        heads = model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim
        if heads < 1 or heads % model.mamba_num_groups:
            yield ModelProblem(
                field="mamba_num_groups", text=f"the heads of a Mamba layer, {heads}, must be a multiple of it"
            )
        elif heads % model.tensor_model_parallel_size:
            yield ModelProblem(
                field="tensor_model_parallel_size",
                text=f"the heads of a Mamba layer, {heads}, must be a multiple of it",
            )


def _of_recompute(model: Model) -> Iterator[ModelProblem]:
    if model.recompute_granularity == "selective":
        unknown = [name for name in model.recompute_modules if name not in RECOMPUTED]
        if unknown:
            yield ModelProblem(
                field="recompute_modules",
                text=f"{unknown[0]} is no part of a layer; known are {', '.join(RECOMPUTED)}",
            )
    if model.recompute_num_layers is not None and model.recompute_num_layers > model.num_layers:
        yield ModelProblem(field="recompute_num_layers", text=f"is more than num_layers, which is {model.num_layers}")


def _of_buckets(model: Model) -> Iterator[ModelProblem]:
    if model.ddp_bucket_size is not None and model.ddp_num_buckets is not None:
        yield ModelProblem(
            field="ddp_num_buckets", text=f"contradicts ddp_bucket_size, which is {model.ddp_bucket_size}; give one"
        )
