"""Process groups of dynamic context parallelism, under which a group of its own size shares every micro-batch.

megatron-core 0.19 tells attention the group of a micro-batch by `PackedSeqParams.local_cp_size` and `cp_group`, but
its layers take the positions of packed tokens from the group that the model was built with. Here they are given the
micro-batch's own group for the time of a pass, forward alone: backward passes keep what they need.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thdprof.runtime.megatron.refusals.dynamic_cp import group_sizes, is_dynamic
from thdprof.runtime.megatron.refusals.settings import SettingsError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from thdprof.plan import Plan


class OneRank:
    """Stands for the group of a micro-batch that one rank runs alone, of which megatron-core makes no process group."""

    def size(self) -> int:
        """Ranks in the group."""
        return 1

    def rank(self) -> int:
        """This rank's place in it."""
        return 0


class ContextGroups:
    """This rank's context-parallel group of every size, and what of a decoder must know of them."""

    def __init__(self, groups: Mapping[int, Any], block: nn.Module) -> None:
        """Groups for the decoder `block`.

        Args:
            groups: process group by size; None for size 1, as megatron-core has it.
            block: its attention layers have `pg_collection`.
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
        """Make sure that `params` say their size and have this rank's group of it.

        Raises:
            ValueError: they do not: other ranks would wait for this one, or positions would be wrong.
        """
        size = params.local_cp_size
        if size is None:
            raise ValueError(
                "PackedSeqParams.local_cp_size is None: under a plan of dynamic context parallelism every micro-batch "
                "says its size; give packed_seq_params(..., local_cp_size=...)"
            )
        if size not in self._groups:
            raise ValueError(f"PackedSeqParams.local_cp_size is {size}: this rank has groups of {sorted(self._groups)}")
        given, group = params.cp_group, self._groups[size]
        if given is not group and not (size == 1 and given.size() == 1):
            raise ValueError(
                f"PackedSeqParams.cp_group is not this rank's group of local_cp_size {size}: give context_group({size})"
            )

    def of_size(self, params: PackedSeqParams, size: int) -> PackedSeqParams:
        """`params` for a micro-batch of `size` ranks."""
        if params.local_cp_size == size:
            return params
        return replace(params, local_cp_size=size, cp_group=self._groups[size])

    @contextmanager
    def around(self, size: int) -> Iterator[None]:
        """Let attention layers take positions from the group of `size` in the block."""
        before = [module.pg_collection for module, _ in self._attentions]
        for module, collections in self._attentions:
            module.pg_collection = collections[size]
        try:
            yield
        finally:
            for (module, _), collection in zip(self._attentions, before, strict=True):
                module.pg_collection = collection


def context_group(size: int) -> Any:
    """This rank's process group of `size` context-parallel ranks; None for 1, as megatron-core wants it.

    Raises:
        SettingsError: megatron-core made none, or not with so many ranks.
    """
    from megatron.core import parallel_state

    if size == 1:
        return None
    domain = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = torch.distributed.get_process_group_ranks(domain)
    first = domain.rank() // size * size
    try:
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
        found = torch.distributed.get_process_group_ranks(group)
    except KeyError:  # none of that size, or one that was destroyed
        found = []
    if found != ranks[first : first + size] or len(found) != size:
        raise SettingsError(
            f"megatron-core has no process group of {size} of the {len(ranks)} data-parallel x context-parallel ranks "
            f"here, only of {', '.join(map(str, group_sizes(len(ranks))))}, and those only after "
            "initialize_model_parallel(..., hybrid_context_parallel=True)"
        )
    return group


def groups_of(plan: Plan, block: nn.Module) -> ContextGroups | None:
    """The groups of a plan of dynamic context parallelism for one decoder; None for other plans.

    Raises:
        SettingsError: there is no group of a bucket's size.
    """
    if not is_dynamic(plan):
        return None
    groups = {size: context_group(size) for size in sorted({1, *(b.cp_size for b in plan.graphs.buckets)})}
    ranks = plan.training.data_parallel_size * plan.training.context_parallel_size
    for size in group_sizes(ranks):  # those without a bucket run eagerly
        if size not in groups:
            try:
                groups[size] = context_group(size)
            except SettingsError:
                continue
    return ContextGroups(groups, block)


def misplaced(sample_id_groups: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """Where a schedule runs a sample on ranks that have no process group; training would hang there.

    Args:
        sample_id_groups: samples of every rank of the domain in every round, as megatron-core's BalancedCPScheduler
            gives them.
    """
    said = []
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
                said.append(
                    f"round {number}: sample {sample} runs on ranks {members}, which are no group of Megatron's"
                )
    return said
