"""Matrix products in FP8, trained by Megatron's schedule and optimizer: `quantized_cases.py NAME[@STEPS]...`.

Each case trains a small model twice by the same micro-batches of other shapes, some of which fit no bucket: padded and
eager, and replayed. After every step it compares loss, gradients, weights, scaling factors, amax histories and
quantized weights, bit for bit. With torchrun it runs on several ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Transformer Engine is imported
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")  # else Megatron refuses fused operations of experts

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core import parallel_state
from support.own_loop import VOCABULARY, config_of, seed, wrapped
from support.own_loop_cases import Case, MicroBatches, forward_step, run_cases
from support.own_loop_steps import (
    counted,
    differing,
    learnt,
    none_differ,
    nothing_told,
    run_schedule,
    step_times,
    timed,
)
from support.training_states import digests

from thdprof.runtime.megatron import install, refusals

MICRO_BATCHES = MicroBatches(tokens=1024, each=5, documents=(12, 3, 8, 20, 16, 3, 12), by_rank=True, distinct_steps=7)
PRECISION = {
    "two": """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  blocks:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: blockwise}
matchers:
  projections: {type: glob, pattern: "*linear_proj*", config: bf16, enabled: true}
  second: {type: glob, pattern: "*linear_fc2*", config: blocks, enabled: true}
"""
}
"""Quantization by the names of modules, as Megatron reads it from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized(Case):
    """A case, and the states that must be among those that are compared."""

    overlap: bool = False
    """Whether gradients are reduced, and parameters gathered, while passes run."""
    precision: str | None = None
    """A name in PRECISION."""
    kinds: tuple[str, ...] = ("quantized parameters",)
    exact: bool = False
    """Whether torch and Megatron are told to choose deterministic kernels."""
    refused: bool = False
    """Whether `install` refuses the case for want of such a run; it is run all the same."""
    steps: int = 4


