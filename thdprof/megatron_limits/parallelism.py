"""What graphs cannot serve of gathered weights, and of context parallelism, of one size or of several."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import Run

_RING = "p2p"
_SERVED = (_RING, "a2a", "all_gather")
"""Ways in which ranks of context parallelism exchange tokens that were replayed beside eager ones."""


def _of_one_size(run: Run) -> bool:
    """Whether graphs are captured under context parallelism whose size is the same for all micro-batches."""
    return run.captures and not run.dynamic_cp and (run.context_parallel_size or 1) > 1


def _unchecked_kind(run: Run) -> bool:
    kinds = run.field("cp_comm_type") or _RING
    return any(kind not in _SERVED for kind in ([kinds] if isinstance(kinds, str) else kinds))


_GATHERED = (
    "weights are gathered and their gradients given back by Python between the layers' passes, which a replay does not "
    "run"
)


PARALLELISM_LIMITS: tuple[Limit, ...] = (
    must_be_off(
        "gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set tensor_parallel_num_weight_shards to tensor_model_parallel_size",
    ),
    must_be_off(
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
    ),
)
"""With graphs of any kind. Layers may be spread unevenly: slots and graphs are of a chunk, whatever it holds."""


def _dynamic(run: Run) -> bool:
    return bool(run.dynamic_cp)


def _spans_ranks(run: Run) -> bool:
    return _dynamic(run) and any(size > 1 for size in run.bucket_cp_sizes or ())


def _of_dev(run: Run) -> bool:
    """Whether the run is one of the dev branch, which install does not serve."""
    return run.packer == "dynamic_cp" and run.impl in (None, "none", "module")


_off_if_dynamic = partial(must_be_off, applies=_dynamic, graphs="dynamic context parallelism")
_ONE_SIZE = "analyse a run with one size"

DYNAMIC_CP_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="`graphs.impl: local` under dynamic context parallelism",
        holds=lambda run: _dynamic(run) and run.impl == "local",
        reason="layers' graphs have one context-parallel size, and dynamic context parallelism gives micro-batches "
        "several",
        options=Words("--impl local with --packer {packer}", "use --impl chunk"),
        fields=Words("graphs.impl is local", "set graphs.impl to chunk"),
    ),
    _off_if_dynamic(
        "pipeline_model_parallel_size",
        1,
        "megatron-core 0.19 has no dynamic context parallelism with pipeline parallelism",
        remedy="set it to 1, or analyse with another packer",
        is_on=lambda run: (run.pipeline_parallel_size or 1) > 1 and not _of_dev(run),
        options=Words("--pipeline-parallel-size {pipeline_parallel_size} with --packer {packer}", "use 1"),
    ),
    _off_if_dynamic(
        "num_moe_experts",
        None,
        "experts and their routers communicate over groups of one size, and dynamic context parallelism gives "
        "micro-batches several",
        remedy=_ONE_SIZE,
        is_on=lambda run: run.experts not in (None, "none"),
        options=Words("--experts {experts} with --packer {packer}", "use another packer"),
    ),
    _off_if_dynamic(
        "multi_latent_attention",
        False,
        "megatron-core 0.19 has no dynamic context parallelism with it (MLA)",
        remedy=_ONE_SIZE,
    ),
    _off_if_dynamic("mtp_num_layers", None, "multi-token prediction rolls tokens over groups of one size"),
    Limit(
        name="`context_parallel_size` 1 with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and run.context_parallel_size == 1,
        reason="some graphs span several ranks, and megatron-core makes the stream of context parallelism only above 1",
        options=Words("--context-parallel-size 1", "use 2, and half as large a --data-parallel-size"),
        fields=Words(
            "context_parallel_size is 1",
            "set context_parallel_size to 2, halve the data-parallel size, and analyse for these",
        ),
    ),
    Limit(
        name="an odd `max_seqlen_per_dp_cp_rank` with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and bool((run.max_seqlen_per_dp_cp_rank or 0) % 2),
        reason="a rank holds two pieces of every document that several ranks share",
        options=Words("--max-seqlen-per-dp-cp-rank {max_seqlen_per_dp_cp_rank}", "use an even number"),
        fields=Words("max_seqlen_per_dp_cp_rank is {max_seqlen_per_dp_cp_rank}", "analyse with an even number"),
    ),
)
"""In the order of analysis, which tells the first alone."""
