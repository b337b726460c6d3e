"""The ranks that communicate inside captured passes but train on other micro-batches, and what they agree on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from thdprof.runtime.megatron.refusals import (
    SettingsError,
    averages_over_all_ranks,
    experts_communicate,
    shared_by,
)

if TYPE_CHECKING:
    from thdprof.plan import Plan

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others of its group, where the trainer gives no time."""


class Peers:
    """A gloo group of ranks whose captured passes share collectives; every rank makes the same calls in the same order.

    Messages go from host to host, so that no call waits for a GPU.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Make the group; only its ranks take part.

        Args:
            ranks: global ranks of the group, this one among them.
            timeout: after which a call that another rank does not make raises.
        """
        self.ranks = tuple(ranks)
        """Global ranks of the group."""
        self._group = distributed.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks of the group.

        Args:
            values: as many on every rank, each in the range of int64.
        """
        here = torch.tensor(list(values), dtype=torch.int64)
        distributed.all_reduce(here, op=distributed.ReduceOp.MAX, group=self._group)
        return here.tolist()

    def all(self, succeeded: bool) -> bool:
        """Whether something succeeded on every rank of the group."""
        return self.largest([int(not succeeded)]) == [0]


def peers_of(config: Any, plan: Plan, timeout: timedelta | None = DEFAULT_TIMEOUT) -> Peers | None:
    """The ranks that must decide as this one does; None where no rank with other micro-batches shares its captures.

    Call it on every rank of the run: the ranks tell each other their groups, over the default process group.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
        timeout: of the group; None where no process group may be made on the host.

    Raises:
        SettingsError: such ranks need a group on the host, and none may be made.
    """
    shared = shared_by(config, plan) if plan.captured else ()
    if not shared:
        return None
    if timeout is None:
        raise SettingsError(
            f"{shared[0]}: ranks that share captured collectives agree on every micro-batch from host to host, over "
            "gloo; leave out --disable-gloo-process-groups (Megatron-Bridge: set dist.use_gloo_process_groups to True)"
        )
    own = _communicates_with(config, experts_captured=experts_communicate(config, plan))
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, own)
    ranks = joined(everyones, distributed.get_rank())
    return Peers(ranks, timeout=timeout) if len(ranks) > 1 else None


def _communicates_with(config: Any, *, experts_captured: bool) -> list[int]:
    """Global ranks with which this one communicates inside a captured pass, itself among them."""
    from megatron.core import parallel_state

    groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()]
    if experts_captured:
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
    if averages_over_all_ranks(config):
        groups.append(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    return sorted({rank for group in groups for rank in distributed.get_process_group_ranks(group)})


def joined(neighbours: Sequence[Collection[int]], rank: int) -> tuple[int, ...]:
    """All ranks that `rank` reaches from neighbour to neighbour, ascending, itself among them.

    Groups overlap: with tensor and expert parallelism, a rank shares experts with one rank and a tensor with another,
    and all of them must decide alike.

    Args:
        neighbours: for every rank, the ranks that it communicates with.
        rank: the rank to begin with.
    """
    found, waiting = {rank}, [rank]
    while waiting:
        new = {*neighbours[waiting.pop()]} - found
        found |= new
        waiting += new
    return tuple(sorted(found))
