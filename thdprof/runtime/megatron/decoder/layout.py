"""How documents lie in a micro-batch that several ranks share, and which of its tokens each of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Documents of one micro-batch in memory: each followed by its padding, at the end a dummy without tokens.

    Give `cu_seqlens` and `cu_seqlens_padded` to `packed_seq_params` with `pad_between_seqs=True`.
    """

    cp_size: int
    """Ranks that share the micro-batch."""
    cu_seqlens: NDArray[np.int32]
    """Shape [documents + 1]: tokens of the documents, counted on; the dummy has none."""
    cu_seqlens_padded: NDArray[np.int32]
    """Shape [documents + 1]: where the documents begin in memory."""

    @property
    def n_tokens(self) -> int:
        """Tokens in memory on all ranks together."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def n_seqs(self) -> int:
        """Documents, the dummy included."""
        return len(self.cu_seqlens) - 1

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document in memory, the dummy included."""
        return int(np.diff(self.cu_seqlens_padded).max(initial=0))

    def tokens_of(self, rank: int) -> NDArray[np.int64]:
        """Which tokens rank `rank` of the group holds, shape [n_tokens / cp_size]; -1 is padding.

        They count through the documents' own tokens. Every document is cut into 2 * cp_size pieces, of which a rank
        has one from the front and its opposite from the back, so that all have as much attention to work out.
        """
        memory = np.full(self.n_tokens, -1, dtype=np.int64)
        for begin, first, last in zip(
            self.cu_seqlens_padded[:-1], self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True
        ):
            memory[begin : begin + last - first] = np.arange(first, last)
        return memory[places_of(self.cu_seqlens_padded, cp_size=self.cp_size, rank=rank)]


def places_of(cu_seqlens_padded: NDArray[np.integer], *, cp_size: int, rank: int) -> NDArray[np.int64]:
    """Places in memory of the tokens that `rank` of `cp_size` ranks holds, in its order, int64.

    Args:
        cu_seqlens_padded: where documents begin in memory, shape [documents + 1].
        cp_size: ranks that share the micro-batch.
        rank: which of them.

    Raises:
        ValueError: a document's length is not a multiple of 2 * cp_size, where several ranks share it.
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

    What is left of the room becomes a dummy document. Documents that need more than there is room for stay as they
    are: such a micro-batch is larger than any graph, and runs eagerly.

    Args:
        document_tokens: tokens of every document, in order.
        cp_size: ranks that share the micro-batch.
        max_seqlen_per_rank: of the plan, training.max_seqlen_per_dp_cp_rank.
        multiple: what documents are padded to a multiple of; 2 * cp_size, or 1 on one rank, where it is not given.

    Raises:
        ValueError: the multiple or the room cannot be shared out among the ranks.
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
