"""What graphs cannot serve of context parallelism, of pipelines, and of weights that are gathered for every use."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.limit import Limit, Run, must_be_off

_RING = "p2p"
_SERVED = (_RING, "a2a", "all_gather")
"""Ways in which ranks of context parallelism exchange tokens that were replayed beside eager ones."""


def _captures(run: Run) -> bool:
    return run.impl not in (None, "none")


def _of_one_size(run: Run) -> bool:
    """Whether graphs are captured under context parallelism whose size is the same for all micro-batches."""
    return _captures(run) and not run.dynamic_cp and (run.context_parallel_size or 1) > 1


def _unchecked_kind(run: Run) -> bool:
    kinds = run.field("cp_comm_type") or _RING
    return any(kind not in _SERVED for kind in ([kinds] if isinstance(kinds, str) else kinds))


_off = partial(must_be_off, applies=_captures)
_GATHERED = (
    "weights are gathered and their gradients given back by Python between the layers' passes, which a replay does not "
    "run"
)


PARALLELISM_LIMITS: tuple[Limit, ...] = (
    _off(
        "gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set tensor_parallel_num_weight_shards to tensor_model_parallel_size",
    ),
    _off(
        "expert_gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set expert_tensor_parallel_num_weight_shards to expert_tensor_parallel_size",
    ),
    must_be_off(
        "cp_comm_type",
        _RING,
        "of context parallelism only p2p, a2a and all_gather were checked in a graph",
        applies=_of_one_size,
        is_on=_unchecked_kind,
    ),
    must_be_off(
        "hierarchical_context_parallel_sizes",
        None,
        "groups of two levels were not checked in a graph",
        applies=_captures,
    ),
)
"""With graphs of any kind. Layers may be spread unevenly: slots and graphs are of a chunk, whatever it holds."""
