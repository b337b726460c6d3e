"""Packed-sequence metadata of a micro-batch, its tail policy, and its padding to a bucket's static shape.

Boundaries are the entries of `cu_seqlens`: the position at which each document begins, and the end of the last one. The
tail is the tokens after the last boundary; the tail policy says whether they become a dummy document
(`append_dummy_seq`), part of the last document (`extend_last`) or stay as they are (`none`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from thdprof.dispatch import Shape
from thdprof.training import TailPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """The metadata that a module's attention needs to keep the documents of a packed micro-batch apart."""

    cu_seqlens: torch.Tensor
    """int32, shape [documents + 1], on the host or the GPU: the boundaries. Repeated end entries are padding."""
    max_seqlen: int
    """Tokens of the longest document, or more: attention kernels size their grid by it."""
    seq_idx: torch.Tensor | None = None
    """int32, shape [tokens]: number of each token's document, for state-space layers; computed outside graphs."""
    cp_size: int = 1
    """Number of context-parallel ranks that share the micro-batch."""
    host: NDArray[np.int32] | None = None
    """`cu_seqlens` on the host, shape [documents + 1]; None in a captured module, or if only the GPU has them."""
    cu_seqlens_padded: torch.Tensor | None = None
    """int32, shape [documents + 1]: where each document begins in memory, if documents are followed by padding."""
    host_padded: NDArray[np.int32] | None = None
    """`cu_seqlens_padded` on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Document boundaries of one micro-batch after the tail policy: all on the host, or all on the GPU."""

    valid: NDArray[np.int32] | torch.Tensor
    """int32, shape [documents + 1]: `cu_seqlens`."""
    padded: NDArray[np.int32] | torch.Tensor | None = None
    """int32, shape [documents + 1]: `cu_seqlens_padded`, if documents are followed by padding."""
    seq_idx: torch.Tensor | None = None
    """int32, shape [tokens], on the GPU: number of each token's document, if only the GPU has the boundaries."""

    @property
    def n_seqs(self) -> int:
        """Number of documents."""
        return len(self.valid) - 1

    def squared(self) -> float:
        """Sum of the squared lengths of the documents in memory, padding and a dummy tail included, as an analysis
        counts them; 0 where only the GPU has the boundaries.
        """
        if isinstance(self.in_memory, torch.Tensor):
            return 0.0
        return float((np.diff(self.in_memory).astype(np.float64) ** 2).sum())

    @property
    def in_memory(self) -> NDArray[np.int32] | torch.Tensor:
        """Boundaries of the documents with their padding: `padded` where there are any, else `valid`."""
        return self.valid if self.padded is None else self.padded


def pack(
    cu_seqlens: torch.Tensor | Sequence[int] | NDArray[np.integer],
    *,
    max_seqlen: int | None = None,
    cp_size: int = 1,
    with_seq_idx: bool = False,
) -> PackedSequence:
    """Metadata of one micro-batch, from the boundaries that its data loader has on the host.

    Args:
        cu_seqlens: document boundaries on the host, shape [documents + 1]; they begin with 0 and never fall.
        max_seqlen: tokens of the longest document; computed from the boundaries if it is not given. A larger value, as
            from a loader that always gives the sequence length, asks for a bucket of that length.
        cp_size: number of context-parallel ranks that share this micro-batch.
        with_seq_idx: whether the module also reads the document of every token.

    Raises:
        ValueError: the boundaries are on a GPU (reading them there would wait for it), or are not boundaries.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.is_cuda:
            raise ValueError("cu_seqlens is on the GPU: give the data loader's own copy, on the host")
        values = cu_seqlens.detach().numpy().reshape(-1)
    else:
        values = np.asarray(cu_seqlens).reshape(-1)
    if values.size and (values.dtype.kind not in "iu" or int(values[-1]) > np.iinfo(np.int32).max):
        raise ValueError(f"cu_seqlens must be whole numbers below 2**31, got {values.dtype} up to {values[-1]}")
    host = values.astype(np.int32, copy=False)
    lengths = host[1:] - host[:-1]
    if host.size == 0 or host[0] != 0 or (lengths.size and lengths.min() < 0):
        raise ValueError(f"cu_seqlens must begin with 0 and never fall, got {host[:8].tolist()}...")
    longest = int(lengths.max(initial=0))
    if max_seqlen is None:
        max_seqlen = longest
    elif max_seqlen < longest:
        raise ValueError(f"max_seqlen {max_seqlen} is less than the longest document, {longest}")
    idx = torch.from_numpy(document_of_tokens(host, int(host[-1]))) if with_seq_idx else None
    boundaries = torch.from_numpy(host)
    return PackedSequence(cu_seqlens=boundaries, max_seqlen=int(max_seqlen), seq_idx=idx, cp_size=cp_size, host=host)


def document_of_tokens(host: NDArray[np.int32], n_tokens: int) -> NDArray[np.int32]:
    """The number of each token's document: int32, shape [n_tokens]. Tokens after the last boundary are one more."""
    ends = np.append(host[1:], n_tokens)
    sizes = np.diff(np.concatenate((host[:1], ends)))
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def with_tail(host: NDArray[np.int32], n_tokens: int, policy: TailPolicy) -> NDArray[np.int32]:
    """The boundaries `host` of a micro-batch of `n_tokens` tokens after the tail policy: int32, shape [documents + 1].

    Raises:
        ValueError: the boundaries reach past `n_tokens`.
    """
    end = int(host[-1])
    if end > n_tokens:
        raise ValueError(
            f"cu_seqlens ends at {end}, but the micro-batch has {n_tokens} tokens: give the boundaries "
            "of its own documents"
        )
    if end == n_tokens or policy == "none":
        return host
    if policy == "append_dummy_seq" or len(host) == 1:
        return np.append(host, np.int32(n_tokens))
    extended = host.copy()
    extended[-1] = n_tokens
    return extended


