"""What graphs cannot serve: one table, one description of a run, and one message. No torch in here.

`run` describes a run, with a constructor for each source. `limit` has a row's types; `graph_kinds` and `models` have
the rows. `command_line` reads the arguments of Megatron-LM's scripts, `trainer` those of
Hugging Face's Trainer. `known_fields` has the fields of megatron-core's configs that thdprof has looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.megatron_limits import graph_kinds, models
from thdprof.megatron_limits.limit import Limit, MustBeOff, Words
from thdprof.megatron_limits.models import DROPLESS_EXPERTS_RUN_EAGERLY
from thdprof.megatron_limits.run import UNMEASURED, UP_TO_ROUTER, Facts, Run, ends_at_router, moved_by_core

if TYPE_CHECKING:
    from thdprof.plan import Impl

__all__ = [
    "DROPLESS_EXPERTS_RUN_EAGERLY",
    "LIMITS",
    "UNMEASURED",
    "UP_TO_ROUTER",
    "Facts",
    "Limit",
    "MustBeOff",
    "Run",
    "Words",
    "check_options",
    "ends_at_router",
    "limits_of",
    "moved_by_core",
]

LIMITS: tuple[Limit, ...] = (
    *graph_kinds.ALL_GRAPHS,
    *models.PARALLELISM_LIMITS,
    *models.OVERLAP_LIMITS,
    *graph_kinds.LOCAL_GRAPHS,
    *models.MODEL_LIMITS,
    *models.DYNAMIC_CP_LIMITS,
    *models.EXPERT_LIMITS,
    *graph_kinds.OFFLOAD_LIMITS,
    *graph_kinds.LAYERS_PER_GRAPH_LIMITS,
    *graph_kinds.RECOMPUTE_LIMITS,
)
"""Every limit, in the order of messages and of the reference."""


def limits_of(run: Run) -> Iterator[Limit]:
    """The limits that `run` meets, in the table's order."""
    return (limit for limit in LIMITS if limit.holds(run))


def check_options(impl: Impl | None, **known: Any) -> None:
    """Refuse what an analysis knows of a run, where `install` would always refuse the run.

    Args:
        impl: the kind of graphs; None: not known.
        known: fields of `Run` by name.

    Raises:
        UsageError: the message of the first limit: the option, its value, the reason and what to use instead.
    """
    run = Run.from_options(impl, **known)
    for limit in LIMITS:
        if limit.options is not None and limit.holds(run):
            raise UsageError(limit.options.describe(run, limit.reason))
