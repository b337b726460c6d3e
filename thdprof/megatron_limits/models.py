"""What graphs cannot serve of a model: its layers, what wraps it, its context parallelism, and its experts."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import FLEX, UP_TO_ROUTER, Run
from thdprof.training import PACKERS

if TYPE_CHECKING:
    from thdprof.plan import Module

_OTHER_KINDS = {
    "other vision-language": "only the decoder of Megatron-Bridge's Qwen3-VL and Qwen3.5-VL is known",
    "diffusion": "its layers take conditions and time steps beside their hidden states",
}
"""Kinds of models that have no decoder of GPTModel's or HybridModel's kind, and what their layers take besides."""


def _latent(run: Run) -> bool:
    return run.captures and bool(run.field("multi_latent_attention"))


def _unfused(run: Run) -> bool:
    """Whether RoPE is not fused in layers whose captures have no function in its place."""
    if not run.captures or run.field("apply_rope_fusion") is not False:
        return False
    if _latent(run):
        return run.field("rope_type") in (None, "", "yarn")
    return (run.impl == "local" or bool(run.dynamic_cp)) and run.position_embedding in ("rope", "yarn")


def _several_dimensions(run: Run) -> bool:
    return run.captures and run.position_embedding == "mrope"


def _pictures(run: Run) -> bool:
    return run.captures and run.model == "vision-language"


# --- experts ----------------------------------------------------------------------------------------------------------

PREPROCESS: Module = "moe_preprocess"
"""What the token dispatcher does before it communicates; a graph of the former parts can hold it, too."""


def _with_experts(run: Run) -> bool:
    return run.captures and run.modules is not None and bool(run.field("num_moe_experts"))


def _captured_with_experts(run: Run) -> bool:
    return _with_experts(run) and not run.modules


def _by_hybrid_ep(run: Run) -> bool:
    names = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
    return tuple(map(run.field, names)) == (FLEX, "hybridep")


def _explain_no_preprocess(run: Run) -> str:
    """The settings with which a dispatcher's preprocessing cannot be captured; "" if there are none."""
    kind = run.field("moe_token_dispatcher_type")
    if kind == "alltoall" and not run.field("moe_permute_fusion"):
        return "moe_permute_fusion is False"
    in_the_way = {
        "alltoall": ("moe_expert_capacity_factor", "moe_router_padding_for_quantization", "moe_shared_expert_overlap"),
        FLEX: ("moe_hybridep_pad_uneven_dispatch_inputs",),
    }
    return next((f"{name} is {run.field(name)}" for name in in_the_way.get(kind, ()) if run.field(name)), "")


def _whole_dropless(run: Run) -> bool:
    """Whether graphs hold whole layers of dropless experts, whose products are then grouped ones."""
    is_dropless = run.experts == "dropless" and run.planned_experts in (None, "dropless")
    return _captured_with_experts(run) and is_dropless and run.impl != "local"


def _shares_experts(run: Run) -> bool:
    """Whether graphs hold whole layers of dropless experts that several ranks share, in a plan's room for them."""
    is_shared = (run.field("expert_model_parallel_size") or 1) > 1
    return _whole_dropless(run) and is_shared and run.expert_room is not None


def _count_slices(run: Run) -> int:
    """Ranks that have a slice of every expert each."""
    return run.field("expert_tensor_parallel_size") or run.field("tensor_model_parallel_size") or 1


def _expert_sizes(run: Run) -> list[float]:
    """The sizes of an expert's weights on one rank, as far as they are known."""
    inner = run.field("moe_ffn_hidden_size") or run.field("ffn_hidden_size")
    sizes = (run.field("hidden_size"), 1), (inner, _count_slices(run))
    return [size / slices for size, slices in sizes if isinstance(size, int)]


