"""Random micro-batches of packed documents, as Megatron-LM's data loader gives them to a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What micro-batches have in common."""

    rows: int
    """Rows of a micro-batch, whose documents become one packed sequence."""
    tokens: int
    """Tokens of a row, over all context-parallel ranks."""
    multiple: int
    """Tokens of every document are a multiple of this, as context parallelism needs it."""
    vocabulary: int
    """Rows of the embedding."""
    padded: bool
    """Whether a micro-batch also says where its documents begin in memory, as context parallelism needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, and the sum that attention's work grows with."""

    fields: dict[str, torch.Tensor]
    """Tensors by the names that Megatron-LM's loaders give them, in pinned memory where there is a GPU."""
    squared_tokens: float
    """Sum of the documents' squared lengths."""


def lengths(rng: np.random.Generator, *, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents that fill `tokens`, drawn from a lognormal distribution: int64, shape [documents].

    They are multiples of `multiple`. Where that many documents do not fit, there are fewer.
    """
    units = tokens // multiple
    documents = max(1, min(documents, units))
    share = rng.lognormal(sigma=1.0, size=documents)
    counts = 1 + np.floor(share / share.sum() * (units - documents)).astype(np.int64)
    counts[int(counts.argmax())] += units - int(counts.sum())
    return np.asarray(counts * multiple, dtype=np.int64)


def equal_lengths(*, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents that are as equal as multiples of `multiple` can be: int64, shape [documents]."""
    units = tokens // multiple
    documents = max(1, min(documents, units))
    ends = np.round(np.linspace(0, units, documents + 1)).astype(np.int64)
    return np.asarray((ends[1:] - ends[:-1]) * multiple, dtype=np.int64)


def one_long(*, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents of which one is as long as the others allow: int64, shape [documents]."""
    units = tokens // multiple
    documents = max(1, min(documents, units))
    counts = np.ones(documents, dtype=np.int64)
    counts[0] += units - documents
    return counts * multiple


def micro_batch(rng: np.random.Generator, shape: Shape, rows: list[NDArray[np.int64]]) -> MicroBatch:
    """A micro-batch of random tokens whose rows hold documents of the given lengths."""
    boundaries = np.full((shape.rows, shape.tokens + 1), shape.tokens, dtype=np.int32)
    positions = np.empty((shape.rows, shape.tokens), dtype=np.int64)
    for row, sizes in enumerate(rows):
        ends = np.cumsum(sizes)
        boundaries[row, : len(sizes) + 1] = [0, *ends]
        positions[row] = np.arange(shape.tokens) - np.repeat(ends - sizes, sizes)
    tokens = rng.integers(0, shape.vocabulary, (shape.rows, shape.tokens + 1), dtype=np.int64)
    arrays: dict[str, Any] = {
        "tokens": tokens[:, :-1].copy(),
        "labels": tokens[:, 1:].copy(),
        "loss_mask": np.ones((shape.rows, shape.tokens), dtype=np.float32),
        "position_ids": positions,
        "cu_seqlens": boundaries,
        "max_seqlen": np.array([sizes.max() for sizes in rows], dtype=np.int32),
    }
    if shape.padded:
        arrays["cu_seqlens_padded"] = boundaries.copy()
    fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if torch.cuda.is_available():
        fields = {name: tensor.pin_memory() for name, tensor in fields.items()}
    squared = float(sum((sizes.astype(np.float64) ** 2).sum() for sizes in rows))
    return MicroBatch(fields=fields, squared_tokens=squared)


def of_documents(rng: np.random.Generator, shape: Shape, documents: int) -> MicroBatch:
    """A micro-batch with about `documents` documents over all its rows, at least one in each."""
    shares = np.diff(np.round(np.linspace(0, max(documents, shape.rows), shape.rows + 1)).astype(int))
    rows = [lengths(rng, documents=int(n), tokens=shape.tokens, multiple=shape.multiple) for n in shares]
    return micro_batch(rng, shape, rows)
