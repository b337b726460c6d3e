"""Conversion between megatron-core's PackedSeqParams and the runtime's PackedSequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from thdprof.runtime.megatron.decoder.context_parallel import context_group
from thdprof.runtime.padding import PackedSequence, document_of_tokens, fill_padded, moved, pack
from thdprof.training import TailPolicy

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from thdprof.dispatch import Bucket
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
    from megatron.core.packed_seq_params import PackedSeqParams

    if max_seqlen is not None and int(max_seqlen) != max_seqlen:
        raise ValueError(f"max_seqlen {max_seqlen}: must be a whole number")
    memory = None if cu_seqlens_padded is None else pack(cu_seqlens_padded, max_seqlen=max_seqlen)
    packed = pack(cu_seqlens) if memory is not None else pack(cu_seqlens, max_seqlen=max_seqlen)
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

    Args:
        params: metadata of one micro-batch.
        host: the values of `cu_seqlens_q`, int32, shape [documents + 1].
        host_padded: the values of `cu_seqlens_q_padded`, if there is one.
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

    Args:
        cu_seqlens: the boundaries on the device, int32, of which `cu_seqlens_q` will be a view with the same beginning.
        host: the same values on the host, int32, shape [documents + 1].
        host_padded: positions in memory at which documents begin, if they are padded.
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
    entries.

    Args:
        params: metadata of self-attention, in `thd` format.
        cp_size: number of context-parallel ranks that share the rows, if `params.local_cp_size` is None.
        tail: the tail policy.
        with_seq_idx: whether layers read the document of every token. It is computed from boundaries on the host;
            `params.seq_idx` is used only if just the GPU has the boundaries.

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
    """The fields that a graph fixes besides the number of boundaries, as one string to compare; without `of_size`,
    those that differ between context-parallel sizes are left out.
    """
    fields = {name: _name(getattr(params, name)) for name in _CONSTANT if of_size or name not in _OF_SIZE}
    return " ".join(f"{name}={value}" for name, value in {**fields, "pad_between_seqs": _pads(params)}.items())


def write(packed: PackedSequence, like: PackedSeqParams) -> PackedSeqParams:
    """PackedSeqParams of `packed`, with all other fields as in `like`; `like` itself if its boundaries are unchanged.

    `pad_between_seqs` is always set: Transformer Engine would else compare padded and unpadded boundaries on the GPU,
    and wait. `total_tokens` is never set: PackedSeqParams would compute seq_idx from the boundaries, padded ones too,
    and wait.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

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


def padded(call: Call, bucket: Bucket) -> PackedSequence:
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
    """Document of every token, int32: up to the last boundary on the host; from `params` if only the GPU has
    boundaries.
    """
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
