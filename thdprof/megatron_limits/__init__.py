"""What graphs cannot serve: one table, one description of a run, and one message. No torch in here.

`run` describes a run, with a constructor for each source. `limit` has a row's types; `graph_kinds` and `models` have
the rows, and `table` joins them. `command_line` reads the arguments of Megatron-LM's scripts, `trainer` those of
Hugging Face's Trainer. `known_fields` has the fields of megatron-core's configs that thdprof has looked at.
"""

from __future__ import annotations

from thdprof.megatron_limits.limit import Limit, MustBeOff, Words
from thdprof.megatron_limits.models import DROPLESS_EXPERTS_RUN_EAGERLY
from thdprof.megatron_limits.run import UNMEASURED, UP_TO_ROUTER, Facts, Run, ends_at_router, moved_by_core
from thdprof.megatron_limits.table import LIMITS, check_options, limits_of

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
