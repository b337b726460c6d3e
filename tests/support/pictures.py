"""Megatron-Bridge's Qwen3-VL without the rest of Bridge, small, and micro-batches of text with images."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from typing import Any

import numpy as np

from support.adapters import bare

_PARENTS = (
    "megatron.bridge",
    "megatron.bridge.models",
    "megatron.bridge.models.qwen_vl",
    "megatron.bridge.models.qwen_vl.modelling_qwen3_vl",
    "megatron.bridge.training",
    "megatron.bridge.training.utils",
    "megatron.bridge.utils",
)
"""Packages whose own initialisation imports all of Bridge."""
VOCABULARY, IMAGE, VIDEO, START = 256, 250, 251, 252
"""Tokens in all, and those that stand for a part of an image, for one of a video, and before either."""
FEATURES = (0, 1)
"""Layers of the vision encoder whose outputs are added behind the decoder's first layers."""
_PATCH, _CHANNELS, _MERGED = 4, 3, 2


def modelling(name: str) -> Any:
    """A module of Bridge's modelling of Qwen3-VL, such as transformer_block."""
    for parent in _PARENTS:
        if parent not in sys.modules:
            sys.modules[parent] = bare(parent)
    return importlib.import_module(f"{_PARENTS[3]}.{name}")


def config_of(**changes: Any) -> Any:
    """A configuration of a small language model in bf16 with positions in three dimensions."""
    import torch

    values: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 64,
        "bf16": True, "params_dtype": torch.bfloat16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "add_bias_linear": False, "apply_rope_fusion": False, "mrope_section": [12, 10, 10], "qk_layernorm": True,
        "gated_linear_unit": True, "normalization": "RMSNorm", "vocab_size": VOCABULARY,
        "language_max_sequence_length": 1024, "patch_size": _PATCH, "spatial_merge_size": _MERGED,
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, **changes,
    }  # fmt: skip
    return modelling("transformer_config").Qwen3VLTransformerConfig(**values)


def qwen3_vl(config: Any, *, experts: int | None = None, features: tuple[int, ...] = FEATURES) -> Any:
    """A small Qwen3VLModel on the GPU, of Transformer Engine's layers.

    Args:
        config: what `config_of` gave.
        experts: number of experts of each layer; None: none.
        features: layers of the vision encoder whose outputs are added behind the decoder's first layers.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.enums import ModelType
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    pictures = Qwen3VLVisionConfig(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=_PATCH, in_channels=_CHANNELS,
        temporal_patch_size=2, spatial_merge_size=_MERGED, num_position_embeddings=256,
        out_hidden_size=config.hidden_size, deepstack_visual_indexes=list(features),
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts, moe_grouped_gemm=bool(experts), qk_layernorm=config.qk_layernorm
    )
    model = modelling("model").Qwen3VLModel(
        language_transformer_config=config,
        language_transformer_layer_spec=spec,
        vision_transformer_config=pictures,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model.model_type = ModelType.encoder_or_decoder  # as Bridge's own get_model does
    return model


def documents(random: np.random.Generator, bounds: list[int], *, images: bool) -> dict[str, Any]:
    """Tokens of one micro-batch and its images, one in every second document that has room for it.

    Args:
        random: draws tokens, sizes and pixels.
        bounds: boundaries of the documents.
        images: whether there are images at all.
    """
    tokens = random.integers(1, IMAGE, bounds[-1])
    grids: list[list[int]] = []
    for number, (begin, end) in enumerate(pairwise(bounds)):
        height, width = 2 * int(random.integers(1, 4)), 2 * int(random.integers(1, 4))
        parts = height * width // _MERGED**2
        if not images or number % 2 or end - begin < parts + 4:
            continue
        tokens[begin + 1] = START
        tokens[begin + 2 : begin + 2 + parts] = IMAGE
        grids.append([1, height, width])
    patches = sum(height * width for _, height, width in grids)
    pixels = random.standard_normal((patches, _CHANNELS * 2 * _PATCH**2), dtype=np.float32)
    return {"tokens": tokens, "grids": grids, "pixels": pixels}
