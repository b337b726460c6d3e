"""Positions in several dimensions, and Qwen3-VL: `python tests/gpu/vision_cases.py NAME[@STEPS]...`.

Each case trains a small model by micro-batches of other shapes without thdprof, padded eagerly, and replayed, and
prints a line. The weights follow the gradients, so that a wrong one shows in all later losses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from support import pictures
from support.own_loop import VOCABULARY, wrapped
from support.own_loop import config_of as plain_config
from support.own_loop_cases import deterministic_kernels, run_cases
from support.own_loop_steps import (
    DISTINCT_STEPS,
    bounds_of,
    descend,
    fitted,
    mean_loss,
    nothing_told,
    run_schedule,
    shares_of,
    verdict,
)
from support.plans import plan_of_shares

from thdprof.runtime.megatron import install, packed_seq_params

TOKENS, EACH = 512, 4
"""Tokens of a micro-batch; micro-batches of a step."""
DOCUMENTS = (3, 8, 12, 16, 20)
"""Numbers of documents that micro-batches have in turn; buckets hold 8 and 16."""
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
class Case:
    """One model."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the TransformerConfig."""
    with_images: bool = True
    """Whether it is Qwen3-VL; False: a GPT."""
    positions: str = "rope"
    """The GPT's position embedding."""
    experts: int | None = None
    features: tuple[int, ...] = pictures.FEATURES
    """Layers of the vision encoder whose outputs the decoder gets."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Sizes of Megatron's process groups."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Changes of the plan's graphs."""
    fused_layer: bool = False
    """Whether the first layer's MLP is one of Transformer Engine's fused operations, which is in no graph."""
    deterministic: bool = True
    """Whether there are kernels that add in the same order each time."""
    padding_rounds: bool = False
    """Whether padding itself moves the last bits, so that the run without thdprof is no twin."""
    steps: int = 5


