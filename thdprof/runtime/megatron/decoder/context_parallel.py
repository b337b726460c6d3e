"""The ranks that share a micro-batch under context parallelism, and which tokens of it each rank has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    """This rank's context-parallel group of every size, and the attention layers that read their group.

    megatron-core 0.19 takes the group of a micro-batch from `PackedSeqParams.local_cp_size` and `cp_group` in its
    attention; but its layers compute the positions of packed tokens from the group with which the model was built. Here
    the layers get the micro-batch's own group for the time of a forward. A backward needs no such change: it uses the
    values that its forward saved.
    """

    def __init__(self, groups: Mapping[int, Any], block: nn.Module) -> None:
        """Process groups of `block` by number of ranks; None for one rank, as megatron-core has it."""
        self._groups = dict(groups)
        self._attentions: list[tuple[Any, dict[int, Any]]] = []
        for module in block.modules():
            if hasattr(module, "pg_collection") and hasattr(module, "core_attention"):
                collections: dict[int, Any] = {size: copy.copy(module.pg_collection) for size in self._groups}
                for size, group in self._groups.items():
                    collections[size].cp = group if group is not None else OneRank()
                self._attentions.append((module, collections))

    def check(self, params: PackedSeqParams) -> None:
        """Raise ValueError where `params` does not name its size, or has not this rank's group of that size: other
        ranks would wait for this one, or positions would be wrong.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Documents of one micro-batch in memory, each followed by its padding; room at the end is a dummy without tokens.

    Give `cu_seqlens` and `cu_seqlens_padded` to `packed_seq_params` with `pad_between_seqs=True`.
    """

    cp_size: int
    """Number of ranks that share the micro-batch."""
    cu_seqlens: NDArray[np.int32]
    """int32, shape [documents + 1]: running total of the documents' tokens; the dummy has none."""
    cu_seqlens_padded: NDArray[np.int32]
    """int32, shape [documents + 1]: the position in memory at which each document begins."""

    @property
    def n_tokens(self) -> int:
        """Tokens in memory, padding included, on all ranks together."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def n_seqs(self) -> int:
        """Number of documents, the dummy included."""
        return len(self.cu_seqlens) - 1

    @property
    def max_seqlen(self) -> int:
        """Tokens in memory of the longest document, padding and dummy included."""
        return int(np.diff(self.cu_seqlens_padded).max(initial=0))

    def tokens_of(self, rank: int) -> NDArray[np.int64]:
        """Numbers of the tokens that rank `rank` of the group holds: int64, shape [n_tokens / cp_size]; -1 is padding.

        Tokens are numbered through all documents, without padding. Every document is cut into 2 * cp_size pieces. A
        rank holds one piece counted from the front and the same piece counted from the back, so that all ranks have
        equal attention work.
        """
        memory = np.full(self.n_tokens, -1, dtype=np.int64)
        for begin, first, last in zip(
            self.cu_seqlens_padded[:-1], self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True
        ):
            memory[begin : begin + last - first] = np.arange(first, last)
        return memory[places_of(self.cu_seqlens_padded, cp_size=self.cp_size, rank=rank)]


def places_of(cu_seqlens_padded: NDArray[np.integer], *, cp_size: int, rank: int) -> NDArray[np.int64]:
    """Positions in memory of the tokens that `rank` of `cp_size` ranks holds, in the rank's order: int64.

    Raises:
        ValueError: a document's length in memory is not a multiple of 2 * cp_size, and several ranks share it.
    """
    if cp_size == 1:
        return np.arange(int(cu_seqlens_padded[-1]), dtype=np.int64)
    lengths = np.diff(cu_seqlens_padded).astype(np.int64)
    uneven = np.flatnonzero(lengths % (2 * cp_size))
    if len(uneven):
        raise ValueError(
            f"document {uneven[0]} has {lengths[uneven[0]]} tokens in memory: not a multiple of {2 * cp_size}, twice "
            f"the context-parallel size {cp_size}"
        )
    piece = lengths // (2 * cp_size)
    begins = cu_seqlens_padded[:-1].astype(np.int64)
    starts = np.stack((begins + rank * piece, begins + (2 * cp_size - 1 - rank) * piece), axis=1).reshape(-1)
    sizes = np.repeat(piece, 2)
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    return np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()))


def lay_out(
    document_tokens: Sequence[int] | NDArray[np.integer],
    *,
    cp_size: int,
    max_seqlen_per_rank: int,
    multiple: int | None = None,
) -> Layout:
    """Lay documents out for `cp_size` ranks, each of which has room for `max_seqlen_per_rank` tokens.

    The room that is left becomes a dummy document. If the documents need more room than there is, they are laid out all
    the same: such a micro-batch is larger than any graph, and runs eagerly.

    Args:
        document_tokens: tokens of every document, in order.
        cp_size: number of ranks that share the micro-batch.
        max_seqlen_per_rank: tokens for which each rank has room: the plan's training.max_seqlen_per_dp_cp_rank.
        multiple: every document is padded to a multiple of so many tokens; None: 2 * cp_size, or 1 on one rank.

    Raises:
        ValueError: the multiple or the room cannot be divided among the ranks.
    """
    parts = 2 * cp_size if cp_size > 1 else 1
    multiple = multiple or parts
    room = cp_size * max_seqlen_per_rank
    if multiple % parts or room % parts:
        raise ValueError(f"multiple {multiple}, room {room}: must be multiples of {parts}, twice the ranks' number")
    lengths = np.asarray(document_tokens, dtype=np.int64)
    padded = -(-lengths // multiple) * multiple
    tail = room - int(padded.sum())
    if tail > 0:
        lengths, padded = np.append(lengths, 0), np.append(padded, tail)
    return Layout(
        cp_size=cp_size,
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        cu_seqlens_padded=np.concatenate(([0], np.cumsum(padded))).astype(np.int32),
    )
