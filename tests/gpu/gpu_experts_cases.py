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

from support.own_loop import SMALL, VOCABULARY, seed, wrapped
from support.own_loop_cases import Case, MicroBatches, descended, run_cases
from support.own_loop_steps import verdict

from thdprof.runtime.megatron.opening import MetadataForm

TOKENS = 512
MICRO_BATCHES = MicroBatches(tokens=TOKENS, each=5, documents=(3, 12, 1, 20, 8))
ROUTER = {"impl": "transformer_engine", "modules": ["attn", "moe_router"]}
PREPROCESSED = {"impl": "transformer_engine", "modules": ["attn", "moe_router", "moe_preprocess"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Case):
    """A model with experts, captured up to their router unless its graphs say more."""

    graphs: dict[str, Any] = field(default_factory=ROUTER.copy)
    experts: str = "dropless"
    samples: int = 1
    """Samples of a micro-batch."""
    masked: bool = False
    """Whether the model gets a padding mask."""
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
    "router": Experts(),
    "preprocess": Experts(config={"moe_permute_fusion": True}, graphs=PREPROCESSED),
    "fusions": Experts(config={"moe_permute_fusion": True, "moe_router_fusion": True, "moe_router_dtype": "fp32"}),
    "groups": Experts(config={**GROUPS, "moe_z_loss_coeff": 1e-3}),
    "shared": Experts(config={"moe_shared_expert_intermediate_size": 128}),
    "overlapped": Experts(
        config={"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_overlap": True, "hidden_dropout": 0.1}
    ),
    "samples": Experts(config={"moe_router_load_balancing_type": "seq_aux_loss"}, samples=2),
    "masked": Experts(config={"moe_z_loss_coeff": 1e-3}, masked=True),
    "global": Experts(config={"moe_router_load_balancing_type": "global_aux_loss"}),
    "forced": Experts(config={"moe_router_force_load_balancing": True}),
    "recomputed": Experts(
        config={
            "recompute_granularity": "selective",
            "recompute_modules": ["moe", "layernorm"],
            "moe_shared_expert_intermediate_size": 128,
            "hidden_dropout": 0.1,
        }
    ),
    "recomputed after preprocess": Experts(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"], "moe_permute_fusion": True},
        graphs=PREPROCESSED,
    ),
    "recomputed in fp8": Experts(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"], **FP8},
    ),
    "all recomputed": Experts(config={**FULL, "hidden_dropout": 0.1}),
    "all recomputed in fp8": Experts(config={**FULL, **FP8}),
    "padded to capacity": Experts(
        config={"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True, **GROUPS}
    ),
    "latent": Experts(config={**LATENT, "moe_shared_expert_intermediate_size": 128, **GROUPS}),
    "latent recomputed": Experts(
        config={
            **LATENT,
            **GROUPS,
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "layernorm", "moe_act"],
            "moe_router_force_load_balancing": True,
        }
    ),
}


def built(case: Experts) -> tuple[Any, Any]:
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


def trained(case: Experts, *, replay: bool) -> dict[str, Any]:
    """Losses, gradients, routers' counts and counters of a run of a new model."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().metrics.clear()
    seed()
    model, config = built(case)
    counts: list[list[float]] = []
    told = descended(
        case,
        model,
        config,
        MICRO_BATCHES,
        replay=replay,
        batches=partial(batches, case),
        after_step=lambda _: counts.extend(routed(model)),
        form=MetadataForm(tokens_per_sample=case.tokens_per_sample),
    )
    return told | {"counts": counts}


def batches(case: Experts, step: int) -> Iterator[dict[str, Any]]:
    """The micro-batches of a step."""
    for number, batch in enumerate(MICRO_BATCHES.text(step)):
        random = np.random.default_rng([step % MICRO_BATCHES.distinct_steps, number])
        mask = torch.from_numpy(random.random((1, TOKENS)) < 0.2).cuda()
        more = {"padding_mask": mask} if case.masked else {}
        yield {**batch, "tokens_per_sample": case.tokens_per_sample, "more": more}


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


def result_of(case: Experts) -> str:
    """How a case's two runs differ."""
    eager, replayed = trained(case, replay=False), trained(case, replay=True)
    return verdict(eager, replayed, steps=case.steps, documents=MICRO_BATCHES.numbers_of(case), more=("counts",))


if __name__ == "__main__":
    main(sys.argv[1:])
