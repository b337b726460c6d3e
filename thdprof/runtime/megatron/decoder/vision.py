"""Megatron-Bridge's vision-language models (Qwen3-VL and Qwen3.5-VL): the language model in them, and what feeds it.

Their decoder is captured as another one's. The vision encoder, the merging of text and images, and the positions run
eagerly before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LANGUAGE_MODEL = "Qwen3VLGPTModel"
"""The class of the language models that were checked."""


def language_model_of(model: nn.Module) -> Any:
    """The language model inside a vision-language model; None where `model` is no such model."""
    return getattr(model, "language_model", None)


def is_checked(language_model: Any) -> bool:
    """Whether the language model is of a class whose decoder is known."""
    return any(base.__name__ == _LANGUAGE_MODEL for base in type(language_model).__mro__)


def num_features(model: Any) -> int:
    """Number of layers behind which a vision-language model adds image features, on this pipeline stage."""
    if language_model_of(model) is None or not model.pre_process:
        return 0
    return len(getattr(model.vision_transformer_config, "deepstack_visual_indexes", None) or ())


def feeds_gradient(model: Any) -> bool:
    """Whether the images of a vision-language model give its decoder's input a gradient."""
    encoder = getattr(model, "vision_model", None)
    return encoder is not None and any(parameter.requires_grad for parameter in encoder.parameters())


def rotary_sample_of(model: Any) -> Any:
    """A function that returns rotary embeddings of so many tokens, all at position 0, in the form that they have in
    training; None where a model's positions have one dimension, so that one table serves all micro-batches.

    Args:
        model: a GPTModel.
    """
    module = getattr(model, "rotary_pos_emb", None)
    if module is None or getattr(model, "position_embedding_type", None) != "mrope":
        return None

    def sample(num_tokens: int) -> torch.Tensor:
        positions = torch.zeros(3, 1, num_tokens, dtype=torch.int64, device=module.inv_freq.device)
        whole = getattr(module, "is_thd_format", None)
        if whole is not None:
            module.is_thd_format = True  # as for packed micro-batches, whose positions are this rank's already
        try:
            table: torch.Tensor = module(positions, model.mrope_section, cp_group=None)
        finally:
            if whole is not None:
                module.is_thd_format = whole
        return table

    return sample
