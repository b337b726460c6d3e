"""Whether a capture succeeded on every rank of this one's tensor- and context-parallel groups.

Their passes share collectives, and their micro-batches are the same, so that they decide the same unasked: shapes,
arguments, modes, `enabled` and the slots that backwards give back follow from the program, which is one for all of
them. Three things a rank sees alone, and asks about when they come up: a capture can fail, as for too little memory;
weights can have moved between captures and the first micro-batch; and outputs without a backward can be freed late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thdprof.runtime.agreement import alone


def of_model_parallel_ranks(device: torch.device, *, dynamic: bool = False) -> Callable[[bool], bool]:
    """Tells whether something succeeded on all ranks of the groups, which call it together; it waits for the GPU.

    Args:
        device: the GPU of this rank.
        dynamic: whether data-parallel ranks share micro-batches, too, as under dynamic context parallelism.
    """
    from megatron.core import parallel_state

    sharing = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if dynamic
        else parallel_state.get_context_parallel_group()
    )
    groups = (parallel_state.get_tensor_model_parallel_group(), sharing)
    return of_groups([group for group in groups if group.size() > 1], device)


def of_groups(groups: Sequence[Any], device: torch.device) -> Callable[[bool], bool]:
    """Tells whether something succeeded on all ranks that `groups` reach, one group after the other.

    Args:
        groups: process groups that form a grid of ranks, each of more than one rank; none: this rank decides alone.
        device: where the groups take tensors.
    """
    if not groups:
        return alone
    everywhere = torch.ones((), dtype=torch.int32, device=device)  # made now: a failed capture may leave no memory

    def agreed(succeeded: bool) -> bool:
        everywhere.fill_(int(succeeded))
        for group in groups:
            torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(everywhere.item())

    return agreed
