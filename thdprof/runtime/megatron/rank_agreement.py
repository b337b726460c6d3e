"""What ranks that communicate inside captured passes agree on: their decisions, and whether captures succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.plan import Plan
from thdprof.runtime.agreement import alone
from thdprof.runtime.megatron.refusals import SettingsError, averages_over_all_ranks, experts_communicate, shared_by

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others of its group, where the trainer gives no time."""


class Peers:
    """A gloo group of ranks whose captured passes share collectives; every rank makes the same calls in the same order.

    Messages go from host to host, so that no call waits for a GPU.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Make the group of the global `ranks`. A call that another rank does not make raises after `timeout`."""
        self.ranks = list(ranks)
        """Global ranks of the group."""
        self._group = distributed.new_group(self.ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value, in the range of int64, over the ranks of the group; every rank gives as many."""
        here = torch.tensor(list(values), dtype=torch.int64)
        distributed.all_reduce(here, op=distributed.ReduceOp.MAX, group=self._group)
        return here.tolist()

    def all(self, succeeded: bool) -> bool:
        """Whether something succeeded on every rank of the group."""
        return self.largest([int(not succeeded)]) == [0]


def peers_of(config: Any, plan: Plan, timeout: timedelta | None = DEFAULT_TIMEOUT) -> Peers | None:
    """The ranks that must decide as this one does; None where no rank with other micro-batches shares its captures.

    Call it on every rank of the run: the ranks exchange their groups over the default process group.

    Raises:
        SettingsError: such ranks need a group on the host, and none may be made (`timeout` is None).
    """
    shared = shared_by(config, plan) if plan.captured else ()
    if not shared:
        return None
    if timeout is None:
        raise SettingsError(
            f"{shared[0]}: ranks that share captured collectives agree on every micro-batch from host to host, over "
            "gloo; leave out --disable-gloo-process-groups (Megatron-Bridge: set dist.use_gloo_process_groups to True)"
        )
    groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()]
    if experts_communicate(config, plan):
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
    if averages_over_all_ranks(config):
        groups.append(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    own = sorted({rank for group in groups for rank in distributed.get_process_group_ranks(group)})
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, own)
    ranks = join_neighbours(everyones, distributed.get_rank())
    return Peers(ranks, timeout=timeout) if len(ranks) > 1 else None


def join_neighbours(neighbours: Sequence[Collection[int]], rank: int) -> tuple[int, ...]:
    """All ranks that `rank` reaches from neighbour to neighbour, ascending, itself among them.

    Groups overlap: with tensor and expert parallelism, a rank shares experts with one rank and a tensor with another,
    and all of them must decide as one.
    """
    found, waiting = {rank}, [rank]
    while waiting:
        new = {*neighbours[waiting.pop()]} - found
        found |= new
        waiting += new
    return tuple(sorted(found))


_MODULUS = (1 << 61) - 1
_REASONS = tuple(FallbackReason)


class Decisions:
    """A running digest of every model chunk's decisions, in order; one all-reduce compares it between ranks."""

    def __init__(
        self, num_chunks: int, *, enabled: bool, across_context: bool = True, peers: Peers | None = None
    ) -> None:
        """No decisions yet; `peers` are ranks with other micro-batches that must decide the same."""
        self.digests = [0] * num_chunks
        """One digest for each chunk; equal on ranks that decided the same."""
        self._enabled, self._across_context, self._peers = enabled, across_context, peers

    def recorder(self, chunk: int) -> Callable[[Bucket | FallbackReason], None]:
        """The callback that records each decision of `chunk`."""

        def record(choice: Bucket | FallbackReason) -> None:
            if isinstance(choice, FallbackReason):
                code = 1 + _REASONS.index(choice)
            else:
                code = hash((choice.max_seqs, choice.max_seqlen, choice.n_tokens, choice.cp_size)) % _MODULUS
            self.digests[chunk] = (self.digests[chunk] * 1_000_003 + code) % _MODULUS

        return record

    def check(self) -> None:
        """Compare the digest with those of the tensor-, context- and pipeline-parallel group's other ranks, if enabled.

        Ranks with other micro-batches that share captured collectives are compared, too, with all their chunks. Without
        `across_context`, the context-parallel group is left out: under dynamic context parallelism its ranks run
        micro-batches of different sizes.

        Raises:
            RuntimeError: another rank took other decisions.
        """
        if not self._enabled:
            return
        if self._peers is not None:
            self._check_peers(self._peers)
        group = parallel_state.get_model_parallel_group()
        context = parallel_state.get_context_parallel_group()
        # one chunk stands for all, which see the same micro-batches; max(d) == -max(-d) only if all digests d are equal
        here = torch.tensor([self.digests[0], -self.digests[0]], device="cuda")
        for ranks in (group, context) if self._across_context and context.size() > 1 else (group,):
            torch.distributed.all_reduce(here, op=torch.distributed.ReduceOp.MAX, group=ranks)
        most, least = here.tolist()
        if most != -least:
            raise RuntimeError(
                "ranks of one model-parallel group decided differently about the same micro-batches: give all of them "
                "the same boundaries and max_seqlen"
            )

    def _check_peers(self, peers: Peers) -> None:
        both, count = peers.largest([*self.digests, *(-digest for digest in self.digests)]), len(self.digests)
        if both[:count] != [-digest for digest in both[count:]]:
            raise RuntimeError(
                f"ranks {', '.join(map(str, peers.ranks))} share captured collectives and decided differently: run all "
                "of their micro-batches through the installed decoders, as many on each rank"
            )


def agree_over_model_parallel_ranks(device: torch.device, *, dynamic: bool = False) -> Callable[[bool], bool]:
    """Returns whether something succeeded on all ranks of the groups, which call it together; it waits for the GPU.

    Their passes share collectives, and their micro-batches are the same, so that they decide the same without a word:
    shapes, arguments, modes, `enabled` and the slots that backwards give back follow from the program, which is one for
    all of them. Three things a rank finds alone: a capture can fail, as for too little memory; weights can have moved
    between captures and the first micro-batch; and outputs without a backward can be freed late. If `dynamic`,
    data-parallel ranks share micro-batches, too, as under dynamic context parallelism.
    """
    sharing = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if dynamic
        else parallel_state.get_context_parallel_group()
    )
    groups = (parallel_state.get_tensor_model_parallel_group(), sharing)
    return agree_over_groups([group for group in groups if group.size() > 1], device)


def agree_over_groups(groups: Sequence[Any], device: torch.device) -> Callable[[bool], bool]:
    """Returns whether something succeeded on all ranks that `groups` reach, one group after the other.

    They form a grid of ranks, each of more than one rank, and take tensors on `device`; without groups this rank
    decides alone.
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
