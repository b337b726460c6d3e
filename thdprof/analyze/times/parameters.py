"""Parameters of a pipeline stage on one rank, and the bytes of their weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thdprof.analyze.buckets.saved_tensors import Kind, layer_kinds
from thdprof.training import Model

_CONVOLUTION = 4
"""Width of the convolution of a Mamba layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one rank."""

    dense: float
    """Parameters whose optimizer state all data- and context-parallel ranks share."""
    experts: float
    """Parameters of this rank's experts."""
    outside: float
    """Those of `dense` that are the embedding's or the output layer's."""
    largest: float
    """Elements of the largest parameter inside layers that is trained."""
    adapters: float | None = None
    """Those of adapters, which alone are trained; None: all parameters are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers of one pipeline rank."""

    chunks: tuple[tuple[Kind, ...], ...]
    """The layers of each of its model chunks."""
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the output layer and the loss."""

    @property
    def layers(self) -> list[Kind]:
        """The layers of all chunks."""
        return [kind for chunk in self.chunks for kind in chunk]

    def has_output_weights(self, model: Model) -> bool:
        """Whether it has weights of an output layer beside an embedding's."""
        return self.last and (model.untie_embeddings_and_output_weights or not self.first)


def stages(model: Model, *, pipeline_size: int, num_chunks: int) -> list[Stage]:
    """The layers of every pipeline rank: chunk c of rank r is part c * pipeline_size + r of the model.

    Where layers do not divide evenly, the first parts have one more.
    """
    kinds, parts = layer_kinds(model), pipeline_size * num_chunks
    least, more = divmod(len(kinds), parts)
    begins = [part * least + min(part, more) for part in range(parts + 1)]
    chunks = [tuple(kinds[begins[part] : begins[part + 1]]) for part in range(parts)]
    return [
        Stage(
            chunks=tuple(chunks[chunk * pipeline_size + rank] for chunk in range(num_chunks)),
            first=rank == 0,
            last=rank == pipeline_size - 1,
        )
        for rank in range(pipeline_size)
    ]


def count_table_elements(model: Model) -> float:
    """Elements of an embedding or an output layer on one rank; 0 without a vocabulary."""
    return (model.vocab_size or 0) * model.hidden_size / model.tensor_model_parallel_size


def stage_parameters(model: Model, stage: Stage) -> Parameters:
    """Parameters of one rank of `stage`; biases, which are few, are left out."""
    counts = [_of_layer(model, kind) for kind in stage.layers]
    dense, experts = (sum(count[place] for count in counts) for place in (0, 1))
    outside = count_table_elements(model) * (stage.first + stage.has_output_weights(model))
    if stage.last and model.mtp_num_layers:
        last = _of_layer(model, layer_kinds(model)[-1])
        dense += model.mtp_num_layers * (last[0] + count_joined_elements(model))
        experts += model.mtp_num_layers * last[1]
    largest, adapters = max((count[2] for count in counts), default=0.0), None
    if model.lora_dim is not None:
        trained = [[one.elements for one in list_trained_matrices(model, kind)] for kind in stage.layers]
        largest, adapters = (
            max((elements for layer in trained for elements in layer), default=0.0),
            sum(map(sum, trained)),
        )
    return Parameters(dense=dense + outside, experts=experts, outside=outside, largest=largest, adapters=adapters)


