"""What a plan captures of a model's layers, where its experts decide that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thdprof.megatron_limits import UP_TO_ROUTER, check_options
from thdprof.training import Experts

if TYPE_CHECKING:
    from thdprof.plan import Impl, Module


def captured(experts: Experts, impl: Impl | None, *, usual: Impl = "module") -> tuple[Impl, list[Module]]:
    """The `graphs.impl` and `graphs.modules` of a plan.

    Args:
        experts: the model's experts.
        impl: the kind of graphs that was asked for; None: none was.
        usual: the kind where none was asked for, and the model has no dropless experts.

    Raises:
        UsageError: `impl` captures whole layers, which dropless experts do not allow.
    """
    if experts != "dropless":
        return impl or usual, []
    kind = impl or "transformer_engine"
    modules: list[Module] = [*UP_TO_ROUTER] if kind == "transformer_engine" else []
    if kind != "none":
        check_options(kind, experts=experts, modules=tuple(modules))
    return kind, modules
