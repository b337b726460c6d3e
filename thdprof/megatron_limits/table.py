"""The whole table of limits, the rows of it that a run meets, and the first of them that an analysis refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.megatron_limits.experts import EXPERT_LIMITS, OVERLAP_LIMITS
from thdprof.megatron_limits.graph_kinds import ALL_GRAPHS, LAYERS_PER_GRAPH_LIMITS, LOCAL_GRAPHS, RECOMPUTE_LIMITS
from thdprof.megatron_limits.limit import Limit
from thdprof.megatron_limits.models import MODEL_LIMITS
from thdprof.megatron_limits.offloading import OFFLOAD_LIMITS
from thdprof.megatron_limits.parallelism import DYNAMIC_CP_LIMITS, PARALLELISM_LIMITS
from thdprof.megatron_limits.run import Run

if TYPE_CHECKING:
    from thdprof.plan import Impl

LIMITS: tuple[Limit, ...] = (
    *ALL_GRAPHS,
    *PARALLELISM_LIMITS,
    *OVERLAP_LIMITS,
    *LOCAL_GRAPHS,
    *MODEL_LIMITS,
    *DYNAMIC_CP_LIMITS,
    *EXPERT_LIMITS,
    *OFFLOAD_LIMITS,
    *LAYERS_PER_GRAPH_LIMITS,
    *RECOMPUTE_LIMITS,
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
            raise UsageError(limit.in_options(run))
