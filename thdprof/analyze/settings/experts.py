"""What a plan captures of a model, where its experts decide that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.errors import UsageError
from thdprof.training import Experts

if TYPE_CHECKING:
    from thdprof.plan import Impl, Module

UP_TO_ROUTER: list[Module] = ["attn", "moe_router"]
"""What of a layer with dropless experts is captured."""
WHY = (
    "dropless experts: a graph (graphs.impl transformer_engine) holds a layer's attention and router, and dispatch and "
    "experts run eagerly, for each expert's number of tokens is read on the host; a paged stash would put them into "
    "the graph too, but megatron-core 0.19 has it with DeepEP's hybridep and NCCL 2.30.4's ncclep alone, which come "
    "neither with it nor with torch 2.11"
)
"""For those who read an analysis."""


def captured(experts: Experts, impl: Impl | None) -> tuple[Impl, list[Module]]:
    """What a plan's `graphs.impl` and `graphs.modules` say; `impl` is what was asked for, if anything.

    Raises:
        UsageError: it captures whole layers, which dropless experts do not allow.
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