def expert_ranks(model: Model, ranks: int) -> int:
    """Ranks that hold the same experts, where `ranks` data- and context-parallel ones hold the same dense weights."""
    of_expert = model.expert_model_parallel_size * model.expert_tensor_size
    return max(1, ranks * model.tensor_model_parallel_size // of_expert)


def state_bytes(model: Model, parameters: Parameters, ranks: int) -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer state, and of the part that the optimizer's first step adds.

    Weights are in `precision`, gradients in float32 (with fp16 in fp16, and copied; likewise in bf16 with
    --grad-reduce-in-bf16), beside them float32 weights and the two moments of Adam, which the optimizer makes in its
    first step. A distributed optimizer shares the last three among the ranks that hold the same weights. FP8 keeps each
    linear layer's weights twice more, in one byte each.

    Args:
        ranks: data- and context-parallel ranks, which hold the same dense weights.
    """
    shares, expert_shares = (ranks, expert_ranks(model, ranks)) if model.use_distributed_optimizer else (1, 1)
    weight = model.element_bytes
    gradient = 4 if model.gradients_in_fp32 else 2
    master = 0 if model.precision == "fp32" else 4 if model.gradients_in_fp32 else 8
    kept: Sequence[tuple[float, float]] = ((parameters.dense, shares), (parameters.experts, expert_shares))
    frozen = 0.0
    if parameters.adapters is not None:
        kept, frozen = ((parameters.adapters, shares),), weight * (parameters.dense + parameters.experts)
    moments = sum(count * 8 / share for count, share in kept)
    rest = frozen + sum(count * (weight + gradient + master / share) for count, share in kept)
    if model.fp8_recipe:
        rest += 2 * (parameters.dense - parameters.outside + parameters.experts)
    return rest + moments, moments


class _Linear(NamedTuple):
    """A linear layer, whole, or one of each of this rank's experts."""

    inputs: int
    outputs: int
    name: str = ""
    """The name by which adapters choose it; empty: it never has one."""
    shared: bool = True
    """Whether tensor-parallel ranks share it."""
    of_experts: bool = False


def _list_linear_layers(model: Model, kind: Kind) -> Iterator[_Linear]:
    """The linear layers of one layer, in the order in which Megatron registers them: an attention's output projection
    comes first. The convolution of a Mamba layer is taken as one.
    """
    hidden, gated, heads = model.hidden_size, model.gate_factor, model.num_attention_heads
    if "attention" in kind and model.multi_latent_attention:
        latent, positions = model.kv_lora_rank, model.qk_pos_emb_head_dim
        yield _Linear(heads * model.v_head_dim, hidden, "linear_proj")
        if model.q_lora_rank:
            yield _Linear(hidden, model.q_lora_rank, shared=False)
        yield _Linear(model.q_lora_rank or hidden, heads * (model.qk_head_dim + positions), "linear_q_up_proj")
        yield _Linear(hidden, latent + positions, shared=False)
        yield _Linear(latent, heads * (model.qk_head_dim + model.v_head_dim), "linear_kv_up_proj")
    elif "attention" in kind:
        yield _Linear(heads * model.head_dim, hidden, "linear_proj")
        yield _Linear(hidden, (heads + 2 * model.query_groups) * model.head_dim, "linear_qkv")
    if "mlp" in kind:
        yield _Linear(hidden, gated * model.ffn_size, "linear_fc1")
        yield _Linear(model.ffn_size, hidden, "linear_fc2")
    if kind == "mamba":
        inner = model.mamba_heads * model.mamba_head_dim
        states = 2 * model.mamba_num_groups * model.mamba_state_dim
        yield _Linear(hidden, 2 * inner + states + model.mamba_heads)
        yield _Linear(inner, hidden)
        yield _Linear(inner + states, _CONVOLUTION)
    if "moe" in kind:
        yield _Linear(hidden, gated * model.expert_ffn_size, "linear_fc1", of_experts=True)
        yield _Linear(model.expert_ffn_size, hidden, "linear_fc2", of_experts=True)
        if width := model.moe_shared_expert_intermediate_size:
            yield _Linear(hidden, gated * width)
            yield _Linear(width, hidden)


def list_adapted_widths(model: Model, kind: Kind) -> list[float]:
    """For every linear layer of one layer that has an adapter, the width of its input and its output together, on one
    rank. Experts share one adapter for each of their two linear layers.
    """
    tensor, names = model.tensor_model_parallel_size, model.lora_target_modules
    return [(one.inputs + one.outputs) / tensor for one in _list_linear_layers(model, kind) if one.name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One large parameter of a layer on one rank."""

    elements: float
    """Number of its elements on this rank."""
    of_expert: bool = False
    """Whether it is of one of this rank's experts."""


def _layer_matrices(model: Model, kind: Kind) -> list[Matrix]:
    """The large parameters of one layer on one rank, in the order in which Megatron registers them: all experts' first
    products come before their second ones.

    Norms, biases and the router are left out.
    """
    found: list[Matrix] = []
    for one in _list_linear_layers(model, kind):
        ranks = model.expert_tensor_size if one.of_experts else model.tensor_model_parallel_size if one.shared else 1
        count = (model.num_experts or 1) // model.expert_model_parallel_size if one.of_experts else 1
        found += [Matrix(elements=one.inputs * one.outputs / ranks, of_expert=one.of_experts)] * count
    return found


def list_trained_matrices(model: Model, kind: Kind) -> list[Matrix]:
    """The large parameters of one layer that are trained, in the order in which Megatron registers them.

    Adapters are taken as one parameter each, and as none of an expert.
    """
    if model.lora_dim is None:
        return _layer_matrices(model, kind)
    return [Matrix(elements=width * model.lora_dim) for width in list_adapted_widths(model, kind)]


def count_joined_elements(model: Model) -> float:
    """Elements, on one rank, of the projection with which a layer of multi-token prediction begins."""
    return 2 * model.hidden_size**2 / model.tensor_model_parallel_size


def _of_layer(model: Model, kind: Kind) -> tuple[float, float, float]:
    """Parameters outside experts, in experts, and of the largest matrix, of one layer on one rank."""
    matrices = _layer_matrices(model, kind)
    norms = model.hidden_size * sum(part in kind for part in ("attention", "mlp", "mamba", "moe"))
    router = model.hidden_size * (model.num_experts or 1) if "moe" in kind else 0
    dense = sum(one.elements for one in matrices if not one.of_expert)
    experts = sum(one.elements for one in matrices if one.of_expert)
    return norms + router + dense, experts, max((one.elements for one in matrices), default=0.0)
