"""What `thdprof.runtime.megatron` always refuses to install, said before there is a plan of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.training import DYNAMIC_CP

if TYPE_CHECKING:
    from thdprof.plan import Impl, Plan


def check_settings(given: Mapping[str, Any], impl: Impl) -> None:
    """Refuse training settings, by name, that Megatron's graphs of kind `impl` cannot serve whatever the data.

    Raises:
        UsageError: naming the option and what to use instead.
    """
    pipeline = given.get("pipeline_parallel_size") or 1
    if impl == "local" and pipeline > 1:
        raise UsageError(
            f"--impl local: with --pipeline-parallel-size {pipeline} Megatron's layer graphs take turns by "
            "micro-batch, and one that runs eagerly would let them overwrite each other; use --impl chunk"
        )
    packer = given.get("packer")
    if impl in ("none", "module") or packer not in DYNAMIC_CP:
        return
    if impl != "chunk":
        raise UsageError(
            f"--impl {impl}: layers' graphs have one context-parallel size, and --packer {packer} gives micro-batches "
            "several; use --impl chunk"
        )
    experts = given.get("experts") or "none"
    if experts != "none":
        raise UsageError(
            f"--experts {experts}: experts and their routers communicate over groups of one size, and --packer "
            f"{packer} gives micro-batches several; use another packer"
        )


def check_plan(plan: Plan) -> None:
    """Refuse graphs of several context-parallel sizes that could not be captured.

    Raises:
        UsageError: naming the option and what to use instead.
    """
    run = plan.training
    room = run.max_seqlen_per_dp_cp_rank
    if plan.graphs.impl != "chunk" or room is None or all(b.cp_size == 1 for b in plan.graphs.buckets):
        return
    if run.context_parallel_size == 1:
        raise UsageError(
            "--context-parallel-size 1: some graphs span several ranks, and megatron-core makes the stream of context "
            "parallelism only above 1; use 2, and half as large a --data-parallel-size"
        )
    if room % 2:
        raise UsageError(
            f"--max-seqlen-per-dp-cp-rank {room}: a rank holds two pieces of every document that several share; use an "
            "even number"
        )
