"""What graphs cannot serve in models with experts, and of their communication that overlaps other passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import FLEX, UP_TO_ROUTER, Run

if TYPE_CHECKING:
    from thdprof.plan import Module

PREPROCESS: Module = "moe_preprocess"
"""What the token dispatcher does before it communicates; a graph of the former parts can hold it, too."""
NO_PAGED_STASH = (
    "it needs moe_expert_rank_capacity_factor, which megatron-core 0.19 takes with the flex dispatcher's hybridep and "
    "ncclep alone: hybridep failed on an H200 without graphs, too, for Transformer Engine then asks for cuBLAS 13.4, "
    "and torch 2.11 has 13.1; ncclep asks for NCCL 2.30.4, and torch 2.11 has 2.28.9"
)
"""Why moe_paged_stash, which would put dropless experts into a graph, is refused."""
_COUNTS_ON_HOST = "each expert's number of tokens is read on the host"
DROPLESS_EXPERTS_RUN_EAGERLY = (
    "dropless experts: a graph (graphs.impl transformer_engine) holds a layer's attention and router; dispatch and "
    f"experts run eagerly, because {_COUNTS_ON_HOST}. megatron-core's moe_paged_stash would put them into the graph "
    f"too, but {NO_PAGED_STASH}"
)
"""For readers of an analysis: what is captured of a layer with dropless experts, and why no more."""


def _captured_whole(run: Run) -> bool:
    return run.modules is not None and tuple(sorted({*run.modules} - {PREPROCESS})) != UP_TO_ROUTER


def _with_experts(run: Run) -> bool:
    return run.captures and run.modules is not None and bool(run.field("num_moe_experts"))


def _in_part(run: Run) -> bool:
    return _with_experts(run) and bool(run.modules)


def _captured_with_experts(run: Run) -> bool:
    return _with_experts(run) and not run.modules


def _by_hybrid_ep(run: Run) -> bool:
    names = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
    return tuple(map(run.field, names)) == (FLEX, "hybridep")


def _balanced_by(run: Run) -> tuple[str, ...]:
    kinds = run.field("moe_router_load_balancing_type") or ()
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _why_no_preprocess(run: Run) -> str:
    """The settings with which a dispatcher's preprocessing cannot be captured; "" if there are none."""
    kind = run.field("moe_token_dispatcher_type")
    if kind == "alltoall":
        if not run.field("moe_permute_fusion"):
            return "moe_permute_fusion is False"
        if run.field("moe_expert_capacity_factor") is not None:
            return f"moe_expert_capacity_factor is {run.field('moe_expert_capacity_factor')}"
        if run.field("moe_router_padding_for_quantization"):
            return "moe_router_padding_for_quantization is True"
        if run.field("moe_shared_expert_overlap"):
            return "moe_shared_expert_overlap is True"
    if kind == FLEX and run.field("moe_hybridep_pad_uneven_dispatch_inputs"):
        return "moe_hybridep_pad_uneven_dispatch_inputs is True"
    return ""


EXPERT_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="whole layers of dropless experts",
        holds=lambda run: run.experts == "dropless" and _captured_whole(run),
        reason=f"with dropless experts no layer is captured whole, because {_COUNTS_ON_HOST}",
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
        holds=lambda run: _in_part(run) and PREPROCESS in (run.modules or ()) and _why_no_preprocess(run),
        reason="a graph cannot hold the dispatcher's preprocessing then",
        fields=Words(
            lambda run: f"graphs.modules has {PREPROCESS}, and {_why_no_preprocess(run)}",
            f"take {PREPROCESS} out of graphs.modules",
        ),
    ),
    must_be_off(
        "moe_router_load_balancing_type",
        "aux_loss",
        "its router reads on the host when it has converged",
        applies=_with_experts,
        is_on=lambda run: "sinkhorn" in _balanced_by(run),
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
)

_OVERLAP = "overlap_moe_expert_parallel_comm"


def _beyond_nodes(run: Run) -> bool:
    """Whether graphs hold something else than what a node of the schedule does: a layer up to its router.

    Where nothing is captured, as with `replay=False`, it is not known what would be.
    """
    in_part = run.impl == "transformer_engine" and {*UP_TO_ROUTER} <= {*(run.modules or ())}
    return run.captures and run.modules is not None and not in_part


def _overlaps(run: Run) -> bool:
    return run.captures and bool(run.field(_OVERLAP))


_DROPLESS = "analyse with --experts dropless, whose graphs its nodes replay, or set it to False"

OVERLAP_LIMITS: tuple[Limit, ...] = (
    must_be_off(
        _OVERLAP,
        False,
        "its schedule goes past the decoder's forward",
        applies=_beyond_nodes,
        remedy=_DROPLESS,
    ),
    Limit(
        name="overlapped expert communication in hybrid models",
        holds=lambda run: _overlaps(run) and run.field("hybrid_layer_pattern"),
        reason="their schedule has other nodes",
        fields=Words(lambda run: f"{_OVERLAP} is True in a hybrid model", f"set {_OVERLAP} to False"),
    ),
)
"""With graphs of any kind; where nothing else is said, those of layers up to their routers are served."""
