"""The buckets into which Megatron's DistributedDataParallel lays out a model chunk, as of megatron-core 0.19.

Parameters are taken from the last one to the first. A bucket ends with the parameter that fills it; what is left over
at the end is a bucket as well. Experts have buckets of their own where other ranks share them than dense weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.saved_tensors import Kind, layer_kinds
from thdprof.analyze.times.parameters import (
    Matrix,
    Stage,
    joined_elements,
    stage_parameters,
    trained_matrices,
)
from thdprof.training import Model

_LEAST, _LEAST_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket where nobody gives another number, at least and for each rank."""
_DIVISOR, _HIGH_BANDWIDTH = 128, 65_536
"""A distributed optimizer pads buckets to multiples of the first, and of the second if it is asked to."""
_EMBEDDING = 0
_IN_FP8 = ("delayed", "tensorwise", "blockwise")
"""Recipes whose parameters are gathered in FP8; those of MXFP8 travel in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together, and which are gathered together."""

    elements: float
    """Number of parameters, padding included."""
    gathered_bytes: float
    """Bytes of the parameters as they are gathered."""
    ranks: int
    """Ranks over which they are gathered, and among which reductions are scattered."""
    scaled: bool = True
    """Whether gradients are scaled before they are reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBuckets:
    """The buckets of a chunk, by the part of it whose backward completes them, which is also the first to need them."""

    embedding: list[Bucket]
    """Those that the embedding completes, after all layers."""
    layers: list[list[Bucket]]
    """Those of each layer, by its place in the chunk."""
    output: list[Bucket]
    """Those that the output layer completes, before all layers."""

    @property
    def all(self) -> Iterator[Bucket]:
        """All buckets, from the first part to the last."""
        for of_part in (self.embedding, *self.layers, self.output):
            yield from of_part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """One parameter of the chunk."""

    matrix: Matrix
    place: int
    """The part of the chunk that it is of: 0 the embedding, then the layers, then what follows."""
    alone: bool = False
    """Whether it has a bucket of its own."""


def buckets_of(model: Model, stage: Stage, *, ranks: int, pipeline_size: int = 1) -> ChunkBuckets:
    """The buckets of the first chunk of `stage`, which is the first pipeline stage.

    Embedding and output layer are left out where the vocabulary is not known.

    Args:
        model: the model.
        stage: the layers of all chunks of a rank.
        ranks: data- and context-parallel ranks, which hold the same dense weights.
        pipeline_size: pipeline stages: among several, an embedding that is the output layer too has its own bucket.
    """
    found: list[list[Bucket]] = [[] for _ in range(len(stage.chunks[0]) + 2)]
    least = bucket_size(model, stage, ranks=ranks)
    placed = list(_registered(model, stage, pipeline_size))
    apart = _experts_apart(model)
    for of_experts in (False, True):
        own = [one for one in placed if (one.matrix.of_expert and apart) == of_experts]
        sharing = expert_ranks(model, ranks) if of_experts else ranks
        sharing = max(1, sharing // model.num_distributed_optimizer_instances)
        if not own or (sharing == 1 and model.num_distributed_optimizer_instances == 1):
            continue
        scaled = not model.calculate_per_token_loss and (
            not model.ddp_average_in_collective or (of_experts and expert_ranks(model, ranks) != ranks)
        )
        for place, elements, nbytes in _grouped(model, own, least, sharing, layers=len(stage.chunks[0])):
            found[place].append(Bucket(elements=elements, gathered_bytes=nbytes, ranks=sharing, scaled=scaled))
    return ChunkBuckets(embedding=found[_EMBEDDING], layers=found[1:-1], output=found[-1])


def bucket_size(model: Model, stage: Stage, *, ranks: int) -> float:
    """Parameters that fill a bucket; infinite where all parameters are one bucket.

    Args:
        model: the model.
        stage: the layers of all chunks of a rank, whose parameters `ddp_num_buckets` divides.
        ranks: data- and context-parallel ranks.
    """
    if not model.overlap_grad_reduce or model.overlap_param_gather_with_optimizer_step:
        return math.inf
    if model.ddp_num_buckets is not None:
        return _elements(model, stage) // model.ddp_num_buckets
    return model.ddp_bucket_size or max(_LEAST, _LEAST_A_RANK * ranks)


def expert_ranks(model: Model, ranks: int) -> int:
    """Ranks that hold the same experts, where `ranks` data- and context-parallel ones hold the same dense weights."""
    tensor = model.tensor_model_parallel_size
    of_expert = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or tensor)
    return max(1, ranks * tensor // of_expert)


def _experts_apart(model: Model) -> bool:
    """Whether other ranks hold the same experts than the same dense weights, by Megatron's rule."""
    tensor = model.tensor_model_parallel_size
    return model.expert_model_parallel_size > 1 or (model.expert_tensor_parallel_size or tensor) != tensor


def _elements(model: Model, stage: Stage) -> float:
    """The parameters of a rank, frozen ones included."""
    whole = stage_parameters(model, stage, model.vocab_size or 0)
    if model.lora_dim is not None:
        return whole.dense + whole.experts + (whole.adapters or 0)
    of_layers = sum(one.elements for kind in stage.layers for one in _of_layer(model, kind))
    after = sum(one.elements for one in _after_the_layers(model, stage))
    return of_layers + after + (_table(model) if stage.first else 0)


