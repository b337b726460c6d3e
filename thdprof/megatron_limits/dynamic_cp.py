"""What graphs cannot serve under dynamic context parallelism, where every micro-batch has a size of its own."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off


def _dynamic(run: Run) -> bool:
    return bool(run.dynamic_cp)


def _spans_ranks(run: Run) -> bool:
    return _dynamic(run) and any(size > 1 for size in run.bucket_cp_sizes or ())


def _of_dev(run: Run) -> bool:
    """Whether the run is one of the dev branch, which install does not serve."""
    return run.packer == "dynamic_cp" and run.impl in (None, "none", "module")


_off = partial(must_be_off, applies=_dynamic, graphs="dynamic context parallelism")
_ONE_SIZE = "analyse a run with one size"

DYNAMIC_CP_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="`graphs.impl: local` under dynamic context parallelism",
        holds=lambda run: _dynamic(run) and run.impl == "local",
        reason="layers' graphs have one context-parallel size, and dynamic context parallelism gives micro-batches "
        "several",
        options=Words(case=lambda run: f"--impl local with --packer {run.packer}", remedy="use --impl chunk"),
        fields=Words(case=lambda run: "graphs.impl is local", remedy="set graphs.impl to chunk"),
    ),
    _off(
        "pipeline_model_parallel_size",
        1,
        "megatron-core 0.19 has no dynamic context parallelism with pipeline parallelism",
        remedy="set it to 1, or analyse with another packer",
        is_on=lambda run: (run.pipeline_parallel_size or 1) > 1 and not _of_dev(run),
        options=Words(
            case=lambda run: f"--pipeline-parallel-size {run.pipeline_parallel_size} with --packer {run.packer}",
            remedy="use 1",
        ),
    ),
    _off(
        "num_moe_experts",
        None,
        "experts and their routers communicate over groups of one size, and dynamic context parallelism gives "
        "micro-batches several",
        remedy=_ONE_SIZE,
        is_on=lambda run: run.experts not in (None, "none"),
        options=Words(
            case=lambda run: f"--experts {run.experts} with --packer {run.packer}",
            remedy="use another packer",
        ),
    ),
    _off(
        "multi_latent_attention",
        False,
        "megatron-core 0.19 has no dynamic context parallelism with it (MLA)",
        remedy=_ONE_SIZE,
    ),
    _off("mtp_num_layers", None, "multi-token prediction rolls tokens over groups of one size"),
    Limit(
        name="`context_parallel_size` 1 with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and run.context_parallel_size == 1,
        reason="some graphs span several ranks, and megatron-core makes the stream of context parallelism only above 1",
        options=Words(
            case=lambda run: "--context-parallel-size 1",
            remedy="use 2, and half as large a --data-parallel-size",
        ),
        fields=Words(
            case=lambda run: "context_parallel_size is 1",
            remedy="set context_parallel_size to 2, halve the data-parallel size, and analyse for these",
        ),
    ),
    Limit(
        name="an odd `max_seqlen_per_dp_cp_rank` with graphs that span several ranks",
        holds=lambda run: _spans_ranks(run) and bool((run.max_seqlen_per_dp_cp_rank or 0) % 2),
        reason="a rank holds two pieces of every document that several ranks share",
        options=Words(
            case=lambda run: f"--max-seqlen-per-dp-cp-rank {run.max_seqlen_per_dp_cp_rank}",
            remedy="use an even number",
        ),
        fields=Words(
            case=lambda run: f"max_seqlen_per_dp_cp_rank is {run.max_seqlen_per_dp_cp_rank}",
            remedy="analyse with an even number",
        ),
    ),
)
"""In the order of analysis, which tells the first alone."""
