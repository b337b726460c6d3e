"""The model that a run trains: the sizes, the precision and the parallelism on which its times and memory depend.

Fields are named as in megatron-core's TransformerConfig and Megatron-LM's flags. All of them can be given in a settings
file; launch scripts, a Hugging Face `config.json` and recipes of Megatron-Bridge or NeMo are read into the same fields.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from thdprof.errors import UsageError
from thdprof.training.settings import Definition, Setting, definitions_of

Precision = Literal["bf16", "fp16", "fp32"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""Scaling recipes of FP8 by megatron-core's names; `tensorwise` is current scaling."""
Recompute = Literal["selective", "full"]
Norm = Literal["LayerNorm", "RMSNorm"]

NONE = "none"
"""The value that says outright that a field is null, such as `fp8_recipe: none`; a null counts as not given."""

_SIZE = Interval(ge=1, le=2**31 - 1)
_COUNT = Interval(ge=0, le=2**31 - 1)
_PART = Interval(ge=0, lt=1)


_FIXED = Setting(panel="Model", everyday=False, swept=False)
_CHOICE = replace(_FIXED, swept=True)
"""A field that runs of one architecture choose differently, so that a sweep can vary it."""
_OPTION = replace(_CHOICE, everyday=True)
"""Such a field that the command has an option for."""
_COMMUNICATION = replace(_CHOICE, of_communication=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's shape, precision and parallelism. Sizes are of the whole model, not of one rank's share."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    num_layers: Annotated[int, _SIZE, _FIXED]
    """Layers of the whole model, over all pipeline stages; of a hybrid, letters of its pattern."""
    hidden_size: Annotated[int, _SIZE, _FIXED]
    """Width of hidden states."""
    num_attention_heads: Annotated[int, _SIZE, _FIXED]
    """Attention heads."""
    ffn_hidden_size: Annotated[int | None, _SIZE, _FIXED] = None
    """Width inside the MLP; null: 4 times hidden_size, for a gated MLP 8/3 of it in multiples of 64, as in Megatron."""
    num_query_groups: Annotated[int | None, _SIZE, _FIXED] = None
    """Heads of keys and values; null: as many as attention heads."""
    kv_channels: Annotated[int | None, _SIZE, _FIXED] = None
    """Width of one attention head; null: hidden_size / num_attention_heads."""
    gated_linear_unit: Annotated[bool, _FIXED] = False
    """Whether the MLP is gated (SwiGLU): its first product is twice as wide."""
    normalization: Annotated[Norm, _FIXED] = "LayerNorm"
    """Kind of normalization."""
    qk_layernorm: Annotated[bool, _FIXED] = False
    """Whether queries and keys are normalized."""
    add_bias_linear: Annotated[bool, _FIXED] = True
    """Whether linear layers have biases."""
    rotary: Annotated[bool, _FIXED] = False
    """Whether positions are rotary embeddings."""
    hidden_dropout: Annotated[float, _PART, _FIXED] = 0.1
    """Dropout of hidden states; 0: no dropout kernel keeps a mask."""
    attention_dropout: Annotated[float, _PART, _FIXED] = 0.1
    """Dropout of attention probabilities."""
    vocab_size: Annotated[int | None, _SIZE, _FIXED] = None
    """Rows of the embedding, padded as training pads them; null: not known, so time outside the decoder is not
    either."""
    untie_embeddings_and_output_weights: Annotated[bool, _FIXED] = False
    """Whether the output layer has weights of its own."""
    mtp_num_layers: Annotated[int, _COUNT, _FIXED] = 0
    """Layers of multi-token prediction after the decoder."""

    multi_latent_attention: Annotated[bool, _FIXED] = False
    """Whether attention is multi-head latent attention."""
    q_lora_rank: Annotated[int | None, _SIZE, _FIXED] = None
    """Rank of MLA's queries; null: queries are not compressed."""
    kv_lora_rank: Annotated[int, _SIZE, _FIXED] = 512
    """Rank of MLA's keys and values."""
    qk_head_dim: Annotated[int, _SIZE, _FIXED] = 128
    """Width of the part of an MLA head's query and key that has no positions."""
    qk_pos_emb_head_dim: Annotated[int, _SIZE, _FIXED] = 64
    """Width of the part of an MLA head's query and key that has positions."""
    v_head_dim: Annotated[int, _SIZE, _FIXED] = 128
    """Width of an MLA head's values."""

    num_experts: Annotated[int | None, _SIZE, _FIXED] = None
    """Experts of a layer that has experts; null: none."""
    moe_router_topk: Annotated[int, _SIZE, _FIXED] = 2
    """Experts that a token goes to."""
    moe_ffn_hidden_size: Annotated[int | None, _SIZE, _FIXED] = None
    """Width inside one expert; null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Annotated[int | None, _SIZE, _FIXED] = None
    """Width inside all shared experts together; null: none."""
    num_moe_layers: Annotated[int | None, _COUNT, _FIXED] = None
    """Layers that have experts; null: all of them where num_experts is given."""
    moe_expert_capacity_factor: Annotated[float | None, _CHOICE] = None
    """Room of an expert as a factor of its share of tokens, to which its input is padded; null: dropless."""

    hybrid_layer_pattern: Annotated[str | None, _FIXED] = None
    """Kinds of a hybrid's layers, a letter each: M Mamba, * attention, - MLP, E experts; null: no hybrid."""
    mamba_state_dim: Annotated[int, _SIZE, _FIXED] = 128
    """Width of the state of a Mamba layer."""
    mamba_head_dim: Annotated[int, _SIZE, _FIXED] = 64
    """Width of a head of a Mamba layer."""
    mamba_num_groups: Annotated[int, _SIZE, _FIXED] = 8
    """Groups of a Mamba layer."""
    mamba_num_heads: Annotated[int | None, _SIZE, _FIXED] = None
    """Heads of a Mamba layer; null: as many as make it twice as wide as hidden states."""

    tensor_model_parallel_size: Annotated[int, _SIZE, _CHOICE] = 1
    """Ranks that share each layer's weights."""
    sequence_parallel: Annotated[bool, _CHOICE] = False
    """Whether these ranks share the tokens out among them between matrix products."""
    expert_model_parallel_size: Annotated[int, _SIZE, _CHOICE] = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Annotated[int | None, _SIZE, _CHOICE] = None
    """Ranks that share the weights of one expert; null: tensor_model_parallel_size."""

    precision: Annotated[Precision, _CHOICE] = "bf16"
    """Precision of weights and activations."""
    autocast: Annotated[bool, _CHOICE] = False
    """Whether weights are in float32, and autocast computes in `precision`; under Hugging Face's Trainer alone."""
    fp8_recipe: Annotated[Fp8Recipe | None, _CHOICE] = None
    """Scaling recipe of matrix products in FP8; null: they are in `precision`."""
    recompute_granularity: Annotated[
        Recompute | None,
        replace(
            _OPTION,
            help="How much of a layer its backward computes again; full is gradient_checkpointing.",
            assumed="as the launch or the Trainer's arguments say, else none",
            aliases={NONE: NONE},
        ),
    ] = None
    """How much of a layer its backward computes again; null: nothing."""
    recompute_modules: Annotated[tuple[str, ...], _FIXED] = ("core_attn",)
    """Parts of a layer that selective recompute computes again, by megatron-core's names."""
    recompute_num_layers: Annotated[int | None, _SIZE, _CHOICE] = None
    """Layers that full recompute computes again (method block), or that are computed again together (uniform)."""
    recompute_method: Annotated[Literal["uniform", "block"], _CHOICE] = "uniform"
    """Which layers full recompute computes again: all, or the first recompute_num_layers of each stage."""
    compile: Annotated[
        bool, replace(_OPTION, help="The Trainer's layers are compiled, by PlanCallback(compile=True).")
    ] = False
    """Whether `PlanCallback(compile=True)` compiles the layers; under Hugging Face's Trainer alone."""
    liger: Annotated[bool, replace(_OPTION, help="The Trainer's layers have Liger's kernels, by use_liger_kernel.")] = (
        False
    )
    """Whether layers have the kernels of liger-kernel; under Hugging Face's Trainer alone."""
    lora_dim: Annotated[int | None, _SIZE, _FIXED] = None
    """Rank of the adapters (LoRA) that alone are trained; null: all weights are."""
    lora_target_modules: Annotated[tuple[str, ...], _FIXED] = (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )
    """Linear layers that have adapters, by megatron-core's names."""
    lora_dropout: Annotated[float, _PART, _FIXED] = 0.0
    """Dropout of what adapters take; 0: no dropout kernel keeps a mask."""
    use_distributed_optimizer: Annotated[bool, _CHOICE] = False
    """Whether data-parallel ranks share the optimizer's state out among them."""
    overlap_grad_reduce: Annotated[bool, _COMMUNICATION] = False
    """Whether Megatron reduces gradients over data-parallel ranks while the backward of other layers runs."""
    overlap_param_gather: Annotated[bool, _COMMUNICATION] = False
    """Whether Megatron gathers parameters of data-parallel ranks while the forward of other layers runs."""
    overlap_param_gather_with_optimizer_step: Annotated[bool, _COMMUNICATION] = False
    """Whether Megatron starts the first gather of parameters in the optimizer's step: gradients are one bucket then."""
    ddp_bucket_size: Annotated[int | None, _SIZE, _COMMUNICATION] = None
    """Parameters of a bucket that is reduced and gathered together, at least; null: 40 million, or 1 million for each
    data- and context-parallel rank if that is more.
    """
    ddp_num_buckets: Annotated[int | None, _SIZE, _COMMUNICATION] = None
    """Buckets into which a rank's parameters are divided, instead of `ddp_bucket_size`."""
    ddp_pad_buckets_for_high_nccl_busbw: Annotated[bool, _COMMUNICATION] = False
    """Whether buckets are padded to multiples of 65,536 parameters."""
    ddp_average_in_collective: Annotated[bool, _COMMUNICATION] = False
    """Whether reductions average gradients, so that they are not scaled before."""
    calculate_per_token_loss: Annotated[bool, _COMMUNICATION] = False
    """Whether the loss is averaged over the tokens of a step: gradients are scaled after their reduction then."""
    grad_reduce_in_fp32: Annotated[bool | None, _COMMUNICATION] = None
    """Whether gradients are kept and reduced in float32; null: with precision bf16, as Megatron-LM does."""
    fp8_param_gather: Annotated[bool, _COMMUNICATION] = False
    """Whether the parameters of linear layers are kept and gathered in FP8."""
    align_param_gather: Annotated[bool, _COMMUNICATION] = True
    """Whether pipeline stages start the gathers of all buckets of a chunk at the same time; with a virtual pipeline
    alone.
    """
    align_grad_reduce: Annotated[bool, _COMMUNICATION] = True
    """Whether pipeline stages start the reductions of all buckets of a chunk at the same time, after its last backward;
    with a virtual pipeline alone.
    """
    num_distributed_optimizer_instances: Annotated[int, _SIZE, _COMMUNICATION] = 1
    """Groups of data-parallel ranks, each of which has the optimizer's whole state among its ranks."""
    check_for_nan_in_grad: Annotated[bool, _COMMUNICATION] = True
    """Whether Megatron checks every bucket of gradients for NaN before it reduces it, which the host waits for."""
    gradient_accumulation_fusion: Annotated[bool, _CHOICE] = True
    """Whether the products that make weight gradients add them to main_grad (fp32) themselves."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, by Megatron's rule where it was not given.

        Megatron-LM's arguments.py takes 4 x hidden_size, and with --swiglu int(4 * hidden_size * 2 / 3 / 64) * 64.
        """
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.gated_linear_unit else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def gate_factor(self) -> int:
        """Width of an MLP's first product beside that inside it: 2 where it is gated."""
        return 2 if self.gated_linear_unit else 1

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share the weights of one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in `precision`."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradients_in_fp32(self) -> bool:
        """Whether gradients are kept and reduced in float32, by Megatron's rule where nothing says so."""
        if self.grad_reduce_in_fp32 is None or self.precision == "fp32":
            return self.precision != "fp16"
        return self.grad_reduce_in_fp32

    @property
    def moe_layers(self) -> int:
        """Layers that have experts."""
        if self.num_experts is None:
            return 0
        return self.num_layers if self.num_moe_layers is None else self.num_moe_layers


@functools.cache
def model_definitions() -> Mapping[str, Definition]:
    """The definition of every field of `Model`, by name, in their order."""
    return definitions_of(Model)


def read_field(name: str, value: object) -> Any:
    """The value of the field `name` of `Model` that a settings file's `value` says; "none" stands for null.

    Raises:
        UsageError: `value` is of a wrong type or out of bounds; the message names the field as it is given.
    """
    definition = model_definitions()[name]
    if value == NONE and definition.default is None:
        return None
    if definition.type is tuple:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise UsageError(f"{definition.describe(repr(value))}: must be a list of names, such as [core_attn]")
        return tuple(names)
    definition.check(value)
    return float(value) if definition.type is float else value  # type: ignore[arg-type]


HYBRID_LETTERS = "M*-E"
"""Kinds of a hybrid's layers: Mamba, attention, MLP, experts."""
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
"""Parts of a layer that megatron-core's selective recompute knows."""


Problem = tuple[str, str]
"""A field of `Model` that has to change; what is wrong with its value, and what it must be, as a sentence's end."""


def check_model(model: Model) -> None:
    """Refuse a model that no training builds.

    Raises:
        UsageError: naming the field, its value and what it must be.
    """
    for field in fields(Model):
        value = getattr(model, field.name)
        if value is not None or field.default is not None:
            read_field(field.name, value)
    for field_name, text in find_problems(model):
        raise UsageError(f"{describe_field(model, field_name)}: {text}")


def describe_field(model: Model, name: str) -> str:
    """The field and its value as messages name them; without a value where it is null."""
    value = getattr(model, name)
    return model_definitions()[name].describe(*(() if value is None else (value,)))


def find_problems(model: Model) -> Iterator[Problem]:
    """Everything that cannot be of `model`, whose fields are each of the right type and within bounds."""
    tp = model.tensor_model_parallel_size
    if model.hybrid_layer_pattern is None or "*" in model.hybrid_layer_pattern:
        yield from _check_attention(model)
    if model.ffn_size < 1:
        yield "hidden_size", "its MLP would have no width; give ffn_hidden_size"
    elif model.ffn_hidden_size is not None and model.ffn_hidden_size % tp:
        yield "ffn_hidden_size", f"must be a multiple of tensor_model_parallel_size, which is {tp}"
    if model.vocab_size is not None and model.vocab_size % tp:
        yield "vocab_size", f"must be padded to a multiple of tensor_model_parallel_size, which is {tp}"
    yield from _check_experts(model)
    if model.hybrid_layer_pattern is not None:
        yield from _check_pattern(model, model.hybrid_layer_pattern)
    if model.recompute_granularity == "selective":
        for name in [name for name in model.recompute_modules if name not in RECOMPUTED][:1]:
            yield "recompute_modules", f"{name} is no part of a layer; known are {', '.join(RECOMPUTED)}"
    if model.recompute_num_layers is not None and model.recompute_num_layers > model.num_layers:
        yield "recompute_num_layers", f"is more than num_layers, which is {model.num_layers}"
    if model.ddp_bucket_size is not None and model.ddp_num_buckets is not None:
        yield "ddp_num_buckets", f"contradicts ddp_bucket_size, which is {model.ddp_bucket_size}; give one"


def _check_attention(model: Model) -> Iterator[Problem]:
    heads, groups, tp = model.num_attention_heads, model.query_groups, model.tensor_model_parallel_size
    if heads % tp:
        yield "num_attention_heads", f"must be a multiple of tensor_model_parallel_size, which is {tp}"
    if model.multi_latent_attention:
        return
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            "hidden_size",
            f"must be a multiple of num_attention_heads, which is {heads}; or give kv_channels, the width of a head",
        )
    if heads % groups:
        yield "num_query_groups", f"num_attention_heads, which is {heads}, must be a multiple of it"
    elif groups % tp and tp % groups:
        yield "num_query_groups", f"must be a multiple or a divisor of tensor_model_parallel_size, which is {tp}"


