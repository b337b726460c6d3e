"""The layout of documents in a micro-batch that several ranks share, and the tokens that each of the ranks holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

    Args:
        cu_seqlens_padded: positions in memory at which documents begin, shape [documents + 1].
        cp_size: number of ranks that share the micro-batch.
        rank: which of them.

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