_grouped = partial(
    must_be_off,
    applies=_whole_dropless,
    graphs="whole layers of dropless experts",
    remedy=(
        "turn it off, or analyse with graphs that end at the router (graphs.impl transformer_engine, graphs.modules "
        "attn and moe_router)"
    ),
)
_gathered = partial(
    must_be_off,
    applies=_shares_experts,
    graphs="whole layers of dropless experts that ranks share (`graphs.expert_room`)",
    remedy="set it to 1, or analyse with graphs that end at the router",
)
_ALONE = "ranks outside of the expert-parallel group would not notice where its rows have no room"
_IN_BF16 = "experts inside a graph run by torch's grouped products, in bf16 alone"
_NO_ROOM = "experts inside a graph take top-k rows of every token, no more and no fewer"
_OF_ENGINE = "experts inside a graph run by torch's grouped products, and not by Transformer Engine's layers"


_dynamic = attrgetter("dynamic_cp")


def _spans_ranks(run: Run) -> bool:
    return _dynamic(run) and any(size > 1 for size in run.bucket_cp_sizes or ())


_off_if_dynamic = partial(must_be_off, applies=_dynamic, graphs="dynamic context parallelism")
_ONE_SIZE = "analyse a run with one size"


LIMITS: tuple[Limit, ...] = (
    Limit(
        name="a rotary type other than yarn with latent attention",
        holds=lambda run: _latent(run) and run.field("rope_type") not in (None, "", "yarn"),
        reason="with multi-latent attention only yarn's RoPE is fused, and an unfused one reads the boundaries on the "
        "host",
        fields=Words("rope_type is {rope_type!r}", "set it to 'yarn', and apply_rope_fusion to True"),
    ),
    Limit(
        name="unfused RoPE",
        holds=_unfused,
        reason="without fusion RoPE reads the boundaries on the host",
        fields=Words("apply_rope_fusion is False", "set it to True"),
    ),
    Limit(
        name="cached latents",
        holds=lambda run: _latent(run) and run.field("cache_mla_latents"),
        reason="megatron-core refuses it in training",
        fields=Words("cache_mla_latents is True", "set it to False"),
    ),
    Limit(
        name="variants of attention",
        holds=lambda run: _latent(run) and run.field("experimental_attention_variant") is not None,
        reason="it was not checked in a graph",
        fields=Words("experimental_attention_variant is {experimental_attention_variant!r}", "set it to None"),
    ),
    Limit(
        name="positions in several dimensions (`mrope`) in Megatron's own layer graphs",
        holds=lambda run: _several_dimensions(run) and run.impl == "local",
        reason="every micro-batch has rotary embeddings of its own, which were not checked in them",
        fields=Words("position_embedding_type is 'mrope' with graphs.impl local", "set graphs.impl to chunk"),
    ),
    Limit(
        name="positions in several dimensions (`mrope`) with context parallelism",
        holds=lambda run: _several_dimensions(run) and ((run.context_parallel_size or 1) > 1 or run.dynamic_cp),
        reason="the share that each rank takes of them was not checked in a graph",
        fields=Words("position_embedding_type is 'mrope' with context parallelism", "set context_parallel_size to 1"),
    ),
    Limit(
        name="overlapped expert communication in vision-language models",
        holds=lambda run: _pictures(run) and run.field("overlap_moe_expert_parallel_comm"),
        reason="Megatron-Bridge's model has no schedule plan (build_schedule_plan) by which Megatron would train it",
        fields=Words("overlap_moe_expert_parallel_comm is True", "set it to False"),
    ),
    Limit(
        name="full recompute in vision-language models in graphs of layers",
        holds=lambda run: _pictures(run) and run.impl != "chunk" and run.field("recompute_granularity") == "full",
        reason="features of images are added between its graphs, and no such model was recomputed there",
        fields=Words(
            "recompute_granularity is 'full' in a vision-language model with graphs.impl {impl}",
            "set graphs.impl to chunk, or recompute_granularity to 'selective' or None",
        ),
    ),
    Limit(
        name="gated delta nets in graphs of whole chunks",
        holds=lambda run: run.captures and run.impl != "transformer_engine" and "gated_delta_net" in (run.layers or ()),
        reason="they read the boundaries on the host in every pass",
        fields=Words(
            "the decoder has gated delta nets",
            "analyse with --impl transformer_engine, whose graphs of the other layers leave those that have one to "
            "run eagerly",
        ),
    ),
    Limit(
        name="models of other kinds than GPT and hybrids",
        holds=lambda run: run.captures and run.model in _OTHER_KINDS,
        reason="only decoders of GPTModel, HybridModel and Qwen3VLModel are captured",
        fields=Words(
            lambda run: f"the model is of the kind {run.model}, and {_OTHER_KINDS[run.model or '']}",
            "set graphs.impl to none and graphs.buckets to []",
        ),
    ),
    Limit(
        name="wrappers other than DistributedDataParallel",
        holds=lambda run: run.captures and run.wrapper not in (None, "", "DistributedDataParallel"),
        reason="it moves parameters, whose places graphs keep",
        fields=Words("the model is wrapped in {wrapper}", "use DistributedDataParallel"),
    ),
    # --- dynamic context parallelism: of these an analysis names the first alone
    Limit(
        name="`graphs.impl: local` under dynamic context parallelism",
        holds=lambda run: _dynamic(run) and run.impl == "local",
        reason="layers' graphs have one context-parallel size, and dynamic context parallelism gives micro-batches "
        "several",
        options=Words("--impl local with --packer {packer}", "use --impl chunk"),
        fields=Words("graphs.impl is local", "set graphs.impl to chunk"),
    ),
    _off_if_dynamic(
        "pipeline_model_parallel_size",
        1,
        "megatron-core 0.19 has no dynamic context parallelism with pipeline parallelism",
        remedy="set it to 1, or analyse with another packer",
        is_on=lambda run: (
            (run.pipeline_parallel_size or 1) > 1
            # a run of the dev branch may have it, which install does not serve
            and (run.impl not in (None, "none", "module") or run.packer is None or PACKERS[run.packer].is_released)
        ),
        options=Words("--pipeline-parallel-size {pipeline_parallel_size} with --packer {packer}", "use 1"),
    ),
    _off_if_dynamic(
        "num_moe_experts",
        None,
        "experts and their routers communicate over groups of one size, and dynamic context parallelism gives "
        "micro-batches several",
        remedy=_ONE_SIZE,
        is_on=lambda run: run.experts not in (None, "none"),
        options=Words("--experts {experts} with --packer {packer}", "use another packer"),
    ),
    _off_if_dynamic(
        "multi_latent_attention",
        False,
        "megatron-core 0.19 has no dynamic context parallelism with it (MLA)",
        remedy=_ONE_SIZE,
    ),
    _off_if_dynamic("mtp_num_layers", None, "multi-token prediction rolls tokens over groups of one size"),
    Limit(
        name="`context_parallel_size` 1 with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and run.context_parallel_size == 1,
        reason="some graphs span several ranks, and megatron-core makes the stream of context parallelism only above 1",
        options=Words("--context-parallel-size 1", "use 2, and half as large a --data-parallel-size"),
        fields=Words(
            "context_parallel_size is 1",
            "set context_parallel_size to 2, halve the data-parallel size, and analyse for these",
        ),
    ),
    Limit(
        name="an odd `max_seqlen_per_dp_cp_rank` with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and bool((run.max_seqlen_per_dp_cp_rank or 0) % 2),
        reason="a rank holds two pieces of every document that several ranks share",
        options=Words("--max-seqlen-per-dp-cp-rank {max_seqlen_per_dp_cp_rank}", "use an even number"),
        fields=Words("max_seqlen_per_dp_cp_rank is {max_seqlen_per_dp_cp_rank}", "analyse with an even number"),
    ),
    # --- experts
    Limit(
        name="whole layers of dropless experts",
        holds=lambda run: (
            run.experts == "dropless"
            and run.modules is not None
            and tuple(sorted({*run.modules} - {PREPROCESS})) != UP_TO_ROUTER
            and (run.modules or run.impl == "local" or run.planned_experts not in (None, "dropless"))
        ),
        reason="with dropless experts no layer is captured whole, because each expert's number of tokens is read on "
        "the host",
        options=Words(
            "--impl {impl}",
            "use --impl transformer_engine, which captures up to the router, or pad experts to capacity (--experts "
            "padded)",
        ),
        fields=Words(
            "moe_pad_expert_input_to_capacity is False",
            "analyse with --experts dropless (graphs.impl transformer_engine, graphs.modules attn and moe_router), or "
            "set moe_pad_expert_input_to_capacity to True with a moe_expert_capacity_factor",
        ),
    ),
    Limit(
        name="parts of layers without experts",
        holds=lambda run: run.experts == "none" and run.modules,
        reason="the model has no experts",
        fields=Words(lambda run: f"graphs.modules is {sorted(run.modules or ())}", "analyse with --experts none"),
    ),
    Limit(
        name="token dispatchers other than `alltoall` with experts that are captured whole",
        holds=lambda run: (
            _captured_with_experts(run)
            and run.field("moe_token_dispatcher_type") in ("allgather", FLEX)
            and not _by_hybrid_ep(run)
        ),
        reason="it was not checked in a graph",
        fields=Words(
            "moe_token_dispatcher_type is {moe_token_dispatcher_type!r}",
            "analyse with --experts dropless, whose graphs end at the router, or set it to 'alltoall'",
        ),
    ),
    Limit(
        name="HybridEP with experts that are captured whole",
        holds=lambda run: _captured_with_experts(run) and _by_hybrid_ep(run),
        reason="it makes its buffers anew for a micro-batch with more tokens than any before, and a graph would go on "
        "in the old ones",
        fields=Words(
            "moe_flex_dispatcher_backend is 'hybridep'",
            "analyse with --experts dropless, whose graphs end at the router, or set moe_token_dispatcher_type to "
            "'alltoall'",
        ),
    ),
    Limit(
        name="`moe_preprocess` where the dispatcher's preprocessing waits for the GPU or leaves its stream",
        holds=lambda run: _with_experts(run) and PREPROCESS in (run.modules or ()) and _explain_no_preprocess(run),
        reason="a graph cannot hold the dispatcher's preprocessing then",
        fields=Words(
            lambda run: f"graphs.modules has {PREPROCESS}, and {_explain_no_preprocess(run)}",
            f"take {PREPROCESS} out of graphs.modules",
        ),
    ),
    must_be_off(
        "moe_router_load_balancing_type",
        "aux_loss",
        "its router reads on the host when it has converged",
        applies=_with_experts,
        is_on=lambda run: "sinkhorn" in run.list_values("moe_router_load_balancing_type"),
        remedy="balance by aux_loss, seq_aux_loss, global_aux_loss, an expert bias, or not at all",
    ),
    must_be_off(
        "moe_router_force_biased",
        None,
        "below zero it draws biases in the first pass and keeps them in Python",
        applies=_with_experts,
        is_on=lambda run: float(run.field("moe_router_force_biased") or 0) < 0,
        remedy="use a number above zero, for biases that are drawn in every pass",
    ),
    # --- whole layers of dropless experts; `install` also looks at the experts themselves
    _grouped(
        "expert_model_parallel_size",
        1,
        "numbers of rows that ranks exchange are read on the host",
        is_on=lambda run: (run.field("expert_model_parallel_size") or 1) > 1 and run.expert_room is None,
    ),
    Limit(
        name="whole layers of dropless experts that ranks share, in graphs of single layers",
        holds=lambda run: _shares_experts(run) and run.impl not in ("chunk", "module"),
        reason="where rows have no room, a whole model chunk runs eagerly",
        fields=Words("graphs.expert_room is {expert_room} and graphs.impl {impl}", "set graphs.impl to chunk"),
    ),
    _gathered("tensor_model_parallel_size", 1, _ALONE),
    _gathered(
        "context_parallel_size",
        1,
        _ALONE,
        is_on=lambda run: (run.context_parallel_size or run.field("context_parallel_size") or 1) > 1,
    ),
    _gathered(
        "moe_router_load_balancing_type",
        "aux_loss",
        _ALONE,
        is_on=lambda run: "global_aux_loss" in run.list_values("moe_router_load_balancing_type"),
        remedy="balance by aux_loss, seq_aux_loss, an expert bias, or not at all",
    ),
    _grouped(
        "expert_tensor_parallel_size",
        1,
        "ranks with other tokens than those of the tensor-parallel group would share the experts",
        is_on=lambda run: _count_slices(run) not in (1, run.field("tensor_model_parallel_size") or 1),
        remedy="set it to 1 or to tensor_model_parallel_size, or analyse with graphs that end at the router",
    ),
    *(_grouped(field, None, _IN_BF16) for field in ("fp8", "fp4", "quant_recipe")),
    _grouped(
        "add_bias_linear", False, "grouped products add no bias", is_on=lambda run: run.field("add_bias_linear") is True
    ),
    _grouped("moe_expert_capacity_factor", None, _NO_ROOM),
    _grouped("moe_router_padding_for_quantization", False, _NO_ROOM),
    _grouped("moe_latent_size", None, "experts behind latent projections were not checked in a graph"),
    _grouped("moe_single_grouped_weight", False, "a weight of all experts was not checked in a graph"),
    _grouped(
        "moe_shared_expert_overlap",
        False,
        "under tensor parallelism the dispatcher communicates for shared experts",
        is_on=lambda run: run.field("moe_shared_expert_overlap") and (run.field("tensor_model_parallel_size") or 1) > 1,
    ),
    _grouped("delay_wgrad_compute", False, _OF_ENGINE),
    _grouped("overlap_dispatch_backward_with_experts_wgrad", False, _OF_ENGINE),
    _grouped("use_transformer_engine_op_fuser", False, _OF_ENGINE),
    Limit(
        name="offloading with whole layers of dropless experts",
        holds=lambda run: _whole_dropless(run) and run.offload_modules is not None,
        reason="activations of grouped products were not moved beside eager ones",
        fields=Words("graphs.offload", "set it to null"),
    ),
    Limit(
        name="whole layers of dropless experts whose sizes are no multiples of 8",
        holds=lambda run: _whole_dropless(run) and any(size % 8 for size in _expert_sizes(run)),
        reason="torch's grouped products take sizes of 16 bytes and multiples of them, which are 8 values in bf16",
        fields=Words(
            lambda run: (
                "hidden_size is {hidden_size} and moe_ffn_hidden_size {moe_ffn_hidden_size}".format_map(run)
                + (f", which {_count_slices(run)} ranks share" if _count_slices(run) > 1 else "")
            ),
            "use multiples of 8 on each rank, or analyse with graphs that end at the router",
        ),
    ),
    Limit(
        name="slices of dropless experts in graphs of single layers",
        holds=lambda run: _whole_dropless(run) and _count_slices(run) > 1 and run.impl not in ("chunk", "module"),
        reason="slices of experts were checked in graphs of model chunks alone",
        fields=Words(
            lambda run: f"graphs.impl is {run.impl} where {_count_slices(run)} ranks share every expert",
            "set graphs.impl to chunk, or expert_tensor_parallel_size to 1",
        ),
    ),
    # --- what an analysis knows of them by other names than TransformerConfig's fields
    Limit(
        name="whole layers of dropless experts in SequentialMLP",
        holds=lambda run: _whole_dropless(run) and run.field("sequential_experts"),
        reason="experts are multiplied one by one",
        fields=Words("moe_grouped_gemm is False", "set it to True"),
    ),
    Limit(
        name="whole layers of dropless experts in fp16 or fp32",
        holds=lambda run: _whole_dropless(run) and run.field("precision") in ("fp16", "fp32"),
        reason=_IN_BF16,
        fields=Words("precision is {precision}", "train in bf16"),
    ),
    Limit(
        name="whole layers of dropless experts with adapters",
        holds=lambda run: _whole_dropless(run) and run.field("adapted_experts"),
        reason="adapters between grouped products were not checked in a graph",
        fields=Words("lora_target_modules has linear_fc1 or linear_fc2", "adapt attention alone"),
    ),
    Limit(
        name="whole layers of dropless experts on other GPUs than Hopper's",
        holds=lambda run: _whole_dropless(run) and run.field("groups_products") is False,
        reason="torch's grouped products were checked in a graph on Hopper GPUs alone",
        fields=Words("the GPU is no Hopper GPU", "train on one"),
    ),
)
"""In the order of messages."""
