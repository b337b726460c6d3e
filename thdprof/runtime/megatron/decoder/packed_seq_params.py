"""megatron-core's PackedSeqParams, and the runtime's PackedSequence: conversion, and the ranks that share one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.plan import Plan
from thdprof.runtime.megatron.refusals import SettingsError, group_sizes, is_dynamic
from thdprof.runtime.padding import PackedSequence, document_of_tokens, fill_padded, moved, pack
from thdprof.training import TailPolicy

if TYPE_CHECKING:
    from thdprof.runtime.dispatched_module import Call

_HOST = "_thdprof_host"
"""Attribute that we set on PackedSeqParams: a pair of boundaries and padded boundaries (or None) on the host."""

_OF_BUCKET = "_thdprof_of_bucket"
"""Attribute that we set on PackedSeqParams that were padded for a bucket."""

_CONSTANT = ("qkv_format", "local_cp_size", "cp_group", "tokens_per_sample")
"""Fields that are passed on unchanged; a graph fixes their values."""
_OF_SIZE = ("local_cp_size", "cp_group")
"""Fields of `_CONSTANT` whose values belong to a bucket under dynamic context parallelism."""


def packed_seq_params(
    cu_seqlens: torch.Tensor | Sequence[int] | NDArray[np.integer],
    *,
    cu_seqlens_padded: torch.Tensor | Sequence[int] | NDArray[np.integer] | None = None,
    max_seqlen: int | None = None,
    pad_between_seqs: bool | None = None,
    local_cp_size: int | None = None,
    device: torch.device | str = "cuda",
) -> PackedSeqParams:
    """megatron-core's metadata of one packed micro-batch, from the boundaries that its data loader has on the host.

    The boundaries stay on the host, too. Padding them then costs one small copy, and the dispatch reads nothing back
    from the GPU. For decoders with Mamba layers an installation also makes `seq_idx` from them, over the whole buffer.

    Args:
        cu_seqlens: document boundaries on the host, shape [documents + 1].
        cu_seqlens_padded: positions in memory at which the documents begin, on the host, shape [documents + 1]; None if
            documents are not padded.
        max_seqlen: tokens of the longest document, padding included; computed from the boundaries if it is not given.
        pad_between_seqs: whether documents are padded; None: they are if `cu_seqlens_padded` is given.
        local_cp_size: under dynamic context parallelism, the number of ranks that share this micro-batch; its process
            group is then set, too.
        device: the device to which the boundaries are copied.

    Raises:
        ValueError: the boundaries are not valid, or not on the host.
        SettingsError: there is no process group of `local_cp_size` ranks.
    """
    if max_seqlen is not None and int(max_seqlen) != max_seqlen:
        raise ValueError(f"max_seqlen {max_seqlen}: must be a whole number")
    memory = None if cu_seqlens_padded is None else pack(cu_seqlens_padded, max_seqlen=max_seqlen)
    packed = pack(cu_seqlens, max_seqlen=max_seqlen if memory is None else None)
    if memory is not None:
        _check_padding(packed, memory, pad_between_seqs=pad_between_seqs)
        packed = replace(packed, max_seqlen=memory.max_seqlen)
    valid = packed.cu_seqlens.to(device, non_blocking=True)
    padded = None if memory is None else memory.cu_seqlens.to(device, non_blocking=True)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=valid,
        cu_seqlens_kv=valid,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        local_cp_size=local_cp_size,
        cp_group=None if local_cp_size is None else context_group(local_cp_size),
        pad_between_seqs=pad_between_seqs,
    )
    assert packed.host is not None
    attach_host(params, packed.host, None if memory is None else memory.host)
    return params


def attach_host(params: PackedSeqParams, host: NDArray[np.int32], host_padded: NDArray[np.int32] | None = None) -> None:
    """Note on `params` the values of its boundaries on the host, so that nothing is read from the GPU.

    `host` are those of `cu_seqlens_q`, int32, shape [documents + 1], and `host_padded` those of `cu_seqlens_q_padded`.
    """
    setattr(params, _HOST, (host, host_padded))


_kept: tuple[torch.Tensor, int, NDArray[np.int32], NDArray[np.int32] | None] | None = None
"""The boundaries that `keep_on_host` was given last: the tensor, which is held, so that no other can take its memory;
how often it had been changed in place; and the host's values.
"""


def keep_on_host(
    cu_seqlens: torch.Tensor, host: NDArray[np.int32], host_padded: NDArray[np.int32] | None = None
) -> None:
    """Remember the host's boundaries of the micro-batch that is about to run, whose PackedSeqParams others will make.

    `cu_seqlens` are the boundaries on the device, int32, of which `cu_seqlens_q` will be a view from the first one.
    The others are as `attach_host` takes them.
    """
    global _kept
    _kept = cu_seqlens, cu_seqlens._version, host, host_padded


def _host_of(params: PackedSeqParams) -> tuple[Any, Any]:
    """The host's boundaries and padded boundaries of `params`; None each where only the device has them."""
    ours = getattr(params, _HOST, None)
    if ours is not None:
        return ours  # type: ignore[no-any-return]
    if _kept is not None:
        device, changes, host, host_padded = _kept
        given = params.cu_seqlens_q
        same = given.data_ptr() == device.data_ptr() and given.is_contiguous() and given.dtype == device.dtype
        complete = given.numel() == len(host) and (params.cu_seqlens_q_padded is None) == (host_padded is None)
        if same and complete and device._version == changes:
            attach_host(params, host, host_padded)  # a second pass over the micro-batch may come after the next one
            return host, host_padded
    return None, None


