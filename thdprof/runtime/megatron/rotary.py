"""Megatron's operations on packed tokens without a look at boundaries on the host: rotary embeddings, token shifts.

Megatron's own rotary operations (`apply_rope_fusion` off) split a micro-batch at its boundaries, which they read on the
host. In captures a function stands for that one which finds the row of every token's position on the GPU. The numbers
are the same bit for bit: a token is rotated by the same row. Tables stay where graphs read them.

Multi-token prediction shifts the tokens of packed documents by one. megatron-core 0.19 does it document by document,
and reads the boundaries of each back from the GPU; under context parallelism it exchanges the tokens of each between
ranks. Here all documents are shifted together, to the same values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import distributed, nn

from thdprof.runtime.replacing import replaced, shared

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
        """Replace the method of `module`; graphs read tables of `length` positions."""
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
    return replaced(rope_utils, _SPLITS, rotate_packed)


def reads_max_seqlen() -> bool:
    """Whether a table with more rows than `max_seqlen` is one of tokens: from megatron-core 0.20 on."""
    return "max_seqlen" in inspect.signature(rope_utils.apply_rotary_pos_emb).parameters


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which reads no boundaries on the host whenever it runs, if none are read now; else as it is."""
    if getattr(rope_utils, _SPLITS) is not rotate_packed:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with on_the_device():
            return function(*args, **kwargs)

    return run


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *,
    cp_group: Any,
    max_seqlen: int | None = None,
    **further: Any,
) -> torch.Tensor:
    """What megatron-core's `_apply_rotary_pos_emb_thd` returns, computed on the device alone.

    Args:
        t: queries or keys of this rank, shape [tokens, heads, channels].
        cu_seqlens: boundaries of the documents over all context-parallel ranks, int32, shape [documents + 1]. Documents
            without tokens may follow the last one.
        freqs: rotary embeddings, shape [positions, 1, 1, channels]. With as many rows as the ranks have tokens they are
            those of the micro-batch's tokens, else those of positions in a document.
        cp_group: the context-parallel group.
        max_seqlen: tokens of the longest document; with it, `freqs` with more rows are those of the tokens.
        further: as Megatron's, which then rotates row by row.
    """
    num_tokens, cp_size = int(t.shape[0]), int(cp_group.size())
    places, begins = _find_positions(cu_seqlens, num_tokens, cp_size=cp_size, cp_rank=int(cp_group.rank()))
    rows = int(freqs.shape[0])
    is_of_tokens = rows == num_tokens * cp_size if max_seqlen is None else rows > max_seqlen
    places_in_table = places + begins if is_of_tokens else places
    result: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, places_in_table.clamp(0, rows - 1)),
        **further,
    )
    return result.squeeze(1)


def _find_positions(
    cu_seqlens: torch.Tensor, num_tokens: int, *, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of every token of this rank in its document, and where that begins; int64, shape [num_tokens], on the
    device. Of every document, a rank has the parts `cp_rank` from the front and from the back.
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
    return place, cu_seqlens[documents].long()


# --- the shift of multi-token prediction ------------------------------------------------------------------------------

_SHIFT = "_roll_tensor_packed_seq"

Shifted = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor whose documents are shifted, and the sum of its elements where it is needed."""


@shared
def shifting_together() -> AbstractContextManager[None]:
    """A context in which megatron-core shifts all documents of a micro-batch at once. Several may overlap."""
    from megatron.core.transformer import multi_token_prediction

    return replaced(multi_token_prediction, _SHIFT, _shift_as(vars(multi_token_prediction)[_SHIFT]))


def _shift_as(own: Callable[..., Shifted]) -> Callable[..., Shifted]:
    """A function that returns what megatron-core's own does."""

    def shift(
        tensor: torch.Tensor,
        shifts: int,
        dims: int,
        packed_seq_params: PackedSeqParams,
        cp_group: Any = None,
        **further: bool,  # return_sum, from megatron-core 0.20 on
    ) -> Shifted:
        bounds = packed_seq_params.cu_seqlens_q
        if shifts != -1 or dims not in (-1, tensor.dim() - 1) or bounds is None:
            return own(tensor, shifts, dims, packed_seq_params, cp_group, **further)
        size = 1 if cp_group is None else cp_group.size()
        ends = (bounds.to(tensor.device, torch.long) // size).clamp(max=tensor.shape[-1])
        found = shift_documents(tensor, ends) if size == 1 else shift_over_ranks(tensor, ends, cp_group)
        return found, found.sum() if further.get("return_sum", True) else None

    return shift


def shift_documents(tensor: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Every token's successor in its document, and 0 for each document's last token; tokens outside of documents stay.

    The last dimension of `tensor` runs over tokens. `bounds` are the documents' boundaries on its device, int64, shape
    [documents + 1], none behind the last token; they may repeat.
    """
    tokens = tensor.shape[-1]
    # what begins at a boundary is preceded by a document's last token
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=tensor.device).index_fill_(0, bounds[1:], True)
    return _inside(bounds, tensor.roll(-1, -1).masked_fill(begins[1:], 0), tensor)


def shift_over_ranks(tensor: torch.Tensor, bounds: torch.Tensor, group: Any) -> torch.Tensor:
    """As `shift_documents`, where the ranks of a context-parallel group each have a front and a mirrored tail chunk of
    every document; tensor and bounds are this rank's.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_process_group_ranks(group)
    begin, end = bounds[:-1], bounds[1:]
    middle = (begin + end + 1) // 2
    padded = torch.nn.functional.pad(tensor, (0, 1))  # documents without tokens may begin behind the last one
    front, tail = padded[..., begin].contiguous(), padded[..., middle].contiguous()
    behind_front, behind_tail = tail.clone(), torch.zeros_like(tail)
    swaps = []
    for peer, sent, received in ((rank - 1, front, behind_tail), (rank + 1, tail, behind_front)):
        if 0 <= peer < len(ranks):
            swaps += [distributed.P2POp(distributed.isend, sent, ranks[peer], group)]
            swaps += [distributed.P2POp(distributed.irecv, received, ranks[peer], group)]
    for swap in distributed.batch_isend_irecv(swaps):
        swap.wait()
    found = padded.roll(-1, -1)
    nowhere = tensor.shape[-1]
    empty = begin == end
    found[..., torch.where(empty, nowhere, middle - 1)] = behind_front
    found[..., torch.where(empty, nowhere, end - 1)] = behind_tail
    return _inside(bounds, found[..., :-1], tensor)


def _inside(bounds: torch.Tensor, found: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    place = torch.arange(tensor.shape[-1], device=tensor.device)
    return torch.where((place >= bounds[0]) & (place < bounds[-1]), found, tensor)
