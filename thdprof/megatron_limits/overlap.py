"""What graphs cannot serve of expert communication that overlaps other micro-batches' passes."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.experts import UP_TO_ROUTER
from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off

_OVERLAP = "overlap_moe_expert_parallel_comm"


def _captures(run: Run) -> bool:
    return run.impl not in (None, "none")


def _beyond_nodes(run: Run) -> bool:
    """Whether graphs hold something else than what a node of the schedule does: a layer up to its router.

    Where nothing is captured, as with `replay=False`, it is not known what would be.
    """
    in_part = run.impl == "transformer_engine" and {*UP_TO_ROUTER} <= {*(run.modules or ())}
    return _captures(run) and run.modules is not None and not in_part


def _overlaps(run: Run) -> bool:
    return _captures(run) and bool(run.field(_OVERLAP))


_off = partial(must_be_off, applies=_beyond_nodes)
_DROPLESS = "analyse with --experts dropless, whose graphs its nodes replay, or set it to False"

OVERLAP_LIMITS: tuple[Limit, ...] = (
    _off(_OVERLAP, False, "its schedule goes past the decoder's forward", remedy=_DROPLESS),
    Limit(
        name="overlapped expert communication in hybrid models",
        holds=lambda run: _overlaps(run) and bool(run.field("hybrid_layer_pattern")),
        reason="their schedule has other nodes",
        fields=Words(case=lambda run: f"{_OVERLAP} is True in a hybrid model", remedy=f"set {_OVERLAP} to False"),
    ),
)
"""With graphs of any kind; where nothing else is said, those of layers up to their routers are served."""
