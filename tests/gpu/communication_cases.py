"""Communication inside graphs, on two ranks: `torchrun --nproc-per-node 2 tests/gpu/communication_cases.py NAME...`.

Each case trains a small model by micro-batches of other shapes, padded eagerly and then replayed, and prints a line.
The weights follow the gradients, so that a wrong one shows in all later losses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from support.own_loop import VOCABULARY, config_of, process_groups, wrapped
from support.plans import plan_of_shares

from thdprof.runtime.megatron import install, packed_seq_params
from thdprof.runtime.megatron.refusals import settings

TOKENS, STEPS, EACH = 1024, 5, 4
"""Tokens of a micro-batch on all ranks; steps; micro-batches of a step."""
DOCUMENTS = (3, 8, 12, 16, 20)
"""Numbers of documents that micro-batches have in turn; buckets hold 8 and 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of communication."""

    sizes: dict[str, Any]
    """Sizes of Megatron's process groups."""
    config: dict[str, Any]
    """Fields of the TransformerConfig."""
    experts: int | None = None
    padded: bool = False
    """Whether the experts are padded to capacity."""
    user_buffers: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    """Changes of the plan's graphs."""


TWO = {"hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4, "num_layers": 3}
EXPERTS = {
    **TWO,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 512,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "expert_model_parallel_size": 2,
}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
OVERLAPPED = {**EXPERTS, "overlap_moe_expert_parallel_comm": True}
DELAYED = {**OVERLAPPED, "delay_wgrad_compute": True}
DENSE_FIRST = {"moe_layer_freq": [0, 1, 1]}
UP_TO_ROUTER = {"impl": "transformer_engine", "modules": ["attn", "moe_router"]}
HYBRID_EP = {
    **EXPERTS,
    "hidden_size": 256,
    "num_moe_experts": 8,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_permute_fusion": True,
    "moe_router_dtype": "fp32",
}
PADDED = {**HYBRID_EP, "moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
WITHIN_CAPACITY = {
    **HYBRID_EP,
    "moe_expert_rank_capacity_factor": 4.0,
    "use_transformer_engine_op_fuser": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}
"""With a static number of tokens of all experts of a rank, of which HybridEP tells nothing to the host."""


def _of_experts(config: dict[str, Any], *more: str, plan: dict[str, Any] | None = None) -> Case:
    """Experts over two ranks, in graphs up to their routers and of these parts more, or as `plan` says."""
    graphs = {**UP_TO_ROUTER, "modules": [*UP_TO_ROUTER["modules"], *more]} if plan is None else plan
    padded = bool(config.get("moe_pad_expert_input_to_capacity"))
    return Case(sizes={"expert_model_parallel_size": 2}, config=config, experts=4, padded=padded, plan=graphs)


CASES = {
    "user_buffers": Case(
        sizes={"tensor_model_parallel_size": 2},
        config={
            **TWO,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
        },
        user_buffers=True,
    ),
    "rings": Case(sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2}),
    "all_to_all": Case(
        sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2, "cp_comm_type": "a2a"}
    ),
    "all_to_all_unfused_rope": Case(
        sizes={"context_parallel_size": 2},
        config={**TWO, "context_parallel_size": 2, "cp_comm_type": "a2a", "apply_rope_fusion": False},
    ),
    "all_to_all_gpt_oss": Case(
        sizes={"context_parallel_size": 2},
        config={
            **TWO,
            "context_parallel_size": 2,
            "cp_comm_type": "a2a",
            "apply_rope_fusion": False,
            "softmax_type": "learnable",
            "window_size": (127, 0),
            "window_attn_skip_freq": 2,
            "add_bias_linear": True,
        },
    ),
    "all_gather": Case(
        sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2, "cp_comm_type": "all_gather"}
    ),
    "deferred_output_gradients": Case(
        sizes={"pipeline_model_parallel_size": 2},
        config={
            **TWO,
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.bfloat16,
            "gradient_accumulation_fusion": True,
            "defer_embedding_wgrad_compute": True,
        },
    ),
    "last_stage_without_layers": Case(
        sizes={"pipeline_model_parallel_size": 2},
        config={
            **TWO,
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.bfloat16,
            "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 4], ["loss"]],
        },
    ),
    "experts": Case(sizes={"expert_model_parallel_size": 2}, config=EXPERTS, experts=4, plan=UP_TO_ROUTER),
    "experts_overlapped": _of_experts(OVERLAPPED),
    "experts_overlapped_delayed": _of_experts(DELAYED),
    "experts_overlapped_fp8": _of_experts({**OVERLAPPED, **FP8}),
    "experts_overlapped_delayed_fp8": _of_experts({**DELAYED, **FP8}),
    "dense_layer_first_overlapped_delayed_fp8": _of_experts(
        {**DELAYED, **FP8, **DENSE_FIRST, "gradient_accumulation_fusion": True}
    ),
    "shared_experts_overlapped_delayed": _of_experts(
        {**DELAYED, "moe_shared_expert_intermediate_size": 512, "qk_layernorm": True}
    ),
    "multi_token_prediction_overlapped": _of_experts({**DELAYED, "mtp_num_layers": 1}),
    "experts_recomputed": _of_experts(
        {**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}
    ),
    "hybrid_ep": _of_experts(HYBRID_EP),
    "hybrid_ep_preprocessed": _of_experts(HYBRID_EP, "moe_preprocess"),
    "hybrid_ep_forced_balance": _of_experts({**HYBRID_EP, "moe_router_force_load_balancing": True}),
    "hybrid_ep_overlapped": _of_experts({**HYBRID_EP, "overlap_moe_expert_parallel_comm": True}),
    "hybrid_ep_fp8": _of_experts({**HYBRID_EP, **FP8}),
    "hybrid_ep_padded": _of_experts(PADDED),
    "hybrid_ep_padded_whole": _of_experts(PADDED, plan={}),
    "hybrid_ep_within_capacity": _of_experts(WITHIN_CAPACITY),
    "hybrid_ep_whole": _of_experts(WITHIN_CAPACITY, plan={"impl": "transformer_engine", "modules": []}),
    "hybrid_ep_paged_stash": _of_experts({**WITHIN_CAPACITY, "moe_paged_stash": True}),
}


