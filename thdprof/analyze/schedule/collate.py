"""Rows to micro-batches: tails, the dealing of rows to ranks, and the merging of rows into a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import UsageError
from thdprof.training import TrainingSettings


def table_of(
    n_seqs: NDArray[np.integer],
    max_seqlen: NDArray[np.integer],
    n_tokens: NDArray[np.integer],
    squared: NDArray[np.float64],
    settings: TrainingSettings,
) -> MicrobatchTable:
    """Make a table of arrays of shape [steps, ranks, micro-batches]."""
    steps = n_seqs.shape[0]
    if int(n_seqs.max()) > np.iinfo(np.int32).max:
        raise UsageError("a micro-batch has more than 2**31 - 1 documents; give a smaller --micro-batch-size")
    constant = n_tokens.strides == (0, 0, 0)
    flat_tokens = (
        np.broadcast_to(np.int64(n_tokens[0, 0, 0]), n_seqs.size) if constant else n_tokens.reshape(-1).astype(np.int64)
    )
    return MicrobatchTable(
        n_seqs=np.ascontiguousarray(n_seqs, dtype=np.int32).reshape(-1),
        max_seqlen=np.ascontiguousarray(max_seqlen, dtype=np.int32).reshape(-1),
        n_tokens=flat_tokens,
        squared=np.ascontiguousarray(squared).reshape(-1),
        data_parallel_size=settings.data_parallel_size,
        num_microbatches=np.broadcast_to(np.int32(settings.num_microbatches), steps),
        exact=settings.loader is not None,
    )


def merged(
    n_seqs: NDArray[np.int32],
    max_seqlen: NDArray[np.int32],
    squared: NDArray[np.float64],
    tokens: int,
    settings: TrainingSettings,
) -> MicrobatchTable:
    """Merge every `micro_batch_size` rows into a micro-batch, as Megatron's flatten_batch_for_packed_sequences does.

    The arrays have shape [steps, ranks, rows]; a micro-batch has `tokens` tokens.
    """
    if settings.micro_batch_size > 1:
        shape = (*n_seqs.shape[:2], settings.num_microbatches, settings.micro_batch_size)
        n_seqs = n_seqs.reshape(shape).sum(axis=3, dtype=np.int32)
        max_seqlen = max_seqlen.reshape(shape).max(axis=3)
        squared = squared.reshape(shape).sum(axis=3)
    return table_of(n_seqs, max_seqlen, np.broadcast_to(np.int64(tokens), n_seqs.shape), squared, settings)


def in_file_order[T: np.generic](values: NDArray[T], steps: int, settings: TrainingSettings) -> NDArray[T]:
    """Deal `values` [rows] as the sampler `single` deals rows: shape [steps, ranks, rows of one rank and step]."""
    shape = (steps, settings.num_microbatches, settings.data_parallel_size, settings.micro_batch_size)
    dealt = values[: steps * settings.global_batch_size].reshape(shape).transpose(0, 2, 1, 3)
    return dealt.reshape(steps, settings.data_parallel_size, -1)


def with_tails(
    rows: PackedRows, settings: TrainingSettings
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
    """Documents, tokens of the longest document, tokens, and sum of squared lengths of every row; each [rows].

    They are as after the tail policy.
    """
    documents, longest, totals, squared = rows.num_documents(), rows.longest(), rows.num_tokens(), rows.squared()
    if settings.tail_policy == "none":
        return documents, longest, totals, squared
    tail = settings.seq_length - totals
    if settings.tail_policy == "append_dummy_seq":
        documents = documents + (tail > 0).astype(np.int32)
        longest = np.maximum(longest, tail).astype(np.int32)
        return documents, longest, totals + tail, squared + np.square(tail, dtype=np.float64)
    last = rows.last().astype(np.int64)
    longest = np.maximum(longest, last + tail).astype(np.int32)
    return documents, longest, totals + tail, squared + np.multiply(tail, 2 * last + tail, dtype=np.float64)
