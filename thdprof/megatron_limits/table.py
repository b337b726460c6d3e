"""The whole table of limits, and the rows of it that a run meets."""

from __future__ import annotations

from collections.abc import Iterator

from thdprof.megatron_limits.dynamic_cp import DYNAMIC_CP_LIMITS
from thdprof.megatron_limits.experts import EXPERT_LIMITS
from thdprof.megatron_limits.fields import ALL_GRAPHS, LOCAL_GRAPHS
from thdprof.megatron_limits.layers_per_graph import LAYERS_PER_GRAPH_LIMITS
from thdprof.megatron_limits.limit import Limit, Run
from thdprof.megatron_limits.models import MODEL_LIMITS
from thdprof.megatron_limits.offloading import OFFLOAD_LIMITS
from thdprof.megatron_limits.overlap import OVERLAP_LIMITS
from thdprof.megatron_limits.parallelism import PARALLELISM_LIMITS
from thdprof.megatron_limits.recompute import RECOMPUTE_LIMITS

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