def main(names: list[str]) -> None:
    """Run the cases, each in process groups of its own."""
    failed = []
    for name in names:
        case = CASES[name]
        with process_groups(**case.sizes), user_buffers(case), hybrid_ep_buffer():
            try:
                eager, replayed = trained(case, replay=False), trained(case, replay=True)
                told = compared(eager, replayed)
            except Exception as error:
                told = f"failed: {type(error).__name__}: {error}"
                if os.environ.get("RANK", "0") == "0":
                    import traceback

                    traceback.print_exc()
            if not told.startswith("equal"):
                failed.append(name)
            print(f"rank {os.environ.get('RANK', '0')}: {name}: {told}", flush=True)
            if told.startswith("failed"):
                os._exit(1)  # the other rank may wait in a collective
    print("ok" if not failed else f"not equal: {failed}", flush=True)
    sys.exit(bool(failed))


@contextmanager
def user_buffers(case: Case) -> Iterator[None]:
    """Transformer Engine's buffers, as Megatron's own initialisation makes them."""
    if not case.user_buffers:
        yield
        return
    from transformer_engine.pytorch.module import base

    base.initialize_ub(
        shape=[TOKENS, case.config["hidden_size"]],
        tp_size=2,
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        dtype=torch.bfloat16,
        bootstrap_backend="nccl",
    )
    try:
        yield
    finally:
        base.destroy_ub()


@contextmanager
def hybrid_ep_buffer() -> Iterator[None]:
    """HybridEP's buffer, which megatron-core makes in the first dispatch for the process groups of that time, is given
    up at the end of the block.
    """
    from megatron.core.transformer.moe import fused_a2a

    try:
        yield
        torch.distributed.barrier()  # the other rank may still read this one's buffer
    finally:
        fused_a2a.reset_hybrid_ep_buffer()


