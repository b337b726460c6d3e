"""What Megatron's graphs cannot serve: one table, read by `thdprof analyze` and by `install`. No torch in here.

`limit` has the types. `fields`, `quantization`, `parallelism`, `overlap`, `models`, `dynamic_cp`, `experts`,
`offloading`, `layers_per_graph` and `recompute` have the rows; `table` joins them. `check` is for analysis,
`command_line` and `precision_file` for the arguments of Megatron-LM's scripts. `known_fields` has the
fields of megatron-core's configs that thdprof has looked at.
`thdprof.runtime.megatron.refusals` reads the same table when training starts.
"""

from __future__ import annotations

from thdprof.megatron_limits.check import (
    check_captured,
    check_layers_per_graph,
    check_offload,
    check_plan,
    check_recompute,
    check_run,
    check_settings,
)
from thdprof.megatron_limits.experts import DROPLESS_EXPERTS_RUN_EAGERLY, UP_TO_ROUTER
from thdprof.megatron_limits.limit import Limit, MustBeOff, Run, Words
from thdprof.megatron_limits.offloading import moved_by_core
from thdprof.megatron_limits.quantization import takes_unmeasured
from thdprof.megatron_limits.table import LIMITS, limits_of

__all__ = [
    "DROPLESS_EXPERTS_RUN_EAGERLY",
    "LIMITS",
    "UP_TO_ROUTER",
    "Limit",
    "MustBeOff",
    "Run",
    "Words",
    "check_captured",
    "check_layers_per_graph",
    "check_offload",
    "check_plan",
    "check_recompute",
    "check_run",
    "check_settings",
    "limits_of",
    "moved_by_core",
    "takes_unmeasured",
]
