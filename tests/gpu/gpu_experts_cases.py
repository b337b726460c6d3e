"""Small models with dropless experts on a GPU: `python tests/gpu/gpu_experts_cases.py NAME...`, or all without a name.

Each case runs the same micro-batches eagerly and through graphs of one model, some of which fit no bucket, and compares
losses, gradients and the routers' counts bit for bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before Transformer Engine is imported
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("THDPROF_UNMEASURED", "allow")

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.own_loop import SMALL, VOCABULARY, process_groups, wrapped

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import install, packed_seq_params
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.surroundings import generators

TOKENS = 512
CAPS = (3, 6)
BOUNDS = ([0, 100, 512], [0, 50, 128, 300, 420, 512], [0, 512], [0, *range(9, 90, 9), 512], [0, 7, 256, 512])
"""Documents of the micro-batches; the fourth one fits no bucket."""
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


def plan_of(directory: Path, case: Case) -> Plan:
    """A plan of two buckets."""
    (directory / "packs.jsonl").write_text('{"lengths": [100, 412]}\n' * 64)
    analysis = analyze_dataset(directory / "packs.jsonl", loader="single", seq_length=TOKENS, buckets=1)
    values = make_plan(analysis, impl="chunk").model_dump(mode="json", by_alias=True)
    values["training"]["experts"] = "dropless"
    values["graphs"] |= {
        "impl": "transformer_engine",
        "modules": list(case.modules),
        "verify": None,
        "buckets": [{"max_seqs": cap, "max_seqlen": TOKENS, "share": 0.5} for cap in CAPS],
    }
    return Plan.model_validate(values)


def seen_of(model: Any, config: Any, plan: Plan, case: Case, *, replay: bool) -> tuple[list[torch.Tensor], Any]:
    """Losses, gradients and counts of the micro-batches, and the counters of how they ran."""
    positions = torch.arange(TOKENS, device="cuda")[None]
    random = torch.Generator().manual_seed(5)
    model.zero_grad_buffer()
    for buffer_name, buffer in model.named_buffers():
        if "tokens_per_expert" in buffer_name or "ga_steps" in buffer_name:
            buffer.zero_()
    a_sample = None if case.samples == 1 else TOKENS // case.samples
    seen = []
    with install(model, plan, config, replay=replay, form=MetadataForm(tokens_per_sample=a_sample)) as installation:
        for bounds in BOUNDS:
            tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=random).cuda()
            mask = (torch.rand(1, TOKENS, generator=random) < 0.2).cuda()
            params = packed_seq_params(bounds)
            params.tokens_per_sample = a_sample
            more = {"padding_mask": mask} if case.masked else {}
            found = model(tokens, positions, None, packed_seq_params=params, **more)
            loss = found.float().square().mean()
            loss.backward()
            seen.append(loss.detach().clone())
        told = installation.stats()
    seen += [p.main_grad.clone() for p in model.parameters()]
    seen += [b.clone() for name, b in model.named_buffers() if "tokens_per_expert" in name]
    return seen, told


def compared(name: str, directory: Path) -> None:
    """Run one case both ways."""
    case = CASES[name]
    model, config = built(case)
    plan = plan_of(directory, case)
    states = [torch.cuda.default_generators[torch.cuda.current_device()], *generators()]
    before = [state.get_state() for state in states]
    found = []
    for replay in (False, True):
        for state, value in zip(states, before, strict=True):
            state.set_state(value)
        seen, told = seen_of(model, config, plan, case, replay=replay)
        found.append(seen)
    assert told.replays.total() == len(BOUNDS) - 1, str(told)
    assert told.fallbacks == {FallbackReason.too_many_seqs: 1}, str(told)
    differ = [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    assert not differ, f"{len(differ)} of {len(found[0])} tensors differ, first {differ[:5]}"
    assert sum(bool(tensor.any()) for tensor in found[1]) > len(BOUNDS) + 10


def main() -> int:
    """Run the cases that are named, or all, and tell how each went."""
    failed = 0
    with process_groups():
        for name in sys.argv[1:] or CASES:
            try:
                with tempfile.TemporaryDirectory() as directory:
                    compared(name, Path(directory))
                verdict = "ok"
            except Exception as error:
                failed += 1
                verdict = f"FAILED {type(error).__name__}: {error}"[:1500]
            print(f"{name}: {verdict}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
