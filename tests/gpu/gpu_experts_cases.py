"""Small models with dropless experts on a GPU: `python tests/gpu/gpu_experts_cases.py NAME[@STEPS]...`, or all.

Each case trains twice by the same micro-batches, some of which fit no bucket, padded eagerly and through graphs, and
compares losses, gradients and the routers' counts bit for bit. The weights follow the gradients.
"""

from __future__ import annotations

import itertools
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
WHOLE = {"impl": "transformer_engine", "modules": []}
CHUNK = {"impl": "chunk", "modules": []}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(Case):
    """One layer of experts by grouped products, beside the same layer whose experts are multiplied one by one."""

    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Case):
    """A model with experts, captured up to their router unless its graphs say more."""

    graphs: dict[str, Any] = field(default_factory=ROUTER.copy)
    experts: str = "dropless"
    samples: int = 1
    """Samples of a micro-batch."""
    masked: bool = False
    """Whether the model gets a padding mask."""
    fused: bool = False
    """Whether experts' layers add the gradients of their weights to `main_grad` themselves."""
    wrapping: dict[str, Any] = field(default_factory=dict)
    """Settings of DistributedDataParallel."""
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
APART, FAR = 0.02, 0.05
"""Relative differences within which bf16 products of another order lie: of a tensor; of losses and norms of steps."""
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
    "products": Products(),
    "whole": Experts(graphs=WHOLE),
    "whole fused": Experts(graphs=WHOLE, fused=True, wrapping=OVERLAPPED),
    "whole chunk": Experts(graphs=CHUNK),
    "whole chunk fused": Experts(graphs=CHUNK, fused=True, wrapping=OVERLAPPED),
    "whole chunk layer by layer": Experts(graphs={**CHUNK, "layers_per_graph": 1}, fused=True, wrapping=OVERLAPPED),
    "whole groups": Experts(config={**GROUPS, "moe_z_loss_coeff": 1e-3}, graphs=WHOLE, fused=True),
    "whole chunk groups": Experts(config={**GROUPS, "moe_z_loss_coeff": 1e-3}, graphs=CHUNK, fused=True),
    "whole shared": Experts(
        config={"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_overlap": True, "hidden_dropout": 0.1},
        graphs=WHOLE,
        fused=True,
    ),
    "whole masked": Experts(config={"moe_z_loss_coeff": 1e-3}, graphs=CHUNK, masked=True),
    "whole recomputed": Experts(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
        graphs=CHUNK,
        fused=True,
    ),
    "whole moe recomputed": Experts(
        config={"recompute_granularity": "selective", "recompute_modules": ["moe"], "hidden_dropout": 0.1},
        graphs=CHUNK,
    ),
    "whole all recomputed": Experts(config={**FULL, "hidden_dropout": 0.1}, graphs=CHUNK, fused=True),
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
    for part in model.modules():
        if case.fused and hasattr(part, "num_gemms"):
            part.fuse_wgrad_accumulation = True
    model = wrapped(model, config, **case.wrapping)
    config.no_sync_func = model.no_sync if case.wrapping else None
    return model, config


def trained(case: Experts, *, replay: bool | None) -> dict[str, Any]:
    """Losses, gradients, routers' counts and counters of a run of a new model; None: without thdprof."""
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


def result_of(case: Experts | Products) -> str:
    """How a case's two runs differ; where graphs hold whole layers, also from a run by megatron-core's own experts."""
    if isinstance(case, Products):
        return products()
    eager, replayed = trained(case, replay=False), trained(case, replay=True)
    told = verdict(eager, replayed, steps=case.steps, documents=MICRO_BATCHES.numbers_of(case), more=("counts",))
    if case.graphs["modules"] or case.config.get("hidden_dropout"):
        return told
    own = trained(case, replay=None)
    apart = max(abs(a / b - 1) for name in ("losses", "norms") for a, b in zip(own[name], eager[name], strict=True))
    return f"{told}; from megatron-core's own experts {apart:.1e}" if apart < FAR else f"{apart} apart; {told}"


def products() -> str:
    """How grouped products differ from products one by one, and replayed from eager ones, over several routings."""
    from support.grouped_layers import expert_layer, lay, with_main_grads

    from thdprof.runtime.megatron.gradient_sums import add_gradients
    from thdprof.runtime.megatron.grouped_experts import find_expert_layers, grouped

    for dtype, number in itertools.product((torch.float32, torch.bfloat16), (4096, 4099)):
        totals, found = torch.randn(5, number, device="cuda").to(dtype), torch.randn(5, number, device="cuda")
        sums = (totals.float() + found.bfloat16().float()).to(dtype)
        add_gradients(totals, found.bfloat16())
        if not torch.equal(totals, sums):
            return f"sums in {dtype} of {number} gradients differ"
    sizes = {"hidden_size": 256, "moe_ffn_hidden_size": 128, "gated_linear_unit": True, "moe_router_topk": 2}
    sizes |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "params_dtype": torch.bfloat16}
    own, ours = (expert_layer(**sizes).cuda().bfloat16() for _ in range(2))
    for layer, is_ours in ((own, False), (ours, True)):
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.fuse_wgrad_accumulation = is_ours
            lay(list(linear.parameters()), "reversed")
        layer.router.weight.data.mul_(0.05)
    with_main_grads(ours, "reversed")
    static = torch.zeros(TOKENS, 1, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def passed(layer: Any) -> list[torch.Tensor]:
        weights = list(layer.experts.parameters())
        for weight in weights:
            if hasattr(weight, "main_grad"):
                weight.main_grad.zero_()
        output, _ = layer(static)
        found = torch.autograd.grad(output.float().square().sum(), [static, layer.router.weight, *weights])
        sums = [getattr(w, "main_grad", g) for w, g in zip(weights, found[2:], strict=True)]
        return [output, *found[:2], *sums]

    worst, least = 0.0, TOKENS
    with grouped(find_expert_layers([ours])):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            passed(ours)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = passed(ours)
        for number, common in enumerate((0.0, 0.3, 1.0, 30.0)):
            torch.manual_seed(number)
            with torch.no_grad():
                static.copy_(torch.randn_like(static) + common * torch.randn(256, device="cuda"))
            least = min(least, int(own.router(static)[1].sum(0).min()))
            eager = [t.clone() for t in passed(ours)]
            graph.replay()
            if unequal := [i for i, (a, b) in enumerate(zip(held, eager, strict=True)) if not torch.equal(a, b)]:
                return f"replay differs from eager in tensors {unequal} of routing {number}"
            compared = list(zip(eager, passed(own), strict=True))
            for a, b in (*compared[:2], *compared[3:]):  # the router's gradient may be nothing but rounding
                worst = max(worst, float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6)))
    return f"{'equal: ' if worst < APART and least == 0 else ''}fewest tokens {least}, one by one within {worst:.1e}"


if __name__ == "__main__":
    main(sys.argv[1:])
