"""What graphs cannot serve of the model itself, and of what wraps it: attention, dispatchers, kinds of models."""

from __future__ import annotations

from typing import Any

from thdprof.megatron_limits.limit import Limit, Words
from thdprof.megatron_limits.run import Run

_UNCHECKED = "it was not checked in a graph"
_READS_BOUNDARIES = "without fusion RoPE reads the boundaries on the host"
_VISION = "vision-language"
_OTHER_KINDS = {
    "other vision-language": "only the decoder of Megatron-Bridge's Qwen3-VL and Qwen3.5-VL is known",
    "diffusion": "its layers take conditions and time steps beside their hidden states",
}
"""Kinds of models that have no decoder of GPTModel's or HybridModel's kind, and what their layers take besides."""


def _latent(run: Run) -> bool:
    return run.captures and bool(run.field("multi_latent_attention"))


def _rope_type(run: Run) -> Any:
    return run.field("rope_type") or "yarn"


def _unfused(run: Run) -> bool:
    """Whether RoPE is not fused in layers whose captures have no function in its place."""
    if run.field("apply_rope_fusion") is not False:
        return False
    if _latent(run):
        return bool(_rope_type(run) == "yarn")
    return (run.impl == "local" or bool(run.dynamic_cp)) and run.position_embedding in ("rope", "yarn")


def _several_dimensions(run: Run) -> bool:
    return run.captures and run.position_embedding == "mrope"


def _pictures(run: Run) -> bool:
    return run.captures and run.model == _VISION


MODEL_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="a rotary type other than yarn with latent attention",
        holds=lambda run: _latent(run) and _rope_type(run) != "yarn",
        reason="with multi-latent attention only yarn's RoPE is fused, and an unfused one reads the boundaries on the "
        "host",
        fields=Words("rope_type is {rope_type!r}", "set it to 'yarn', and apply_rope_fusion to True"),
    ),
    Limit(
        name="unfused RoPE",
        holds=lambda run: run.captures and _unfused(run),
        reason=_READS_BOUNDARIES,
        fields=Words("apply_rope_fusion is False", "set it to True"),
    ),
    Limit(
        name="cached latents",
        holds=lambda run: _latent(run) and run.field("cache_mla_latents"),
        reason="megatron-core refuses it in training",
        fields=Words("cache_mla_latents is True", "set it to False"),
    ),
    Limit(
        name="variants of attention",
        holds=lambda run: _latent(run) and run.field("experimental_attention_variant") is not None,
        reason=_UNCHECKED,
        fields=Words("experimental_attention_variant is {experimental_attention_variant!r}", "set it to None"),
    ),
    Limit(
        name="positions in several dimensions (`mrope`) in Megatron's own layer graphs",
        holds=lambda run: _several_dimensions(run) and run.impl == "local",
        reason="every micro-batch has rotary embeddings of its own, which were not checked in them",
        fields=Words("position_embedding_type is 'mrope' with graphs.impl local", "set graphs.impl to chunk"),
    ),
    Limit(
        name="positions in several dimensions (`mrope`) with context parallelism",
        holds=lambda run: _several_dimensions(run) and ((run.context_parallel_size or 1) > 1 or run.dynamic_cp),
        reason="the share that each rank takes of them was not checked in a graph",
        fields=Words("position_embedding_type is 'mrope' with context parallelism", "set context_parallel_size to 1"),
    ),
    Limit(
        name="overlapped expert communication in vision-language models",
        holds=lambda run: _pictures(run) and run.field("overlap_moe_expert_parallel_comm"),
        reason="Megatron-Bridge's model has no schedule plan (build_schedule_plan) by which Megatron would train it",
        fields=Words("overlap_moe_expert_parallel_comm is True", "set it to False"),
    ),
    Limit(
        name="full recompute in vision-language models in graphs of layers",
        holds=lambda run: _pictures(run) and run.impl != "chunk" and run.field("recompute_granularity") == "full",
        reason="features of images are added between its graphs, and no such model was recomputed there",
        fields=Words(
            "recompute_granularity is 'full' in a vision-language model with graphs.impl {impl}",
            "set graphs.impl to chunk, or recompute_granularity to 'selective' or None",
        ),
    ),
    Limit(
        name="gated delta nets in graphs of whole chunks",
        holds=lambda run: run.captures and run.impl != "transformer_engine" and "gated_delta_net" in (run.layers or ()),
        reason="they read the boundaries on the host in every pass",
        fields=Words(
            "the decoder has gated delta nets",
            "analyse with --impl transformer_engine, whose graphs of the other layers leave those that have one to "
            "run eagerly",
        ),
    ),
    Limit(
        name="models of other kinds than GPT and hybrids",
        holds=lambda run: run.captures and run.model in _OTHER_KINDS,
        reason="only decoders of GPTModel, HybridModel and Qwen3VLModel are captured",
        fields=Words(
            lambda run: f"the model is of the kind {run.model}, and {_OTHER_KINDS[run.model or '']}",
            "set graphs.impl to none and graphs.buckets to []",
        ),
    ),
    Limit(
        name="wrappers other than DistributedDataParallel",
        holds=lambda run: run.captures and run.wrapper not in (None, "", "DistributedDataParallel"),
        reason="it moves parameters, whose places graphs keep",
        fields=Words("the model is wrapped in {wrapper}", "use DistributedDataParallel"),
    ),
)
"""With graphs of any kind, in the order of messages."""
