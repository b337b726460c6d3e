"""Which parts of a layer a plan captures in CUDA graphs, where the layer's experts decide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.errors import UsageError
from thdprof.training import Experts

if TYPE_CHECKING:
    from thdprof.plan import Impl, Module

UP_TO_ROUTER: list[Module] = ["attn", "moe_router"]
"""Modules of a layer that are captured where its experts are dropless: each takes all tokens routed to it."""
WHY = (
    "dropless experts: a graph (graphs.impl transformer_engine) holds a layer's attention and router, and dispatch and "
    "experts run eagerly, because the host reads each expert's number of tokens; a paged stash would put them into "
    "the graph too, but megatron-core 0.19 has it only for DeepEP's hybridep and NCCL 2.30.4's ncclep, and neither "
    "comes with megatron-core or torch 2.11"
)
"""Why only `UP_TO_ROUTER` is captured, as a report tells it."""


def captured(experts: Experts, impl: Impl | None) -> tuple[Impl, list[Module]]:
    """The values of a plan's `graphs.impl` and `graphs.modules`; `impl` is the user's choice, None without one.

    Raises:
        UsageError: `impl` captures whole layers, which dropless experts do not allow.
    """
    if experts != "dropless":
        return impl or "module", []
    if impl in (None, "transformer_engine"):
        return "transformer_engine", UP_TO_ROUTER
    if impl == "none":
        return impl, []
    raise UsageError(
        f"--impl {impl}: with dropless experts no layer is captured whole; use --impl transformer_engine, which "
        "captures up to the router, or pad experts to capacity (--experts padded)"
    )
