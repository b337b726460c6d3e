"""Small models with dropless experts on a GPU: `python tests/gpu/gpu_experts_cases.py NAME[@STEPS]...`, or all.

Each case trains twice by the same micro-batches, some of which fit no bucket, padded eagerly and through graphs, and
compares losses, gradients and the routers' counts bit for bit. The weights follow the gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Transformer Engine is imported
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("THDPROF_UNMEASURED", "allow")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.own_loop import SMALL, VOCABULARY, wrapped
from support.own_loop_cases import run_cases
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

from thdprof.plan import Plan
from thdprof.runtime.megatron import install, packed_seq_params
from thdprof.runtime.megatron.opening import MetadataForm

TOKENS, EACH = 512, 5
"""Tokens of a micro-batch; micro-batches of a step."""
DOCUMENTS = (3, 12, 1, 20, 8)
"""Numbers of documents of a step's micro-batches; buckets hold 8 and 16."""
ROUTER = ("attn", "moe_router")
PREPROCESSED = (*ROUTER, "moe_preprocess")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and what of its layers is captured."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    modules: tuple[str, ...] = ROUTER
    """The plan's graphs.modules."""
    samples: int = 1
    """Samples of a micro-batch."""
    masked: bool = False
    """Whether the model gets a padding mask."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Sizes of Megatron's process groups."""
    steps: int = 2

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of each of several samples of a micro-batch."""
        return None if self.samples == 1 else TOKENS // self.samples


GROUPS = {
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
CASES = {
    "router": Case(),
    "preprocess": Case(config={"moe_permute_fusion": True}, modules=PREPROCESSED),
    "fusions": Case(config={"moe_permute_fusion": True, "moe_router_fusion": True, "moe_router_dtype": "fp32"}),
    "groups": Case(config={**GROUPS, "moe_z_loss_coeff": 1e-3}),
    "shared": Case(config={"moe_shared_expert_intermediate_size": 128}),
    "overlapped": Case(
        config={"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_overlap": True, "hidden_dropout": 0.1}
    ),
    "samples": Case(config={"moe_router_load_balancing_type": "seq_aux_loss"}, samples=2),
    "masked": Case(config={"moe_z_loss_coeff": 1e-3}, masked=True),
    "global": Case(config={"moe_router_load_balancing_type": "global_aux_loss"}),
    "forced": Case(config={"moe_router_force_load_balancing": True}),
    "recomputed": Case(
        config={
            "recompute_granularity": "selective",
            "recompute_modules": ["moe", "layernorm"],
            "moe_shared_expert_intermediate_size": 128,
            "hidden_dropout": 0.1,
        }
    ),
    "recomputed after preprocess": Case(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"], "moe_permute_fusion": True},
        modules=PREPROCESSED,
    ),
    "recomputed in fp8": Case(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"], **FP8},
    ),
    "all recomputed": Case(config={**FULL, "hidden_dropout": 0.1}),
    "all recomputed in fp8": Case(config={**FULL, **FP8}),
    "padded to capacity": Case(
        config={"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True, **GROUPS}
    ),
    "latent": Case(config={**LATENT, "moe_shared_expert_intermediate_size": 128, **GROUPS}),
    "latent recomputed": Case(
        config={
            **LATENT,
            **GROUPS,
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "layernorm", "moe_act"],
            "moe_router_force_load_balancing": True,
        }
    ),
}


def built(case: Case) -> tuple[Any, Any]:
    """The model of a case as Megatron's training wraps it, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    values = {
        **SMALL,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 128,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        **case.config,
    }
    latent = bool(values.get("multi_latent_attention"))
    config = (MLATransformerConfig if latent else TransformerConfig)(**values)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=8, moe_grouped_gemm=True, multi_latent_attention=latent
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )
    return wrapped(model, config), config


def plan_of(case: Case) -> Plan:
    """A plan of buckets that hold 8 and 16 documents; micro-batches of 20 fall back."""
    documents = documents_of(case)
    plan = plan_of_shares(
        shares_of(documents),
        count=len(documents),
        steps=case.steps,
        seq_length=TOKENS,
        global_batch_size=EACH,
        experts="dropless",
    )
    return fitted(plan, {"impl": "transformer_engine", "modules": list(case.modules)}, tokens=TOKENS)


def documents_of(case: Case) -> list[int]:
    """Numbers of documents of all micro-batches."""
    return [*DOCUMENTS] * case.steps


def trained(case: Case, *, replay: bool) -> dict[str, Any]:
    """Losses, gradients, routers' counts and counters of a run of a new model."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().metrics.clear()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, force_reset_rng=True)
    model, config = built(case)
    told = nothing_told() | {"counts": []}
    form = MetadataForm(tokens_per_sample=case.tokens_per_sample)
    with install(model, plan_of(case), config, replay=replay, form=form) as installation:
        for step in range(case.steps):
            forward = partial(forward_step, case)
            descend(model, partial(run_schedule, model, forward, batches(step), count=EACH, tokens=TOKENS), told)
            told["counts"] += routed(model)
        told["stats"] = installation.stats()
    return told


def batches(step: int) -> Iterator[dict[str, Any]]:
    """The micro-batches of a step."""
    for number, documents in enumerate(DOCUMENTS):
        random = np.random.default_rng([step % DISTINCT_STEPS, number])
        bounds = bounds_of(random, documents, TOKENS)
        tokens = torch.from_numpy(random.integers(1, VOCABULARY, (2, TOKENS))).cuda()
        mask = torch.from_numpy(random.random((1, TOKENS)) < 0.2).cuda()
        yield {"bounds": bounds, "tokens": tokens[:1], "labels": tokens[1:], "mask": mask}


def forward_step(case: Case, data: Iterator[dict[str, Any]], model: Any) -> Any:
    """What Megatron's schedule calls for a micro-batch."""
    batch = next(data)
    positions = torch.arange(TOKENS, device="cuda")[None]
    params = packed_seq_params(batch["bounds"])
    params.tokens_per_sample = case.tokens_per_sample
    more = {"padding_mask": batch["mask"]} if case.masked else {}
    output = model(batch["tokens"], positions, None, labels=batch["labels"], packed_seq_params=params, **more)
    return output, mean_loss


def routed(model: Any) -> list[list[float]]:
    """What the routers counted in a step, by expert; the counts begin anew."""
    found = []
    for name, buffer in model.named_buffers():
        if "tokens_per_expert" in name or "ga_steps" in name:
            found.append(buffer.flatten().tolist())
            buffer.zero_()
    return found


def main(names: list[str]) -> None:
    """Run the cases of these names, or all."""
    run_cases(names or [*CASES], CASES, result_of)


def result_of(case: Case) -> str:
    """How a case's two runs differ."""
    eager, replayed = trained(case, replay=False), trained(case, replay=True)
    return verdict(eager, replayed, steps=case.steps, documents=documents_of(case), more=("counts",))


if __name__ == "__main__":
    main(sys.argv[1:])