LAYERS = {"impl": "transformer_engine"}
UP_TO_ROUTER = {"impl": "transformer_engine", "modules": ["attn", "moe_router"]}
SHAPE = {"num_layers": 3, "gradient_accumulation_fusion": True, "hidden_dropout": 0.1}
EXPERTS = {
    **SHAPE,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
PARAMETERS = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}
WORKSPACES = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}
HISTORY = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 8,
    "fp8_amax_compute_algo": "max",
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]}
CHECK = refusals.check
SCALES = ("scaling_fwd, factors", "scaling_fwd, histories", "scaling_bwd, factors", "scaling_bwd, histories")
CACHED = ("quantized weights",)
CASES = {
    "layers": Quantized(config={**SHAPE, **PARAMETERS}, graphs=LAYERS),
    "dropless, overlapped": Quantized(
        config={**EXPERTS, **PARAMETERS}, graphs=UP_TO_ROUTER, experts="dropless", overlap=True
    ),
    "layers, blockwise, overlapped": Quantized(config={**SHAPE, **BLOCKWISE}, graphs=LAYERS, overlap=True, kinds=()),
    "dropless, preprocessed": Quantized(
        config={**EXPERTS, **PARAMETERS, "moe_permute_fusion": True},
        graphs={**UP_TO_ROUTER, "modules": [*UP_TO_ROUTER["modules"], "moe_preprocess"]},
        experts="dropless",
    ),
    "dropless, first layer in bf16": Quantized(
        config={
            **EXPERTS,
            **PARAMETERS,
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 0,
        },
        graphs=UP_TO_ROUTER,
        experts="dropless",
    ),
    "dropless, blockwise": Quantized(
        config={**EXPERTS, **BLOCKWISE}, graphs=UP_TO_ROUTER, experts="dropless", overlap=True, kinds=()
    ),
    "chunk, blockwise": Quantized(
        config={**SHAPE, **BLOCKWISE, "fp8_param": False, "attention_dropout": 0.1}, kinds=CACHED
    ),
    "chunk, blockwise, parameters": Quantized(config={**SHAPE, **BLOCKWISE}, kinds=()),
    "chunk, delayed": Quantized(config={**SHAPE, **HISTORY, "attention_dropout": 0.1}, kinds=(*SCALES, *CACHED)),
    "layers, delayed": Quantized(
        config={**SHAPE, **HISTORY, "attention_dropout": 0.1}, graphs=LAYERS, kinds=(*SCALES, *CACHED), refused=True
    ),
    "dropless, delayed": Quantized(
        config={**EXPERTS, **HISTORY, "fp8_param": True},
        graphs=UP_TO_ROUTER,
        experts="dropless",
        kinds=SCALES,
        refused=True,
    ),
    "two layers a graph, overlapped": Quantized(
        config={**SHAPE, **PARAMETERS}, graphs={"layers_per_graph": 2}, overlap=True
    ),
    "two layers a graph, overlapped, verified": Quantized(
        config={**SHAPE, **PARAMETERS}, graphs={"layers_per_graph": 2, "verify": "1/2"}, overlap=True, exact=True
    ),
    "one layer a graph, delayed, overlapped, verified": Quantized(
        config={**SHAPE, **HISTORY, "attention_dropout": 0.1},
        graphs={"layers_per_graph": 1, "verify": "1/2"},
        overlap=True,
        exact=True,
        kinds=(*SCALES, *CACHED),
    ),
    "one layer a graph, bf16, overlapped, verified": Quantized(
        config={**SHAPE, "attention_dropout": 0.1},
        graphs={"layers_per_graph": 1, "verify": "1/2"},
        overlap=True,
        exact=True,
        kinds=(),
    ),
    "full recompute": Quantized(config={**SHAPE, **PARAMETERS, **FULL, "attention_dropout": 0.1}),
    "full recompute, delayed": Quantized(
        config={**SHAPE, **HISTORY, **FULL, "attention_dropout": 0.1}, kinds=(*SCALES, *CACHED)
    ),
    "full recompute, weights in bf16": Quantized(config={**SHAPE, **WORKSPACES, **FULL}, kinds=CACHED),
    "dropless, recompute": Quantized(
        config={**EXPERTS, **WORKSPACES, **PARTS}, graphs=UP_TO_ROUTER, experts="dropless", kinds=CACHED
    ),
    "dropless, recompute, parameters": Quantized(
        config={**EXPERTS, **PARAMETERS, **PARTS}, graphs=UP_TO_ROUTER, experts="dropless"
    ),
    "nothing kept": Quantized(config={**SHAPE, **WORKSPACES, "disable_parameter_transpose_cache": True}, kinds=()),
    "layers, nothing kept": Quantized(
        config={**SHAPE, **WORKSPACES, "disable_parameter_transpose_cache": True}, graphs=LAYERS, kinds=()
    ),
    "layers, nothing kept, parameters": Quantized(
        config={**SHAPE, **PARAMETERS, "disable_parameter_transpose_cache": True}, graphs=LAYERS
    ),
    "dropless, fused operations": Quantized(
        config={
            **EXPERTS,
            **PARAMETERS,
            "use_transformer_engine_op_fuser": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        },
        graphs=UP_TO_ROUTER,
        experts="dropless",
    ),
    "by module": Quantized(config={**SHAPE, **WORKSPACES}, precision="two", kinds=CACHED),
    "layers, by module": Quantized(config={**SHAPE, **WORKSPACES}, graphs=LAYERS, precision="two", kinds=CACHED),
    "dropless, by module": Quantized(
        config={**EXPERTS, **WORKSPACES}, graphs=UP_TO_ROUTER, experts="dropless", precision="two", kinds=CACHED
    ),
}
"""Cases for one rank, or for data-parallel ranks."""
OVERLAPPED = {**EXPERTS, "expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}


def _of_two_ranks(**config: Any) -> Quantized:
    """Overlapped expert communication and delayed weight gradients, with those of data parallelism or without."""
    return Quantized(
        config={**OVERLAPPED, "delay_wgrad_compute": True, **config},
        graphs=UP_TO_ROUTER,
        experts="dropless",
        overlap=True,
        sizes={"expert_model_parallel_size": 2},
        kinds=() if config.get("fp8_recipe") == "blockwise" else ("quantized parameters",),
    )


TWO_RANKS = {
    "overlapped experts, parameters": _of_two_ranks(**PARAMETERS),
    "overlapped experts, parameters, recompute": _of_two_ranks(**PARAMETERS, **PARTS, qk_layernorm=True),
    "overlapped experts, blockwise": _of_two_ranks(**BLOCKWISE),
}
"""Cases for two ranks."""


def main(names: list[str]) -> None:
    """Run the cases of these names, or all of one rank."""
    run_cases(names or [*CASES], CASES | TWO_RANKS, result_of)


def result_of(case: Quantized) -> str:
    """How a case's two runs differ."""
    return compared(case, *(trained(case, replay=replay) for replay in (False, True)))


def model_of(case: Quantized) -> tuple[Any, Any]:
    """A new model of a case as Megatron's training wraps it, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.quantization.quant_config import RecipeConfig

    values = {**case.config, "deterministic_mode": case.exact}
    if case.precision is not None:
        import yaml

        values["quant_recipe"] = RecipeConfig.from_config_dict(yaml.safe_load(PRECISION[case.precision]))
    config = config_of(**values)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=values.get("num_moe_experts"), moe_grouped_gemm=case.experts != "none"
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=MICRO_BATCHES.tokens,
        position_embedding_type="rope",
    )
    wrapping = {"overlap_grad_reduce": case.overlap, "overlap_param_gather": case.overlap}
    wrapping["delay_wgrad_compute"] = config.delay_wgrad_compute
    return wrapped(
        model, config, use_distributed_optimizer=True, fp8_param_gather=bool(config.fp8_param), **wrapping
    ), config


def trained(case: Quantized, *, replay: bool) -> dict[str, Any]:
    """Losses and digests of the states of a run of a new model, and its counters."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.use_deterministic_algorithms(case.exact)
    seed()
    model, config = model_of(case)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=2e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=case.overlap,
            fp8_recipe=config.fp8_recipe if config.fp8_param else None,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        group["lr"] = 2e-3
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlap:
        config.no_sync_func = model.no_sync
        model.disable_forward_pre_hook(param_sync=False)
    told: dict[str, Any] = {**nothing_told(), "states": []}
    refusals.check = (lambda *_: None) if case.refused else CHECK
    with install(model, MICRO_BATCHES.plan_of(case), config, replay=replay, say=lambda line: None) as installation:
        for step in range(case.steps):
            with timed(told["step_ms"]):
                model.zero_grad_buffer()
                optimizer.zero_grad()
                told["losses"] += run_schedule(
                    model,
                    forward_step,
                    MICRO_BATCHES.text(step),
                    count=MICRO_BATCHES.each,
                    tokens=MICRO_BATCHES.tokens,
                )
                _, norm, _ = optimizer.step()
            told["norms"].append(float(norm))
            told["states"].append(digests([model]))
            if case.overlap and step == 0:
                model.enable_forward_pre_hook()
        told["stats"] = installation.stats()
    return told


def compared(case: Quantized, eager: dict[str, Any], replayed: dict[str, Any]) -> str:
    """Whether two runs left the same behind after each step, and what was compared."""
    told = differing(eager, replayed, ("losses", "norms"))
    equal = none_differ(told)
    for step, (ours, theirs) in enumerate(zip(replayed["states"], eager["states"], strict=True)):
        if wrong := [kind for kind in ours.keys() | theirs if ours.get(kind) != theirs.get(kind)]:
            equal = False
            told.append(f"after step {step} differ {', '.join(sorted(wrong))}")
            break
    there = replayed["states"][-1]
    if missing := {*case.kinds, "gradients", "weights"} - {*there}:
        equal, told = False, [*told, f"no {', '.join(sorted(missing))} to compare"]
    moving = [kind for kind in there if len({states[kind] for states in replayed["states"]}) > 1]
    if still := {*case.kinds} - {*moving, "scaling_fwd, factors"}:
        equal, told = False, [*told, f"{', '.join(sorted(still))} stay the same"]
    stats = replayed["stats"]
    if len(stats.replays) < 2 or not stats.fallbacks.total():
        equal = False
    if case.graphs.get("verify"):
        equal = equal and not stats.mismatches and stats.verified.total() >= 4
        told.append(f"{stats.verified.total()} verified, {stats.mismatches.total()} mismatches")
    moved, text = learnt(eager["losses"], case.steps)
    told += [f"compared {', '.join(there)}", text]
    told.append(counted(stats, MICRO_BATCHES.numbers_of(case, parallel_state.get_data_parallel_rank())))
    told.append(step_times(padded=eager, replayed=replayed))
    return f"{'equal' if equal and moved else 'not equal'}: {'; '.join(told)}"


if __name__ == "__main__":
    main(sys.argv[1:])