CASES = {
    "qwen3_vl": Case(),
    "qwen3_vl_layers": Case(plan={"impl": "transformer_engine"}),
    "qwen3_vl_experts": Case(config=EXPERTS, experts=4, plan=UP_TO_ROUTER),
    "qwen3_vl_one_layer_a_graph": Case(plan={"layers_per_graph": 1}),
    "qwen3_vl_recompute": Case(config=FULL),
    "qwen3_vl_fp8": Case(config=FP8),
    "qwen3_vl_fp8_experts": Case(config={**EXPERTS, **FP8}, experts=4, plan=UP_TO_ROUTER),
    "qwen3_vl_without_features": Case(config=EXPERTS, experts=4, features=(), plan=UP_TO_ROUTER),
    "qwen3_vl_stages": Case(
        config={"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16, "variable_seq_lengths": False},
        sizes={"pipeline_model_parallel_size": 2},
    ),
    "qwen3_vl_tensor_parallel": Case(
        config={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        sizes={"tensor_model_parallel_size": 2},
    ),
    "mrope": Case(with_images=False, positions="mrope", config={"mrope_section": [12, 10, 10]}),
    "mrope_unfused": Case(
        with_images=False, positions="mrope", config={"mrope_section": [12, 10, 10], "apply_rope_fusion": False}
    ),
    "rope_unfused": Case(with_images=False, config={"apply_rope_fusion": False}),
    "rope_unfused_layers": Case(
        with_images=False, config={"apply_rope_fusion": False}, plan={"impl": "transformer_engine"}
    ),
    "rope_unfused_recompute": Case(with_images=False, config={"apply_rope_fusion": False, **FULL}),
    "fused_layer_recompute": Case(
        with_images=False, fused_layer=True, config=FULL, plan={"impl": "transformer_engine"}
    ),
    "yarn_unfused": Case(
        with_images=False,
        positions="yarn",
        config={
            "apply_rope_fusion": False,
            "add_bias_linear": True,
            "window_size": (127, 0),
            "window_attn_skip_freq": 2,
        },
    ),
    "learnable_softmax": Case(
        with_images=False,
        config={"softmax_type": "learnable", "add_bias_linear": True, "window_size": (127, 0)},
        deterministic=False,
        padding_rounds=True,
    ),
    "output_gate": Case(with_images=False, config={"attention_output_gate": True, "qk_layernorm": True}),
}


def main(names: list[str]) -> None:
    """Run the cases."""
    torch.backends.cudnn.deterministic = True  # the vision encoder begins with a convolution
    torch.use_deterministic_algorithms(True, warn_only=True)
    run_cases(names, CASES, result_of)


def result_of(case: Case) -> str:
    """How a case's runs differ."""
    with deterministic_kernels(case.deterministic):
        eager, replayed = (trained(case, replay=replay) for replay in (False, True))
        alone = None if case.padding_rounds else trained(case, replay=None)
    return verdict(eager, replayed, steps=case.steps, documents=documents_of(case), alone=alone)


def trained(case: Case, *, replay: bool | None) -> dict[str, Any]:
    """Losses, gradients and counters of a run of a new model; None: without thdprof."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, force_reset_rng=True)
    config = pictures.config_of(**case.config) if case.with_images else plain_config(**case.config)
    inner = (
        pictures.qwen3_vl(config, experts=case.experts, features=case.features)
        if case.with_images
        else gpt(case, config)
    )
    model = wrapped(inner, config)
    told = nothing_told()
    if replay is None:
        _train(case, model, told)
        return told
    with install(model, plan_of(case), config, replay=replay, say=print) as installation:
        _train(case, model, told)
        told["stats"] = installation.stats()
    return told


def _train(case: Case, model: Any, told: dict[str, Any]) -> None:
    for step in range(case.steps):
        passes = partial(run_schedule, model, forward_step, batches(case, step), count=EACH, tokens=TOKENS)
        descend(model, passes, told)


def gpt(case: Case, config: Any) -> Any:
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


def plan_of(case: Case) -> Any:
    """A plan of buckets that hold 8 and 16 documents; micro-batches of 20 fall back."""
    stages = case.sizes.get("pipeline_model_parallel_size", 1)
    plan = plan_of_shares(
        shares_of(documents_of(case)),
        count=case.steps * EACH,
        steps=case.steps,
        pipeline_parallel_size=stages,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        seq_length=TOKENS,
        global_batch_size=EACH,
        experts="none" if case.experts is None else "dropless",
    )
    return fitted(plan, case.plan, tokens=TOKENS, stages=stages)


def documents_of(case: Case) -> list[int]:
    """Numbers of documents of all micro-batches."""
    return [DOCUMENTS[number % len(DOCUMENTS)] for number in range(case.steps * EACH)]


def batches(case: Case, step: int) -> Iterator[dict[str, Any]]:
    """Micro-batches of a step; every fourth one has no images."""
    for number in range(EACH):
        random = np.random.default_rng([step % DISTINCT_STEPS, number])
        count = DOCUMENTS[(step * EACH + number) % len(DOCUMENTS)]
        bounds = bounds_of(random, count, TOKENS)
        drawn = pictures.documents(random, bounds, images=case.with_images and number != 2)
        labels = torch.from_numpy(random.integers(1, pictures.IMAGE, TOKENS)).unsqueeze(0)
        yield {
            "bounds": bounds,
            "tokens": torch.from_numpy(drawn["tokens"]).unsqueeze(0).cuda(),
            "labels": labels.cuda(),
            "grids": torch.tensor(drawn["grids"], dtype=torch.int64).reshape(-1, 3).cuda(),
            "pixels": torch.from_numpy(drawn["pixels"]).cuda().bfloat16(),
            "positions": _positions(random) if case.positions == "mrope" else None,
        }


def _positions(random: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, TOKENS, (3, 1, TOKENS))).cuda()


def forward_step(data: Iterator[dict[str, Any]], model: torch.nn.Module) -> Any:
    """What Megatron's schedules call for a micro-batch."""
    batch = next(data)
    params = packed_seq_params(batch["bounds"])
    images = {}
    if len(batch["grids"]):
        images = {"pixel_values": batch["pixels"], "image_grid_thw": batch["grids"]}

    output = model(
        batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=params, **images
    )
    return output, mean_loss


if __name__ == "__main__":
    main(sys.argv[1:])
