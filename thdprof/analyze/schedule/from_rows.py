"""The schedule of rows that were packed before training, as Megatron-Bridge, TRL and plain collators read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import samplers
from thdprof.analyze.schedule.collate import table_of, with_tails
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.schedule import Schedule, num_steps
from thdprof.analyze.schedule.trainer import trainer_table
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError
from thdprof.training import TrainingSettings

_BRIDGE_ROUNDING = 16
"""Megatron-Bridge rounds the longest row up to a multiple of so many tokens (GPTSFTDataset.pad_seq_length_to_mult)."""


def schedule_rows(rows: PackedRows, settings: TrainingSettings) -> Schedule:
    """The schedule of rows that were packed before training."""
    totals = rows.num_tokens()
    if int(totals.max()) > settings.seq_length:
        row = int((totals > settings.seq_length).argmax())
        raise DataError(
            f"row {row}: {totals[row]} tokens are more than --seq-length {settings.seq_length}"
            f"{', and Megatron-Bridge stops on it' if rows.rule == 'bridge' else ''}; give --seq-length {totals.max()}"
        )
    if settings.loader == "trainer":
        table = trainer_table(rows, settings)
        distinct = max(1, rows.num_rows() // settings.micro_batch_size)
        return Schedule(table=table, independent=min(len(table), distinct))
    mapping = _sample_mapping(rows.num_rows(), settings)
    num_rows = rows.num_rows() if mapping is None else len(mapping)
    steps, warnings = num_steps(num_rows, settings)
    read = {
        "single": samplers.sequential_rows,
        "cyclic": samplers.cyclic_rows,
        "batch": samplers.batch_rows,
        None: samplers.drawn_rows,
    }[settings.loader](num_rows, steps, settings)
    if mapping is not None:
        read = mapping[read]
    if rows.rule == "bridge":
        table = _bridge_table(rows, read, settings)
        together = settings.num_microbatches if settings.loader == "batch" else 1
        independent = max(1, min(len(table), rows.num_rows()) // together)
        return Schedule(table=table, warnings=warnings, independent=independent)
    documents, longest, tokens_by_row, squared_by_row = with_tails(rows, settings)
    shape = (*read.shape[:2], settings.num_microbatches, settings.micro_batch_size)
    n_seqs = documents[read].reshape(shape).sum(axis=3, dtype=np.int64)
    max_seqlen = longest[read].reshape(shape).max(axis=3)
    tokens = tokens_by_row[read].reshape(shape).sum(axis=3)
    squared = squared_by_row[read].reshape(shape).sum(axis=3)
    if rows.rule == "trl":
        padding = -tokens % settings.pad_seq_to_mult  # every padding token has position 0 and so begins a document
        n_seqs, tokens, squared = n_seqs + padding, tokens + padding, squared + padding
    table = table_of(n_seqs, max_seqlen, tokens, squared, settings)
    distinct = max(1, rows.num_rows() // settings.micro_batch_size)
    return Schedule(table=table, warnings=warnings, independent=min(len(table), distinct))


def _sample_mapping(num_rows: int, settings: TrainingSettings) -> NDArray[np.int64] | None:
    """The row that each sample reads under Megatron-Bridge's max_train_samples, int64, shape [samples]; else None."""
    wanted = settings.max_num_samples
    if wanted is None:
        return None
    random = np.random.RandomState(settings.seed)
    epochs = np.tile(np.arange(num_rows, dtype=np.int64), (-(-wanted // num_rows), 1))
    for epoch in epochs:
        random.shuffle(epoch)
    return epochs.reshape(-1)[:wanted]


def _bridge_table(rows: PackedRows, read: NDArray[np.int64], settings: TrainingSettings) -> MicrobatchTable:
    """Collate the rows with indices `read` [steps, ranks, rows] as Megatron-Bridge's collate_fn does.

    Every row makes one micro-batch. The sampler `batch` collates all rows that a rank reads in a step; otherwise each
    row is collated alone. Rows that are collated together get equal lengths, and `cu_seqlens` as long as those of the
    row with the most documents.
    """
    documents, longest = rows.num_documents()[read], rows.longest()[read]
    totals = rows.num_tokens()[read]
    together = settings.loader == "batch"
    if settings.pad_to_max_length:
        length = np.full_like(totals, settings.seq_length)
    else:
        collated = totals.max(axis=2, keepdims=True) if together else totals
        rounded = -(-collated // _BRIDGE_ROUNDING) * _BRIDGE_ROUNDING
        length = np.broadcast_to(np.minimum(rounded, settings.seq_length), totals.shape)
    tail = length - totals
    n_seqs = documents + (tail > 0)
    if together:
        n_seqs = np.broadcast_to(n_seqs.max(axis=2, keepdims=True), n_seqs.shape)
    squared = rows.squared()[read] + np.square(tail, dtype=np.float64)
    return table_of(n_seqs, np.maximum(longest, tail), length, squared, settings)
