"""The document boundaries of a micro-batch, kept on the host from the data collator to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BATCH_KEY = "thdprof_boundaries"
"""Key of a batch, and keyword argument of the model, under which the boundaries travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBoundaries:
    """Where the documents of one micro-batch begin and end, on the host. Trainers hand it on as they find it."""

    cu_seqlens: NDArray[np.int32]
    """int32, shape [documents + 1]: the boundaries, from 0 to the number of tokens."""


class WithBoundaries:
    """A data collator around another one: its batches also hold their boundaries, on the host."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        """A collator that calls `collate`, in whatever process the data loader runs it."""
        self.collate = collate

    def __call__(self, examples: Sequence[Any]) -> Any:
        """The batch of `examples`; one without boundaries stays as it is."""
        batch = self.collate(examples)
        found = host_boundaries(batch)
        if found is not None:
            batch[BATCH_KEY] = found
        return batch


def host_boundaries(batch: Any) -> HostBoundaries | None:
    """The boundaries of a batch that a collator has made on the host; None where it does not tell them.

    They are read from `cu_seq_lens_q`, else from `position_ids` that begin anew with every document. A batch of one row
    without either is one document: a mask of padding at its end changes no other token. Padding before its tokens does,
    and such a batch tells no boundaries. Neither does one with `token_type_ids`, by which models attend to later tokens
    of an image or a prefix.

    Args:
        batch: a mapping with tensors on the host. Rows are flattened into one, except where there is one alone.
    """
    if not isinstance(batch, Mapping) or batch.get("token_type_ids") is not None:
        return None
    cu_seqlens, positions, tokens = (batch.get(name) for name in ("cu_seq_lens_q", "position_ids", "input_ids"))
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type == "cpu":
        return HostBoundaries(cu_seqlens=cu_seqlens.reshape(-1).numpy().astype(np.int32))
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.shape[0] != 1:
        return None
    mask: Any = batch.get("attention_mask")  # 1 at tokens and 0 at padding, which may hide something before a token
    is_read = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.device.type == "cpu"
    if is_read and (mask[:, 1:] != 0).logical_and(mask[:, :-1] == 0).any():
        return None
    if isinstance(positions, torch.Tensor) and positions.device.type == "cpu" and positions.shape == tokens.shape:
        starts = np.flatnonzero(positions[0].numpy() == 0)
        starts = starts if starts.size and starts[0] == 0 else np.append(0, starts)
        return HostBoundaries(cu_seqlens=np.append(starts, tokens.shape[1]).astype(np.int32))
    return HostBoundaries(cu_seqlens=np.array([0, tokens.shape[1]], dtype=np.int32))


def follow_collator(dataloader: Any) -> Callable[[], None]:
    """Let the batches of `dataloader` hold their boundaries; returns a function that ends it.

    Args:
        dataloader: a torch DataLoader, or accelerate's around one, of which no iterator was made yet.
    """
    loader = getattr(dataloader, "base_dataloader", dataloader)
    end = partial(setattr, loader, "collate_fn", loader.collate_fn)
    loader.collate_fn = WithBoundaries(loader.collate_fn)
    return end
