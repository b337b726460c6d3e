"""A plan as a trainer follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thdprof.plan import Plan


def for_megatron(plan: Plan) -> Plan:
    """The plan with graphs of Megatron's decoders, where `graphs.impl` only says that a whole module is captured."""
    if plan.graphs.impl != "module":
        return plan
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "chunk"})})