def read(params: PackedSeqParams, *, cp_size: int, tail: TailPolicy, with_seq_idx: bool = False) -> PackedSequence:
    """The PackedSequence that `params` describes; nothing is read from the GPU.

    The number of documents is the number of entries of cu_seqlens_q less one: give boundaries without repeated end
    entries. `cp_size` is used if `params.local_cp_size` is None. `with_seq_idx` says that layers read the document of
    every token; it is computed from boundaries on the host, and is `params.seq_idx` only if just the GPU has them.

    Raises:
        TypeError: max_seqlen is missing or on the GPU; or queries and keys have different boundaries; or layers read
            the document of every token, and it cannot be known.
        ValueError: `tail` would add padding that `pad_between_seqs` rules out.
    """
    longest = params.max_seqlen_q
    if longest is None:
        raise TypeError("PackedSeqParams.max_seqlen_q is None: set it to the number of tokens of the longest document")
    if isinstance(longest, torch.Tensor):
        if longest.is_cuda:
            raise TypeError("PackedSeqParams.max_seqlen_q is on the GPU: give the data loader's own integer")
        longest = int(longest)
    if params.cu_seqlens_kv is not params.cu_seqlens_q and params.cu_seqlens_kv.shape != params.cu_seqlens_q.shape:
        raise TypeError(
            "cu_seqlens_q and cu_seqlens_kv differ, as in cross-attention: graphs serve self-attention only"
        )
    if tail != "none" and params.cu_seqlens_q_padded is not None and params.pad_between_seqs is False:
        raise ValueError(f"pad_between_seqs is False, but the tail policy {tail} adds padding: set it to True")
    host, host_padded = _host_of(params)
    idx = _seq_idx(params, host if host_padded is None else host_padded) if with_seq_idx else None
    return PackedSequence(
        cu_seqlens=params.cu_seqlens_q.reshape(-1),
        max_seqlen=longest,
        seq_idx=idx,
        cp_size=params.local_cp_size or cp_size,
        host=host,
        cu_seqlens_padded=None if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.reshape(-1),
        host_padded=host_padded,
    )


def constants(params: PackedSeqParams, *, of_size: bool = True) -> str:
    """The fields that a graph fixes besides the boundaries, as one string; `of_size`: with those of its size."""
    fields = {name: _name(getattr(params, name)) for name in _CONSTANT if of_size or name not in _OF_SIZE}
    return " ".join(f"{name}={value}" for name, value in {**fields, "pad_between_seqs": _pads(params)}.items())


def write(packed: PackedSequence, like: PackedSeqParams) -> PackedSeqParams:
    """PackedSeqParams of `packed`, with all other fields as in `like`; `like` itself if its boundaries are unchanged.

    `pad_between_seqs` is always set: Transformer Engine would else compare padded and unpadded boundaries on the GPU,
    and wait. `total_tokens` is never set: PackedSeqParams would compute seq_idx from the boundaries, padded ones too,
    and wait.
    """
    if packed.max_seqlen == like.max_seqlen_q and (
        _same(packed.cu_seqlens, like.cu_seqlens_q)
        and _same(packed.cu_seqlens_padded, like.cu_seqlens_q_padded)
        and (packed.seq_idx is None or _same(packed.seq_idx, like.seq_idx))
    ):
        return like
    params = PackedSeqParams(
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        cu_seqlens_q_padded=packed.cu_seqlens_padded,
        cu_seqlens_kv_padded=packed.cu_seqlens_padded,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        seq_idx=None if packed.seq_idx is None else packed.seq_idx[None],
        pad_between_seqs=_pads(like),
        **{name: getattr(like, name) for name in _CONSTANT},
    )
    setattr(params, _OF_BUCKET, True)
    return params


