"""What graphs cannot serve: one table, one description of a run, and one message. No torch in here.

`run` describes a run, with a constructor for each source. `limit` has a row's types; `graph_kinds`, `models` and
`activations` have the rows. `command_line` reads the arguments of Megatron-LM's scripts, `trainer` those of
Hugging Face's Trainer. `known_fields` has the fields of megatron-core's configs that thdprof has looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.megatron_limits import activations, graph_kinds, models
from thdprof.megatron_limits.limit import Limit as Limit
from thdprof.megatron_limits.limit import Words as Words
from thdprof.megatron_limits.run import UNMEASURED as UNMEASURED
from thdprof.megatron_limits.run import UP_TO_ROUTER as UP_TO_ROUTER
from thdprof.megatron_limits.run import Facts as Facts
from thdprof.megatron_limits.run import Run as Run
from thdprof.megatron_limits.run import ends_at_router as ends_at_router
from thdprof.megatron_limits.run import moved_by_core as moved_by_core

if TYPE_CHECKING:
    from thdprof.plan import Impl

LIMITS: tuple[Limit, ...] = (*graph_kinds.LIMITS, *models.LIMITS, *activations.LIMITS)
"""Every limit, in the order of messages and of the reference."""


def limits_of(run: Run) -> Iterator[Limit]:
    """The limits that `run` meets, in the table's order."""
    return (limit for limit in LIMITS if limit.holds(run))


def explain_router(impl: Impl, fields: Mapping[str, Any], **known: Any) -> str | None:
    """Why graphs of a run with dropless experts end at the router; None where they hold whole layers.

    Args:
        fields: fields of TransformerConfig by name, as far as they are known.
        known: other fields of `Run` by name.
    """
    config = SimpleNamespace(**{"num_moe_experts": 1, **fields})
    usual = {"experts": "dropless", "config": config, **known}
    whole = Run.from_options("chunk" if impl == "module" else impl, **usual, modules=())
    ended = {*limits_of(Run.from_options("transformer_engine", **usual, modules=UP_TO_ROUTER))}
    limit = next((limit for limit in limits_of(whole) if limit not in ended), None)
    if limit is None:
        return None
    served = "" if limit.graphs is None else f" ({limit.name} {limit.off!r} would do)"
    return f"{limit.fields.describe_case(whole)}, and {limit.reason}{served}"


def check_options(impl: Impl | None, **known: Any) -> None:
    """Refuse what an analysis knows of a run, where `install` would always refuse the run.

    Args:
        known: fields of `Run` by name.

    Raises:
        UsageError: the message of the first limit: the option, its value, the reason and what to use instead.
    """
    run = Run.from_options(impl, **known)
    for limit in LIMITS:
        if limit.options is not None and limit.holds(run):
            raise UsageError(limit.options.describe(run, limit.reason))
