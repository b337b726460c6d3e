"""What graphs cannot serve in models with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.megatron_limits.limit import Limit, Run, Words

if TYPE_CHECKING:
    from thdprof.plan import Module

UP_TO_ROUTER: tuple[Module, ...] = ("attn", "moe_router")
"""Parts of a layer with dropless experts that a graph can hold, by megatron-core's names."""
NO_PAGED_STASH = (
    "it needs moe_expert_rank_capacity_factor, which megatron-core 0.19 takes with the flex dispatcher's hybridep "
    "(DeepEP's package) and ncclep (NCCL 2.30.4; torch 2.11 has 2.28.9) alone, neither of which was run"
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
    return run.modules is not None and tuple(sorted(run.modules)) != UP_TO_ROUTER


EXPERT_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="whole layers of dropless experts",
        holds=lambda run: run.experts == "dropless" and _captured_whole(run),
        reason=f"with dropless experts no layer is captured whole, because {_COUNTS_ON_HOST}",
        options=Words(
            case=lambda run: f"--impl {run.impl}",
            remedy="use --impl transformer_engine, which captures up to the router, or pad experts to capacity "
            "(--experts padded)",
        ),
        fields=Words(
            case=lambda run: "moe_pad_expert_input_to_capacity is False",
            remedy="analyse with --experts dropless (graphs.impl transformer_engine, graphs.modules attn and "
            "moe_router), or set moe_pad_expert_input_to_capacity to True with a moe_expert_capacity_factor",
        ),
    ),
    Limit(
        name="parts of layers with padded experts",
        holds=lambda run: run.experts == "padded" and bool(run.modules),
        reason="experts are padded to capacity, and their layers are captured whole",
        fields=Words(
            case=lambda run: f"graphs.modules is {sorted(run.modules or ())}",
            remedy="analyse with --experts padded",
        ),
    ),
    Limit(
        name="parts of layers without experts",
        holds=lambda run: run.experts == "none" and bool(run.modules),
        reason="the model has no experts",
        fields=Words(
            case=lambda run: f"graphs.modules is {sorted(run.modules or ())}",
            remedy="analyse with --experts none",
        ),
    ),
)