def _check_experts(model: Model) -> Iterator[Problem]:
    ranks = model.expert_model_parallel_size
    if model.num_experts is None:
        if ranks > 1:
            yield "expert_model_parallel_size", "needs num_experts; a model without has none"
        if model.num_moe_layers:
            yield "num_moe_layers", "needs num_experts"
        return
    if model.num_experts % ranks:
        yield "num_experts", f"must be a multiple of expert_model_parallel_size, which is {ranks}"
    if model.moe_router_topk > model.num_experts:
        yield "moe_router_topk", f"is more than num_experts, which is {model.num_experts}"
    if model.moe_layers > model.num_layers:
        yield "num_moe_layers", f"is more than num_layers, which is {model.num_layers}"


def _check_pattern(model: Model, pattern: str) -> Iterator[Problem]:
    kinds = Counter(pattern)
    unknown = sorted(set(kinds) - set(HYBRID_LETTERS))
    if unknown:
        yield "hybrid_layer_pattern", f"{unknown[0]!r} is no kind of layer; known are {HYBRID_LETTERS}"
    elif len(pattern) != model.num_layers:
        yield "num_layers", f"hybrid_layer_pattern has {len(pattern)} letters, each of which is a layer"
    elif kinds["E"] != model.moe_layers:
        field = "num_experts" if model.num_experts is None else "num_moe_layers"
        yield field, f"hybrid_layer_pattern has experts (E) in {kinds['E']} of its layers"
    if kinds["M"]:
        heads = model.mamba_heads
        text = f"the heads of a Mamba layer, {heads}, must be a multiple of it"
        if heads < 1 or heads % model.mamba_num_groups:
            yield "mamba_num_groups", text
        elif heads % model.tensor_model_parallel_size:
            yield "tensor_model_parallel_size", text