def _table(model: Model) -> float:
    """Elements of the embedding on one rank."""
    return (model.vocab_size or 0) * model.hidden_size / model.tensor_model_parallel_size


def _registered(model: Model, stage: Stage, pipeline_size: int) -> Iterator[_Placed]:
    """The trained parameters of the stage's first chunk, in the order in which Megatron registers them."""
    layers, trained = stage.chunks[0], model.lora_dim is None
    tied = not model.untie_embeddings_and_output_weights
    if trained and stage.first and (table := _table(model)):
        alone = tied and pipeline_size > 1 and model.use_distributed_optimizer
        yield _Placed(matrix=Matrix(elements=table), place=_EMBEDDING, alone=alone)
    for place, kind in enumerate(layers, 1):
        for matrix in _of_layer(model, kind):
            yield _Placed(matrix=matrix, place=place)
    if trained and len(stage.chunks) == 1:
        for matrix in _after_the_layers(model, stage):
            yield _Placed(matrix=matrix, place=len(layers) + 1)


def _of_layer(model: Model, kind: Kind) -> list[Matrix]:
    """The trained parameters of one layer; its norms, biases and router are one."""
    matrices = trained_matrices(model, kind)
    return matrices if model.lora_dim is not None else [Matrix(elements=_small(model, kind)), *matrices]


def _after_the_layers(model: Model, stage: Stage) -> Iterator[Matrix]:
    """The parameters that follow the layers: the last norm, layers of multi-token prediction, and the output layer."""
    if not stage.last:
        return
    yield Matrix(elements=_norm(model, model.hidden_size))
    for _ in range(model.mtp_num_layers):
        yield Matrix(elements=joined_elements(model) + 3 * _norm(model, model.hidden_size))
        yield from _of_layer(model, layer_kinds(model)[-1])
    if (model.untie_embeddings_and_output_weights or not stage.first) and (table := _table(model)):
        yield Matrix(elements=table)


def _norm(model: Model, width: float) -> float:
    return width if model.normalization == "RMSNorm" else 2 * width


def _small(model: Model, kind: Kind) -> float:
    """Elements of a layer's norms, biases and router on one rank; biases of experts and of Mamba are left out."""
    hidden, tensor = model.hidden_size, model.tensor_model_parallel_size
    elements = sum(_norm(model, hidden) for part in ("attention", "mlp", "mamba", "moe") if part in kind)
    if "attention" in kind:
        elements += hidden * model.add_bias_linear
        if model.multi_latent_attention:
            elements += model.qk_layernorm * _norm(model, (model.q_lora_rank or 0) + model.kv_lora_rank)
        else:
            width = (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
            elements += model.add_bias_linear * width / tensor
            elements += model.qk_layernorm * _norm(model, 2 * model.head_dim)
    if "mlp" in kind:
        gated = 2 if model.gated_linear_unit else 1
        elements += model.add_bias_linear * (gated * model.ffn_size / tensor + hidden)
    return elements + (hidden * (model.num_experts or 1) if "moe" in kind else 0)


def _grouped(
    model: Model, parameters: Sequence[_Placed], least: float, ranks: int, *, layers: int
) -> Iterator[tuple[int, float, float]]:
    """For each bucket that is reduced and gathered at once, its part, its elements, and the bytes to gather.

    Parameters in FP8 have buckets apart, with the last of which those of all others travel. Norms, biases and routers
    of layers, which stay in bf16, are few, and counted among those in FP8.
    """
    nbytes = 4 if model.precision == "fp32" else 2
    in_fp8 = model.fp8_param_gather and model.fp8_recipe in _IN_FP8
    quantized = [one for one in parameters if in_fp8 and 1 <= one.place <= layers]
    buckets = [(*one, 1.0) for one in _filled(model, quantized, least, ranks)]
    others = [one for one in parameters if not (in_fp8 and 1 <= one.place <= layers)]
    of_others = [(*one, float(nbytes)) for one in _filled(model, others, least, ranks)]
    if buckets and of_others:
        merged = (buckets.pop(), *of_others)
        yield from ((place, elements, elements * each) for place, elements, each in buckets)
        yield (
            min(place for place, _, _ in merged),
            sum(elements for _, elements, _ in merged),
            sum(elements * each for _, elements, each in merged),
        )
        return
    yield from ((place, elements, elements * each) for place, elements, each in (*buckets, *of_others))


def _filled(model: Model, parameters: Sequence[_Placed], least: float, ranks: int) -> Iterator[tuple[int, float]]:
    """The buckets of one buffer, from the last parameter to the first: their part, and their elements."""
    divisor = 1
    if model.use_distributed_optimizer:
        divisor = math.lcm(ranks, _DIVISOR, _HIGH_BANDWIDTH if model.ddp_pad_buckets_for_high_nccl_busbw else 1)

    def padded(elements: float) -> float:
        return math.ceil(elements / divisor) * divisor

    elements, place = 0.0, _EMBEDDING
    for one in reversed(parameters):
        if one.alone and elements:
            yield place, padded(elements)
            elements = 0.0
        elements, place = elements + one.matrix.elements, one.place
        if elements >= least or one.alone:
            yield place, padded(elements)
            elements = 0.0
    if elements:
        yield place, padded(elements)
