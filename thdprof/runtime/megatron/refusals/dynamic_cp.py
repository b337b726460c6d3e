"""Dynamic context parallelism: the groups that megatron-core makes, and settings that do not fit the plan's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan


def is_dynamic(plan: Plan) -> bool:
    """Whether micro-batches of the plan have context-parallel sizes of their own."""
    return plan.training.max_seqlen_per_dp_cp_rank is not None


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Sizes of the groups that megatron-core 0.19 makes of `num_ranks` data-parallel x context-parallel ranks.

    These are the powers of two up to half of the largest one in `num_ranks`, and all ranks.
    """
    powers = (1 << i for i in range(1, num_ranks.bit_length() - 1))
    return tuple(sorted({1, *powers, num_ranks}))


def refusals(config: Any, plan: Plan) -> Iterator[str]:
    """A line for every setting of config and plan that does not fit the plan's context-parallel sizes.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
    """
    if not is_dynamic(plan):
        if getattr(config, "hybrid_context_parallel", False):
            yield (
                "hybrid_context_parallel is True, the plan has one context-parallel size for all micro-batches: set it "
                "to False, or analyse with --packer balanced_cp"
            )
        return
    yield from _of_plan(config, plan)
    kinds = getattr(config, "cp_comm_type", None) or "p2p"
    if other := sorted({kinds} - {"p2p"} if isinstance(kinds, str) else {*kinds} - {"p2p"}):
        yield f"cp_comm_type is {other[0]!r}: only rings were checked with groups that change; set it to 'p2p'"
    if not config.calculate_per_token_loss:
        yield (
            "calculate_per_token_loss is False: a token would weigh more in a micro-batch of fewer of them; set it to "
            "True"
        )


def _of_plan(config: Any, plan: Plan) -> Iterator[str]:
    graphs, tokens_of_rank = plan.graphs, plan.training.max_seqlen_per_dp_cp_rank or 0
    if graphs.impl != "none" and graphs.capture != "startup":
        yield (
            f"graphs.capture is {graphs.capture}: ranks of every group must capture together, whatever the size of "
            "their micro-batch; set it to startup"
        )
    num_ranks = plan.training.data_parallel_size * plan.training.context_parallel_size
    sizes = group_sizes(num_ranks)
    for size in sorted({b.cp_size for b in graphs.buckets} - {*sizes}):
        made = ", ".join(map(str, sizes))
        yield f"a bucket's cp_size is {size}: megatron-core makes groups of {made} of {num_ranks} ranks; leave it out"
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if tokens_of_rank % shards:
        yield (
            f"max_seqlen_per_dp_cp_rank is {tokens_of_rank}: sequence parallelism shares it out among {shards} ranks; "
            "analyse with a multiple"
        )
