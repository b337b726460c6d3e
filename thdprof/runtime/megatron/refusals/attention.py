"""Position embeddings and attention that read on the host, or were not checked in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.megatron_limits.fields import WHY_NO_MROPE

if TYPE_CHECKING:
    from thdprof.runtime.megatron.refusals.facts import Facts

_UNFUSED = "apply_rope_fusion is False: without it RoPE reads the boundaries on the host; set it to True"


def refusals(config: Any, facts: Facts) -> Iterator[str]:
    """A line for every setting of attention that graphs cannot serve.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        facts: what else is known of the run.
    """
    if getattr(config, "multi_latent_attention", False):
        yield from _of_latent_attention(config)
    elif facts.position_embedding in ("rope", "yarn") and not getattr(config, "apply_rope_fusion", True):
        yield _UNFUSED
    if facts.position_embedding == "mrope":
        yield f"position_embedding_type is 'mrope': {WHY_NO_MROPE}; set it to 'rope'"


def _of_latent_attention(config: Any) -> Iterator[str]:
    """Multi-latent attention, whose layers make their rotary tables themselves."""
    rope = getattr(config, "rope_type", "yarn")
    if rope != "yarn":
        yield (
            f"rope_type is {rope!r}: with multi-latent attention only yarn's RoPE is fused, and an unfused one reads "
            "the boundaries on the host; set it to 'yarn', and apply_rope_fusion to True"
        )
    elif not getattr(config, "apply_rope_fusion", True):
        yield _UNFUSED
    if getattr(config, "cache_mla_latents", False):
        yield "cache_mla_latents is True: megatron-core refuses it in training; set it to False"
    variant = getattr(config, "experimental_attention_variant", None)
    if variant is not None:
        yield f"experimental_attention_variant is {variant!r}: it was not checked in a graph; set it to None"