def boundaries_of(packed: PackedSequence, n_tokens: int, policy: TailPolicy) -> Boundaries:
    """Boundaries of a micro-batch of `n_tokens` tokens after the tail policy.

    Where documents are followed by padding, a dummy document has no valid tokens, and `extend_last` makes only the last
    document's padding longer.

    Raises:
        ValueError: boundaries on the host reach past `n_tokens`; or there is a tail policy and only the GPU has the
            boundaries, so that the tail's length, and with it the bucket, cannot be known without reading them; or
            `seq_idx` has another number of tokens.
    """
    if packed.host is None:
        if policy != "none":
            raise ValueError(
                f"the tail policy {policy} needs the boundaries on the host: make the metadata with "
                "thdprof.runtime.pack, or thdprof.runtime.megatron.packed_seq_params"
            )
        if packed.seq_idx is not None and packed.seq_idx.numel() != n_tokens:
            raise ValueError(
                f"seq_idx has {packed.seq_idx.numel()} tokens, but the micro-batch has {n_tokens}: give one entry "
                "a token"
            )
        return Boundaries(valid=packed.cu_seqlens, padded=packed.cu_seqlens_padded, seq_idx=packed.seq_idx)
    if packed.host_padded is None:
        return Boundaries(valid=with_tail(packed.host, n_tokens, policy))
    padded = with_tail(packed.host_padded, n_tokens, policy)
    valid = packed.host
    if len(padded) > len(valid):
        valid = np.append(valid, valid[-1])
    return Boundaries(valid=valid, padded=padded)


def shape_of(packed: PackedSequence, boundaries: Boundaries, n_tokens: int) -> Shape:
    """The integers by which a bucket is chosen, of `boundaries` after the tail policy and `n_tokens` on this rank."""
    longest, memory = packed.max_seqlen, boundaries.in_memory
    before_tail = packed.host if packed.host_padded is None else packed.host_padded
    if isinstance(memory, np.ndarray) and before_tail is not memory and len(memory) > 1:
        longest = max(longest, int(memory[-1] - memory[-2]))  # the tail policy added or lengthened the last document
    return Shape(n_seqs=boundaries.n_seqs, max_seqlen=longest, n_tokens=n_tokens, cp_size=packed.cp_size)


def fill_padded(target: NDArray[np.int32], host: NDArray[np.int32]) -> None:
    """Write `host` into `target`, shape [max_seqs + 1], and repeat its last entry: documents without tokens."""
    target[: len(host)] = host
    target[len(host) :] = host[-1]


def pad_cu_seqlens(
    host: NDArray[np.int32], *, max_seqs: int, n_tokens: int, policy: TailPolicy = "none"
) -> NDArray[np.int32]:
    """The boundaries `host` of a micro-batch of `n_tokens` tokens as a graph of a bucket of `max_seqs` documents reads
    them: int32, shape [max_seqs + 1].

    Raises:
        ValueError: there are more documents than `max_seqs`.
    """
    tailed = with_tail(host, n_tokens, policy)
    if len(tailed) - 1 > max_seqs:
        raise ValueError(f"{len(tailed) - 1} documents do not fit a bucket of {max_seqs}")
    target = np.empty(max_seqs + 1, dtype=np.int32)
    fill_padded(target, tailed)
    return target


def to_device(packed: PackedSequence, boundaries: Boundaries, n_tokens: int, device: torch.device) -> PackedSequence:
    """The metadata for an eager pass, on `device`: boundaries after the tail policy, not padded to a bucket."""
    shape = shape_of(packed, boundaries, n_tokens)
    memory = boundaries.in_memory
    idx = packed.seq_idx
    if idx is not None and isinstance(memory, np.ndarray):
        idx = moved(document_of_tokens(memory, n_tokens), device)
    padded = None
    if boundaries.padded is not None:
        same = packed.cu_seqlens_padded if boundaries.padded is packed.host_padded else None
        padded = moved(boundaries.padded if same is None else same, device)
    return PackedSequence(
        cu_seqlens=moved(packed.cu_seqlens if boundaries.valid is packed.host else boundaries.valid, device),
        max_seqlen=shape.max_seqlen,
        seq_idx=idx,
        cp_size=packed.cp_size,
        host=boundaries.valid if isinstance(boundaries.valid, np.ndarray) else None,
        cu_seqlens_padded=padded,
        host_padded=boundaries.padded if isinstance(boundaries.padded, np.ndarray) else None,
    )


def moved(values: NDArray[np.int32] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on `device`. The host does not wait for the copy."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
