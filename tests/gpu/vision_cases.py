"""Positions in several dimensions, and Qwen3-VL: `python tests/gpu/vision_cases.py NAME[@STEPS]...`.

Each case trains a small model by micro-batches of other shapes without thdprof, padded eagerly, and replayed, and
prints a line. The weights follow the gradients, so that a wrong one shows in all later losses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from support import pictures
from support.own_loop import VOCABULARY, seed, wrapped
from support.own_loop import config_of as plain_config
from support.own_loop_cases import Case, MicroBatches, descended, deterministic_kernels, run_cases
from support.own_loop_steps import verdict

TOKENS = 512
MICRO_BATCHES = MicroBatches(tokens=TOKENS, each=4, documents=(3, 8, 12, 16, 20))
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 128,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
UP_TO_ROUTER = {"impl": "transformer_engine", "modules": ["attn", "moe_router"]}
YARN = {
    "rotary_scaling_factor": 32.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "correction_range_round_to_int": False,
}
"""What a GPTModel reads of its configuration for yarn, as Megatron-Bridge sets it for gpt-oss."""
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(Case):
    """One model."""

    with_images: bool = True
    """Whether it is Qwen3-VL; False: a GPT."""
    positions: str = "rope"
    """The GPT's position embedding."""
    features: tuple[int, ...] = pictures.FEATURES
    """Layers of the vision encoder whose outputs the decoder gets."""
    fused_layer: bool = False
    """Whether the first layer's MLP is one of Transformer Engine's fused operations, which is in no graph."""
    deterministic: bool = True
    """Whether there are kernels that add in the same order each time."""
    padding_rounds: bool = False
    """Whether padding itself moves the last bits, so that the run without thdprof is no twin."""


CASES = {
    "qwen3_vl": Vision(),
    "qwen3_vl_layers": Vision(graphs={"impl": "transformer_engine"}),
    "qwen3_vl_experts": Vision(config=EXPERTS, experts="dropless", graphs=UP_TO_ROUTER),
    "qwen3_vl_one_layer_a_graph": Vision(graphs={"layers_per_graph": 1}),
    "qwen3_vl_recompute": Vision(config=FULL),
    "qwen3_vl_fp8": Vision(config=FP8),
    "qwen3_vl_fp8_experts": Vision(config={**EXPERTS, **FP8}, experts="dropless", graphs=UP_TO_ROUTER),
    "qwen3_vl_without_features": Vision(config=EXPERTS, experts="dropless", features=(), graphs=UP_TO_ROUTER),
    "qwen3_vl_stages": Vision(
        config={"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16, "variable_seq_lengths": False},
        sizes={"pipeline_model_parallel_size": 2},
    ),
    "qwen3_vl_tensor_parallel": Vision(
        config={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        sizes={"tensor_model_parallel_size": 2},
    ),
    "mrope": Vision(with_images=False, positions="mrope", config={"mrope_section": [12, 10, 10]}),
    "mrope_unfused": Vision(
        with_images=False, positions="mrope", config={"mrope_section": [12, 10, 10], "apply_rope_fusion": False}
    ),
    "rope_unfused": Vision(with_images=False, config={"apply_rope_fusion": False}),
    "rope_unfused_layers": Vision(
        with_images=False, config={"apply_rope_fusion": False}, graphs={"impl": "transformer_engine"}
    ),
    "rope_unfused_recompute": Vision(with_images=False, config={"apply_rope_fusion": False, **FULL}),
    "fused_layer_recompute": Vision(
        with_images=False, fused_layer=True, config=FULL, graphs={"impl": "transformer_engine"}
    ),
    "yarn_unfused": Vision(
        with_images=False,
        positions="yarn",
        config={
            "apply_rope_fusion": False,
            "add_bias_linear": True,
            "window_size": (127, 0),
            "window_attn_skip_freq": 2,
        },
    ),
    "learnable_softmax": Vision(
        with_images=False,
        config={"softmax_type": "learnable", "add_bias_linear": True, "window_size": (127, 0)},
        deterministic=False,
        padding_rounds=True,
    ),
    "output_gate": Vision(with_images=False, config={"attention_output_gate": True, "qk_layernorm": True}),
}


def main(names: list[str]) -> None:
    """Run the cases."""
    torch.backends.cudnn.deterministic = True  # the vision encoder begins with a convolution
    torch.use_deterministic_algorithms(True, warn_only=True)
    run_cases(names, CASES, result_of)


def result_of(case: Vision) -> str:
    """How a case's runs differ."""
    with deterministic_kernels(case.deterministic):
        eager, replayed = (trained(case, replay=replay) for replay in (False, True))
        alone = None if case.padding_rounds else trained(case, replay=None)
    return verdict(eager, replayed, steps=case.steps, documents=MICRO_BATCHES.numbers_of(case), alone=alone)


def trained(case: Vision, *, replay: bool | None) -> dict[str, Any]:
    """Losses, gradients and counters of a run of a new model; None: without thdprof."""
    seed()
    config = pictures.config_of(**case.config) if case.with_images else plain_config(**case.config)
    inner = (
        pictures.qwen3_vl(config, experts=config.num_moe_experts, features=case.features)
        if case.with_images
        else gpt(case, config)
    )
    model = wrapped(inner, config)
    return descended(case, model, config, MICRO_BATCHES, replay=replay, batches=partial(batches, case), say=print)


def gpt(case: Vision, config: Any) -> Any:
    """A GPT with the case's position embedding."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    for name, value in YARN.items():
        setattr(config, f"yarn_{name}", value)
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layers: Any = layer
    if case.fused_layer:
        fused = get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
        others = [layer] * (config.num_layers - 1)
        layers = TransformerBlockSubmodules(layer_specs=[fused, *others], layer_norm=TENorm)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type=case.positions,
    )


def batches(case: Vision, step: int) -> Iterator[dict[str, Any]]:
    """Micro-batches of a step; every fourth one has no images."""
    for number, (random, bounds) in enumerate(MICRO_BATCHES.drawn(step)):
        drawn = pictures.documents(random, bounds, images=case.with_images and number != 2)
        labels = torch.from_numpy(random.integers(1, pictures.IMAGE, TOKENS)).unsqueeze(0)
        images = {}
        if len(drawn["grids"]):
            images = {
                "pixel_values": torch.from_numpy(drawn["pixels"]).cuda().bfloat16(),
                "image_grid_thw": torch.tensor(drawn["grids"], dtype=torch.int64).reshape(-1, 3).cuda(),
            }
        yield {
            "bounds": bounds,
            "tokens": torch.from_numpy(drawn["tokens"]).unsqueeze(0).cuda(),
            "labels": labels.cuda(),
            "positions": _positions(random) if case.positions == "mrope" else None,
            "more": images,
        }


def _positions(random: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, TOKENS, (3, 1, TOKENS))).cuda()


if __name__ == "__main__":
    main(sys.argv[1:])
