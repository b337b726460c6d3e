"""Shifting the tokens of packed documents by one, as multi-token prediction does, without waiting for the GPU.

megatron-core 0.19 shifts document by document, and reads the boundaries of each back from the GPU; under context
parallelism it exchanges the tokens of each between ranks. Here all documents are shifted together, to the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from thdprof.runtime.megatron.replacing import Shared, replaced

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


_NAME = "_roll_tensor_packed_seq"

Shifted = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor whose documents are shifted, and the sum of its elements where it is needed."""


def shifting_together() -> AbstractContextManager[None]:
    """A context in which megatron-core shifts all documents of a micro-batch at once. Several may overlap."""
    return _TOGETHER.owned()


@contextmanager
def _replacing_shift() -> Iterator[None]:
    from megatron.core.transformer import multi_token_prediction

    with replaced(multi_token_prediction, _NAME, _shift_as(vars(multi_token_prediction)[_NAME])):
        yield


_TOGETHER = Shared(_replacing_shift)


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
        found = shifted(tensor, ends) if size == 1 else shifted_over_ranks(tensor, ends, cp_group)
        return found, found.sum() if further.get("return_sum", True) else None

    return shift


def shifted(tensor: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Every token's successor in its document, and 0 for each document's last token; tokens outside of documents stay.

    Args:
        tensor: its last dimension runs over tokens.
        bounds: the documents' boundaries, int64, shape [documents + 1], on the tensor's device, none behind the last
            token; they may repeat.
    """
    tokens = tensor.shape[-1]
    # what begins at a boundary is preceded by a document's last token
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=tensor.device).index_fill_(0, bounds[1:], True)
    return _inside(bounds, tensor.roll(-1, -1).masked_fill(begins[1:], 0), tensor)


def shifted_over_ranks(tensor: torch.Tensor, bounds: torch.Tensor, group: Any) -> torch.Tensor:
    """`shifted` of documents that the ranks of a context-parallel group share, each with a front and a mirrored tail
    chunk of every document; tensor and bounds are this rank's.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_process_group_ranks(group)
    begin, end = bounds[:-1], bounds[1:]
    middle = (begin + end + 1) // 2
    padded = torch.nn.functional.pad(tensor, (0, 1))  # documents without tokens may begin behind the last one
    front, tail = padded[..., begin].contiguous(), padded[..., middle].contiguous()
    behind_front, behind_tail = tail.clone(), torch.zeros_like(tail)
    swaps = []
    if rank > 0:
        swaps += _swap(front, behind_tail, ranks[rank - 1], group)
    if rank < len(ranks) - 1:
        swaps += _swap(tail, behind_front, ranks[rank + 1], group)
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


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int, group: Any) -> list[distributed.P2POp]:
    return [
        distributed.P2POp(distributed.isend, sent, peer, group),
        distributed.P2POp(distributed.irecv, received, peer, group),
    ]
