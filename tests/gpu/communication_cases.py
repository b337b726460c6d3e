"""Communication inside graphs: `torchrun --nproc-per-node 2 tests/gpu/communication_cases.py NAME[@STEPS]...`.

Each case, on two ranks, trains a small model by micro-batches of other shapes, padded eagerly and then replayed, and
prints a line. The weights follow the gradients, so that a wrong one shows in all later losses.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from support.own_loop import VOCABULARY, config_of, seed, wrapped
from support.own_loop_cases import Case, MicroBatches, descended, deterministic_kernels, run_cases
from support.own_loop_steps import verdict

from thdprof.dispatch import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron import refusals

MICRO_BATCHES = MicroBatches(tokens=1024, each=4, documents=(3, 8, 12, 16, 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication(Case):
    """One kind of communication."""

    user_buffers: bool = False
    overflows: bool = False
    """Whether the room for experts is too little for some micro-batches, which a run beside it forces to be eager."""


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


AMPLE = 2.0
"""Room for all rows of two ranks."""
WHOLE = {"impl": "chunk", "modules": [], "expert_room": AMPLE}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 1e-3,
    "hidden_dropout": 0.1,
}


SLICED = Communication(
    sizes={"tensor_model_parallel_size": 2},
    config={**EXPERTS, "expert_model_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    experts="dropless",
    graphs={"impl": "chunk", "modules": []},
)
"""Two ranks, each of which has a slice of every expert."""


def _of_experts(config: dict[str, Any], *more: str, plan: dict[str, Any] | None = None) -> Communication:
    """Experts over two ranks, in graphs up to their routers and of these parts more, or as `plan` says."""
    graphs = {**UP_TO_ROUTER, "modules": [*UP_TO_ROUTER["modules"], *more]} if plan is None else plan
    experts = "padded" if config.get("moe_pad_expert_input_to_capacity") else "dropless"
    overflows = graphs.get("expert_room", AMPLE) < AMPLE
    sizes = {"expert_model_parallel_size": 2}
    return Communication(sizes=sizes, config=config, experts=experts, graphs=graphs, overflows=overflows)


CASES = {
    "user_buffers": Communication(
        sizes={"tensor_model_parallel_size": 2},
        config={
            **TWO,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
        },
        user_buffers=True,
    ),
    "rings": Communication(sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2}),
    "all_to_all": Communication(
        sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2, "cp_comm_type": "a2a"}
    ),
    "all_to_all_unfused_rope": Communication(
        sizes={"context_parallel_size": 2},
        config={**TWO, "context_parallel_size": 2, "cp_comm_type": "a2a", "apply_rope_fusion": False},
    ),
    "all_gather": Communication(
        sizes={"context_parallel_size": 2}, config={**TWO, "context_parallel_size": 2, "cp_comm_type": "all_gather"}
    ),
    "deferred_output_gradients": Communication(
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
    "last_stage_without_layers": Communication(
        sizes={"pipeline_model_parallel_size": 2},
        config={
            **TWO,
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.bfloat16,
            "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 4], ["loss"]],
        },
    ),
    "experts": _of_experts(EXPERTS),
    "whole_experts": _of_experts(EXPERTS, plan=WHOLE),
    "whole_experts_biased": _of_experts({**EXPERTS, **BIASED}, plan=WHOLE),
    "whole_experts_layer_by_layer": _of_experts(EXPERTS, plan={**WHOLE, "layers_per_graph": 1}),
    "whole_experts_recomputed": _of_experts(
        {**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}, plan=WHOLE
    ),
    "whole_experts_watched": _of_experts(EXPERTS, plan={**WHOLE, "verify": "1/2"}),
    "whole_experts_without_room": _of_experts(
        {**EXPERTS, "moe_router_force_load_balancing": True, "hidden_dropout": 0.1}, plan={**WHOLE, "expert_room": 1.02}
    ),
    "whole_experts_without_room_layer_by_layer": _of_experts(
        {**EXPERTS, "moe_router_force_load_balancing": True, "hidden_dropout": 0.1},
        plan={**WHOLE, "expert_room": 1.02, "layers_per_graph": 1},
    ),
    "whole_experts_sliced": SLICED,
    "whole_experts_sliced_layer_by_layer": replace(SLICED, graphs={**SLICED.graphs, "layers_per_graph": 1}),
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
    """Run the cases."""
    run_cases(names, CASES, result_of, around=buffers)


def result_of(case: Communication) -> str:
    """How a case's two runs differ."""
    with deterministic_kernels(True):
        if case.overflows:
            return result_without_room(case)
        eager, replayed = trained(case, replay=False), trained(case, replay=True)
    return verdict(eager, replayed, steps=case.steps, documents=MICRO_BATCHES.numbers_of(case))


def result_without_room(case: Communication) -> str:
    """How a run in which rows have no room differs from one that has room, and runs the same micro-batches eagerly."""
    overflowed: list[int] = []
    with noting_overflows(overflowed, forced=()):
        ours = trained(case, replay=True)
    ample = replace(case, graphs={**case.graphs, "expert_room": AMPLE})
    with noting_overflows([], forced=frozenset(overflowed)):
        forced = trained(ample, replay=True)
    documents = MICRO_BATCHES.numbers_of(case)
    told = verdict(forced, ours, steps=case.steps, documents=documents, may_overflow=True)
    return told if overflowed else f"not equal: no micro-batch lacked room; {told}"


@contextmanager
def noting_overflows(overflowed: list[int], forced: Container[int]) -> Iterator[None]:
    """Note the calls of dispatched modules that had no room, by number, and run those that are `forced` eagerly."""
    own, numbers = DispatchedModule.forward, itertools.count()

    def forward(self: DispatchedModule, *args: Any, **kwargs: Any) -> Any:
        number, before = next(numbers), self.stats().fallbacks[FallbackReason.expert_overflow]
        with self.falling_back(FallbackReason.not_training if number in forced else None):
            found = own(self, *args, **kwargs)
        if self.stats().fallbacks[FallbackReason.expert_overflow] > before:
            overflowed.append(number)
        return found

    DispatchedModule.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        DispatchedModule.forward = own  # type: ignore[method-assign]


@contextmanager
def buffers(case: Communication) -> Iterator[None]:
    """The buffers that a case communicates by."""
    with user_buffers(case), hybrid_ep_buffer():
        yield


@contextmanager
def user_buffers(case: Communication) -> Iterator[None]:
    """Transformer Engine's buffers, as Megatron's own initialisation makes them."""
    if not case.user_buffers:
        yield
        return
    from transformer_engine.pytorch.module import base

    base.initialize_ub(
        shape=[MICRO_BATCHES.tokens, case.config["hidden_size"]],
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


def trained(case: Communication, *, replay: bool) -> dict[str, Any]:
    """Losses, gradients and counters of a run of a new model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().metrics.clear()  # which have as many layers as the first model had
    seed()
    config = config_of(**case.config)
    spec: Any
    if case.experts == "none":
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
            max_sequence_length=MICRO_BATCHES.tokens,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ),
        config,
        delay_wgrad_compute=config.delay_wgrad_compute,
    )
    # Cases that install still refuses, for want of such a run, are run all the same.
    refusals.check = lambda *args, **kwargs: None
    return descended(case, model, config, MICRO_BATCHES, replay=replay, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
