"""Rotary embeddings whose tables stay where graphs read them, and that read no boundaries on the host.

Megatron's own operations (`apply_rope_fusion` off) split a micro-batch at its boundaries, which they read on the host.
In captures a function stands for that one which finds the row of every token's position on the GPU. The numbers are the
same bit for bit: a token is rotated by the same row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron.replacing import replaced

_BUFFERS = ("cos_cached", "sin_cached")
_STATE = ("max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached")

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each of shape [positions + 1, 1, 1, rotary dimensions], on the module's device."""


class KeptTables:
    """Stands for the method `get_cached_cos_sin` of one YarnRotaryEmbedding. It owns the tables.

    Tables for up to `length` positions stay at their address until this object is dropped. A longer table is used by
    eager micro-batches only, and is dropped when a still longer one is needed. The module's own buffers stay as they
    were.

    A table has one more row, before the first position. For a token after the last document the fused kernels read that
    row, which would lie outside an ordinary table.
    """

    def __init__(self, module: Any, length: int) -> None:
        """Replace the method of `module`.

        Args:
            module: a YarnRotaryEmbedding.
            length: positions of the tables that graphs read.
        """
        self._module = module
        self._own: Callable[..., Table] = module.get_cached_cos_sin
        self._length = length
        self._kept: dict[tuple[int, torch.dtype, bool], Table] = {}
        self._longer: dict[tuple[int, torch.dtype, bool], Table] = {}
        module.get_cached_cos_sin = self

    def __call__(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype | None = None, packed_seq: bool = False
    ) -> Table:
        """Cosines and sines of the first `seq_len` positions: views of a kept table, contiguous.

        Raises:
            RuntimeError: the table would have to be made inside a capture, in memory that the graph owns; or a graph
                asks for a longer table, which would not stay at its address.
        """
        key = offset, dtype or torch.get_default_dtype(), packed_seq
        longer = seq_len > self._length
        if longer and _capturing():
            raise RuntimeError(
                f"a graph asks for {seq_len} positions of a rotary table, but only {self._length} are kept"
            )
        tables = self._longer if longer else self._kept
        table = tables.get(key)
        if table is None or len(table[0]) - 1 < seq_len:
            table = tables[key] = self._made(max(seq_len, self._length), *key)
        cos, sin = table
        return cos[1 : seq_len + 1], sin[1 : seq_len + 1]

    def _made(self, length: int, offset: int, dtype: torch.dtype, packed_seq: bool) -> Table:
        if _capturing():
            raise RuntimeError(
                f"a rotary table of {length} positions was first asked for inside a capture, which cannot make it"
            )
        module = self._module
        buffers = {name: getattr(module, name) for name in _BUFFERS}
        state = {name: getattr(module, name) for name in _STATE}
        try:
            with torch.inference_mode(False), torch.no_grad():
                own_table = self._own(length, offset=offset, dtype=dtype, packed_seq=packed_seq)
                cos, sin = (torch.cat((table[:1], table)) for table in own_table)
        finally:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer, persistent=False)
            for name, value in state.items():
                setattr(module, name, value)
        return cos, sin

    def detach(self) -> None:
        """Give the module its own method back. Free the graphs that read the tables first."""
        vars(self._module).pop("get_cached_cos_sin", None)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def keep_tables(block: nn.Module, length: int) -> tuple[KeptTables, ...]:
    """Keep the tables of all layers of `block` that make their own, each for `length` positions."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return tuple(KeptTables(part, length) for part in block.modules() if isinstance(part, YarnRotaryEmbedding))


_SPLITS = "_apply_rotary_pos_emb_thd"
"""megatron-core's function that reads boundaries on the host."""


def on_the_device() -> AbstractContextManager[None]:
    """A context in which no rotary embedding of packed tokens reads boundaries on the host."""
    from megatron.core.models.common.embeddings import rope_utils

    return replaced(rope_utils, _SPLITS, rotated)


def reads_max_seqlen() -> bool:
    """Whether a table with more rows than `max_seqlen` is one of the micro-batch's tokens, as from megatron-core 0.20
    on. Before, a table of as many rows as there are tokens is.
    """
    from megatron.core.models.common.embeddings import rope_utils

    return "max_seqlen" in inspect.signature(rope_utils.apply_rotary_pos_emb).parameters


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which reads no boundaries on the host whenever it runs, if none are read now; else as it is."""
    from megatron.core.models.common.embeddings import rope_utils

    if getattr(rope_utils, _SPLITS) is not rotated:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with on_the_device():
            return function(*args, **kwargs)

    return run


def rotated(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    multi_latent_attention: bool | None = None,
    max_seqlen: int | None = None,
    **further: bool,
) -> torch.Tensor:
    """What megatron-core's `_apply_rotary_pos_emb_thd` returns, computed on the device alone.

    Args:
        t: queries or keys of this rank, shape [tokens, heads, channels].
        cu_seqlens: boundaries of the documents over all context-parallel ranks, int32, shape [documents + 1]. Documents
            without tokens may follow the last one.
        freqs: rotary embeddings, shape [positions, 1, 1, channels]. With as many rows as the ranks have tokens they are
            those of the micro-batch's tokens, else those of positions in a document.
        rotary_interleaved: as Megatron's.
        mla_rotary_interleaved: as Megatron's.
        mscale: as Megatron's.
        cp_group: the context-parallel group.
        multi_latent_attention: an older name of `mla_rotary_interleaved`.
        max_seqlen: tokens of the longest document; with it, `freqs` with more rows are those of the tokens.
        further: as Megatron's, from 0.20 on: `inverse`, `mla_output_remove_interleaving`.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if multi_latent_attention is not None:
        mla_rotary_interleaved = multi_latent_attention
    num_tokens, cp_size = int(t.shape[0]), int(cp_group.size())
    places = positions(cu_seqlens, num_tokens, cp_size=cp_size, cp_rank=int(cp_group.rank()))
    rows = int(freqs.shape[0])
    whole = rows == num_tokens * cp_size if max_seqlen is None else rows > max_seqlen
    places_in_table = places.in_microbatch if whole else places.in_document
    result: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, places_in_table.clamp(0, rows - 1)),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
        **further,
    )
    return result.squeeze(1)


class Positions:
    """Where the tokens of one rank are, each an int64 tensor of shape [tokens of this rank], on the device."""

    def __init__(self, in_document: torch.Tensor, begins: torch.Tensor) -> None:
        self.in_document = in_document
        """Place of every token in its document."""
        self.in_microbatch = in_document + begins
        """Place of every token in the micro-batch of all context-parallel ranks."""


def positions(cu_seqlens: torch.Tensor, num_tokens: int, *, cp_size: int, cp_rank: int) -> Positions:
    """Where a rank's tokens are: of every document, it has the parts `cp_rank` from the front and from the back.

    `cu_seqlens` are the boundaries over all ranks, int32, shape [documents + 1]; `num_tokens` are this rank's.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp_size  # on this rank
    ends = lengths.cumsum(0)
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    documents = torch.searchsorted(ends, tokens, right=True).clamp(max=len(lengths) - 1)
    length = lengths[documents]
    place = tokens - (ends[documents] - length)
    if cp_size > 1:
        half = length // 2
        back = length * cp_size - (cp_rank + 1) * half + place - half
        place = torch.where(place < half, cp_rank * half + place, back)
    return Positions(place, cu_seqlens[documents].long())