def is_of_a_bucket(params: PackedSeqParams) -> bool:
    """Whether `write` has made these, and no trainer."""
    return getattr(params, _OF_BUCKET, False)


def pad_call(call: Call, bucket: Bucket) -> PackedSequence:
    """The metadata of `call`, padded for the graphs of `bucket`, on the device of the call's tensors."""
    device = call.tensors[0].device

    def pad(values: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            rest = values[-1:].expand(bucket.max_seqs + 1 - len(values))
            return torch.cat((values, rest))
        filled = torch.empty(bucket.max_seqs + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        fill_padded(filled.numpy(), values)
        return filled.to(device, non_blocking=True)

    in_memory, idx = call.boundaries.padded, call.boundaries.seq_idx
    if call.packed.seq_idx is not None and idx is None:
        memory = call.boundaries.in_memory
        assert isinstance(memory, np.ndarray)  # boundaries on the GPU come with seq_idx
        idx = moved(document_of_tokens(memory, bucket.n_tokens * bucket.cp_size), device)
    return PackedSequence(
        cu_seqlens=pad(call.boundaries.valid),
        max_seqlen=bucket.max_seqlen,
        seq_idx=idx,
        cp_size=bucket.cp_size,
        cu_seqlens_padded=None if in_memory is None else pad(in_memory),
    )


def _seq_idx(params: PackedSeqParams, memory: NDArray[np.int32] | None) -> torch.Tensor:
    """Document of every token, int32: up to the last boundary of `memory`; without it, from `params`."""
    if memory is not None:
        return torch.from_numpy(document_of_tokens(memory, int(memory[-1])))
    idx: torch.Tensor | None = params.seq_idx
    if idx is None or idx.dtype != torch.int32:
        raise TypeError(
            f"PackedSeqParams.seq_idx is {idx if idx is None else idx.dtype}, and its boundaries are not on the "
            "host, but the model has Mamba layers: make it with thdprof.runtime.megatron.packed_seq_params, or give "
            "seq_idx, int32, [1, tokens], on the device"
        )
    return idx.reshape(-1)


def _check_padding(packed: PackedSequence, memory: PackedSequence, *, pad_between_seqs: bool | None) -> None:
    assert packed.host is not None
    assert memory.host is not None
    if len(memory.host) != len(packed.host):
        raise ValueError(
            f"cu_seqlens has {len(packed.host)} entries and cu_seqlens_padded {len(memory.host)}: give equally many"
        )
    short = np.flatnonzero(np.diff(memory.host) < np.diff(packed.host))
    if len(short):
        raise ValueError(
            f"document {short[0]} has more tokens in cu_seqlens than in cu_seqlens_padded: its padding must "
            "be counted there"
        )
    if pad_between_seqs is False and not np.array_equal(memory.host, packed.host):
        raise ValueError(
            "pad_between_seqs is False, but cu_seqlens and cu_seqlens_padded differ: leave pad_between_seqs out"
        )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _pads(params: PackedSeqParams) -> bool | None:
    pads: bool | None = params.pad_between_seqs
    return True if pads is None and params.cu_seqlens_q_padded is not None else pads


def _name(value: Any) -> str:
    return str(value) if value is None or isinstance(value, int | str) else f"{type(value).__name__}@{id(value)}"


# --- the ranks that share a micro-batch under context parallelism ---------------------------------------------------


ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""Stands for the group of a micro-batch that one rank runs alone; megatron-core makes no process group of one rank."""


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
                    collections[size].cp = group if group is not None else ONE_RANK
                self._attentions.append((module, collections))

    def check(self, params: PackedSeqParams) -> None:
        """Raise ValueError where `params` lacks its size, or this rank's group of that size: other ranks would wait."""
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
    for size in sorted({*group_sizes(ranks)} - {*groups}):  # sizes without a bucket run eagerly, and need a group, too
        with suppress(SettingsError):
            groups[size] = context_group(size)
    return ContextGroups(groups, block)


def misplaced(sample_id_groups: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """One line for every sample that a schedule runs on ranks which have no process group; training would hang there.

    Args:
        sample_id_groups: for every round, the samples of each rank of the domain, as megatron-core's
            BalancedCPScheduler returns them.
    """
    lines = []
    for number, ranks in enumerate(sample_id_groups):
        placed: dict[int, list[int]] = {}
        for rank, samples in enumerate(ranks):
            for sample in samples:
                placed.setdefault(sample, []).append(rank)
        for sample, members in placed.items():
            size, first = len(members), members[0]
            is_in_line = members == [*range(first, first + size)] and first % size == 0
            if size not in group_sizes(len(ranks)) or not is_in_line:
                where = f"runs on ranks {members}, which are no group of Megatron's"
                lines.append(f"round {number}: sample {sample} {where}")
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
