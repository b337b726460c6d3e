"""Process groups of dynamic context parallelism, in which every micro-batch is shared by a group of its own size.

megatron-core 0.19 takes the group of a micro-batch from `PackedSeqParams.local_cp_size` and `cp_group` in its
attention; but its layers compute the positions of packed tokens from the group with which the model was built. Here the
layers get the micro-batch's own group for the time of a forward. A backward needs no such change: it uses the values
that its forward saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thdprof.runtime.megatron.refusals import SettingsError, group_sizes, is_dynamic

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from thdprof.plan import Plan


class OneRank:
    """Stands for the group of a micro-batch that one rank runs alone; megatron-core makes no process group of one
    rank.
    """

    def size(self) -> int:
        """The number of ranks in the group."""
        return 1

    def rank(self) -> int:
        """The place of this rank in the group."""
        return 0


class ContextGroups:
    """This rank's context-parallel group of every size, and the attention layers that read their group."""

    def __init__(self, groups: Mapping[int, Any], block: nn.Module) -> None:
        """Groups for the decoder `block`.

        Args:
            groups: process group by number of ranks; None for one rank, as megatron-core has it.
            block: a decoder; its attention layers have an attribute `pg_collection`.
        """
        self._groups = dict(groups)
        self._attentions: list[tuple[Any, dict[int, Any]]] = []
        for module in block.modules():
            if hasattr(module, "pg_collection") and hasattr(module, "core_attention"):
                collections: dict[int, Any] = {size: copy.copy(module.pg_collection) for size in self._groups}
                for size, group in self._groups.items():
                    collections[size].cp = group if group is not None else OneRank()
                self._attentions.append((module, collections))

    def check(self, params: PackedSeqParams) -> None:
        """Make sure that `params` names its size and has this rank's group of that size.

        Raises:
            ValueError: it does not. Other ranks would wait for this one, or positions would be wrong.
        """
        size = params.local_cp_size
        if size is None:
            raise ValueError(
                "PackedSeqParams.local_cp_size is None: under a plan of dynamic context parallelism every micro-batch "
                "says its size; give packed_seq_params(..., local_cp_size=...)"
            )
        if size not in self._groups:
            raise ValueError(f"PackedSeqParams.local_cp_size is {size}: this rank has groups of {sorted(self._groups)}")
        params_group, group = params.cp_group, self._groups[size]
        if params_group is not group and not (size == 1 and params_group.size() == 1):
            raise ValueError(
                f"PackedSeqParams.cp_group is not this rank's group of local_cp_size {size}: give context_group({size})"
            )

    def of_size(self, params: PackedSeqParams, size: int) -> PackedSeqParams:
        """`params`, changed for a micro-batch that `size` ranks share."""
        if params.local_cp_size == size:
            return params
        return replace(params, local_cp_size=size, cp_group=self._groups[size])

    @contextmanager
    def around(self, size: int) -> Iterator[None]:
        """Let the attention layers compute positions from the group of `size` ranks inside the block."""
        before = [module.pg_collection for module, _ in self._attentions]
        for module, collections in self._attentions:
            module.pg_collection = collections[size]
        try:
            yield
        finally:
            for (module, _), collection in zip(self._attentions, before, strict=True):
                module.pg_collection = collection


def context_group(size: int) -> Any:
    """This rank's process group of `size` context-parallel ranks; None for one rank, as megatron-core has it.

    Raises:
        SettingsError: megatron-core made no such group, or one of other ranks.
    """
    from megatron.core import parallel_state

    if size == 1:
        return None
    domain = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = torch.distributed.get_process_group_ranks(domain)
    first = domain.rank() // size * size
    try:
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
        members = torch.distributed.get_process_group_ranks(group)
    except KeyError:  # there is no group of that size, or it was destroyed
        members = []
    if members != ranks[first : first + size] or len(members) != size:
        raise SettingsError(
            f"megatron-core has no process group of {size} of the {len(ranks)} data-parallel x context-parallel ranks "
            f"here, only of {', '.join(map(str, group_sizes(len(ranks))))}, and those only after "
            "initialize_model_parallel(..., hybrid_context_parallel=True)"
        )
    return group


def groups_of(plan: Plan, block: nn.Module) -> ContextGroups | None:
    """This rank's groups under a plan of dynamic context parallelism, for the decoder `block`; None under other plans.

    Raises:
        SettingsError: there is no group of a bucket's size.
    """
    if not is_dynamic(plan):
        return None
    groups = {size: context_group(size) for size in sorted({1, *(b.cp_size for b in plan.graphs.buckets)})}
    ranks = plan.training.data_parallel_size * plan.training.context_parallel_size
    for size in group_sizes(ranks):  # sizes without a bucket run eagerly, and need a group, too
        if size not in groups:
            try:
                groups[size] = context_group(size)
            except SettingsError:
                continue
    return ContextGroups(groups, block)


def misplaced(sample_id_groups: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """One line for every sample that a schedule runs on ranks which have no process group; training would hang there.

    Args:
        sample_id_groups: for every round, the samples of each rank of the domain, as megatron-core's
            BalancedCPScheduler returns them.
    """
    lines = []
    for number, ranks in enumerate(sample_id_groups):
        sizes = group_sizes(len(ranks))
        placed: dict[int, list[int]] = {}
        for rank, samples in enumerate(ranks):
            for sample in samples:
                placed.setdefault(sample, []).append(rank)
        for sample, members in placed.items():
            size, first = len(members), members[0]
            fits = size in sizes and first % size == 0 and members == [*range(first, first + size)]
            if not fits:
                lines.append(
                    f"round {number}: sample {sample} runs on ranks {members}, which are no group of Megatron's"
                )
    return lines
