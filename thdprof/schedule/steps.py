"""Packers that pack the documents of each step for themselves, and deal the packs to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.dataset import PackedRows
from thdprof.schedule import samplers
from thdprof.schedule.packing import Packing, cut
from thdprof.schedule.schedule import Schedule, fill_rows
from thdprof.training import TrainingSettings

Packs = list[list[int]]
"""Documents of every pack, in tokens."""
Deal = Callable[[list[int], TrainingSettings], list[Packs]]
"""(tokens of the documents of a step, the run) -> the packs of every rank, as many on each; none if the documents are
too few. An empty pack is padding alone."""


def schedule_steps(packing: Packing, document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of rows that were packed step by step, in order of step, data-parallel rank and micro-batch."""
    exact = settings.loader == "single"
    table = fill_rows(packing.rows, settings).table(settings, packing.num_microbatches, exact=exact)
    one_epoch = len(table) * len(document_tokens) // max(1, len(packing.rows.document_tokens))
    return Schedule(table=table, distinct=one_epoch, **packing.summarize())


def pack_steps(
    document_tokens: NDArray[np.int32], settings: TrainingSettings, *, deal: Deal, is_drawn: bool = False
) -> Packing:
    """Pack every `global_batch_size` documents, in their order, into micro-batches of at most `seq_length` tokens.

    Args:
        document_tokens: tokens of every document in training's order, int32, shape [documents]. They repeat over
            epochs; long ones are cut, and all are padded to `pad_seq_to_mult`.
        is_drawn: whether `seed` draws the order of the documents of a step.

    Raises:
        DataError: the documents do not fill one step, or a step has too few for its ranks.
    """
    notes: list[str] = []
    lengths = cut(document_tokens.astype(np.int64), settings.seq_length, settings.pad_seq_to_mult, notes)
    by_step = samplers.gather_documents(lengths, replace(settings, data_parallel_size=1, micro_batch_size=1))
    if is_drawn:
        by_step = np.random.default_rng(settings.seed).permuted(by_step, axis=1)
    rows: Packs = []
    counts = np.empty(len(by_step), dtype=np.int32)
    for step, documents in enumerate(by_step):
        ranks = deal(documents.tolist(), settings)
        if not ranks:
            raise DataError(
                f"step {step}: its {len(documents)} documents do not fill the micro-batches of "
                f"{settings.data_parallel_size} ranks, and training stops on it; give a larger --global-batch-size"
            )
        counts[step] = len(ranks[0])
        rows += chain.from_iterable(ranks)
    if empty := sum(not row for row in rows):
        rows = [row or [settings.seq_length] for row in rows]
        notes.append(f"{empty} micro-batches are empty bins, which are one document of {settings.seq_length} tokens")
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
    used = float(by_step.sum()) / (len(rows) * settings.seq_length)
    packed = PackedRows.from_sizes(tokens, sizes)
    return Packing(rows=packed, efficiency=used, notes=tuple(notes), num_microbatches=counts)


def fill_next(lengths: list[int], capacity: int, cap: int | None = None) -> Packs:
    """Each document in the last pack or, without room there, in a new one."""
    packs: Packs = []
    room = 0
    for length in lengths:
        if not packs or length > room or len(packs[-1]) == cap:
            packs.append([])
            room = capacity
        packs[-1].append(length)
        room -= length
    return packs