def trained(case: Case, *, replay: bool) -> dict[str, Any]:
    """Losses, gradients and counters of a run of a new model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().metrics.clear()  # which have as many layers as the first model had
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, force_reset_rng=True)
    config = config_of(**case.config)
    spec: Any
    if case.experts is None:
        spec = get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    predictions = None
    if config.mtp_num_layers:
        predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
    model = wrapped(
        GPTModel(
            config=config,
            transformer_layer_spec=spec,
            mtp_block_spec=predictions,
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ),
        config,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )
    plan = plan_of(case)
    # Cases that install still refuses, for want of such a run, are run all the same.
    settings.check = lambda *args, **kwargs: None
    told: dict[str, Any] = {"losses": [], "gradients": []}
    with install(model, plan, config, replay=replay, say=print) as installation:
        for step in range(STEPS):
            model.zero_grad_buffer()
            given = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches(step, config),
                model=[model],
                num_microbatches=EACH,
                seq_length=TOKENS,
                micro_batch_size=1,
                forward_only=False,
            )
            model.finish_grad_sync() if hasattr(model, "finish_grad_sync") else None
            told["losses"] += [part["loss"].item() for part in given]
            for parameter in model.parameters():
                told["gradients"].append(parameter.main_grad.double().sum().item())
                parameter.data.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.05)
        stats = installation.stats()
        told["counts"] = {"captures": stats.captures, "replays": sum(stats.replays.values())}
        told["counts"] |= {reason.name: number for reason, number in stats.fallbacks.items() if number}
    return told


def plan_of(case: Case) -> Any:
    """A plan of buckets that hold 8 and 16 documents; micro-batches of 20 fall back."""
    context = case.sizes.get("context_parallel_size", 1)
    stages = case.sizes.get("pipeline_model_parallel_size", 1)
    data_parallel = parallel_state.get_data_parallel_world_size()
    plan = plan_of_shares(
        [0.4, 0.4],
        count=STEPS * EACH * data_parallel,
        steps=STEPS,
        context_parallel_size=context,
        pipeline_parallel_size=stages,
        data_parallel_size=data_parallel,
        seq_length=TOKENS,
        global_batch_size=EACH * data_parallel,
        experts="none" if case.experts is None else "padded" if case.padded else "dropless",
    )
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"slots": [[stages - rank] for rank in range(stages)], **case.plan}
    for bucket in values["graphs"]["buckets"]:
        bucket |= {"max_seqlen": TOKENS, "cp_size": context}
    values["microbatches"]["n_tokens_max"] = TOKENS
    return type(plan).model_validate(values)


def batches(step: int, config: Any) -> Iterator[dict[str, Any]]:
    """Micro-batches of a step: of the same documents on ranks that share them, and of others on others."""
    rank = parallel_state.get_data_parallel_rank()
    context = config.context_parallel_size
    for number in range(EACH):
        random = np.random.default_rng([step, number, rank])
        documents = DOCUMENTS[(step * EACH + number) % len(DOCUMENTS)]
        cuts = np.sort(random.choice(np.arange(1, TOKENS // 8), documents - 1, replace=False)) * 8
        tokens = random.integers(1, VOCABULARY, (2, TOKENS // context))
        yield {
            "bounds": [0, *cuts.tolist(), TOKENS],
            "tokens": torch.from_numpy(tokens[:1]).cuda(),
            "labels": torch.from_numpy(tokens[1:]).cuda(),
            "positions": torch.arange(TOKENS // context).unsqueeze(0).cuda(),
        }


def forward_step(data: Iterator[dict[str, Any]], model: torch.nn.Module, return_schedule_plan: bool = False) -> Any:
    """What Megatron's schedules call for a micro-batch."""
    batch = next(data)
    params = packed_seq_params(batch["bounds"])

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=params)
    return output, loss_of


def compared(eager: dict[str, Any], replayed: dict[str, Any]) -> str:
    """How many losses and sums of gradients differ, and the counters of the replaying run."""
    told = []
    for name in ("losses", "gradients"):
        differ = sum(a != b for a, b in zip(eager[name], replayed[name], strict=True))
        told.append(f"{differ} of {len(eager[name])} {name} differ")
    spread = len(set(eager["losses"]))
    moves = spread > 3 or not eager["losses"]  # which the last stage of a pipeline alone has
    equal = all(part.startswith("0 of") for part in told) and moves and replayed["counts"]["replays"] > 3
    counts = ", ".join(f"{name} {number}" for name, number in replayed["counts"].items())
    return f"{'equal' if equal else 'not equal'}: {'; '.join(told)}; {spread} different losses; {counts}"


if __name__ == "__main__":
    main(sys.argv[1:])
