"""Counts the eager micro-batches that are in flight at once, between forward and backward, in the worst step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.training.pipeline_slots import passes

_AT_ONCE = 1 << 14
"""Rows that are simulated at once: what is counted of them stays in the processor's cache."""


def eager_in_flight(
    table: MicrobatchTable, eager: NDArray[np.bool_], *, pipeline_size: int, num_chunks: int, group: int | None = None
) -> list[int]:
    """The most eager micro-batches in flight at once on each pipeline rank; one in each of two chunks counts as two.

    Args:
        table: the micro-batches; without dynamic context parallelism.
        eager: whether each runs eagerly, shape [micro-batches].
        pipeline_size: pipeline ranks.
        num_chunks: model chunks on a pipeline rank; over 1 the schedule is the interleaved one.
        group: contiguous micro-batches of one chunk in the interleaved schedule; None: `pipeline_size`.
    """
    most = [0] * pipeline_size
    if not eager.any():
        return most
    for rows in _by_count(table, eager):
        rows = _distinct(rows[rows.any(axis=1)])
        parts = (rows[first : first + _AT_ONCE] for first in range(0, len(rows), _AT_ONCE))
        columns = [np.ascontiguousarray(part.T).view(np.int8) for part in parts]
        for rank in range(pipeline_size):
            events = _events(
                rank=rank,
                pipeline_size=pipeline_size,
                num_chunks=num_chunks,
                num_microbatches=rows.shape[1],
                group=group or pipeline_size,
            )
            for marks in columns:
                most[rank] = max(most[rank], _worst(marks, events))
    return most


def _worst(marks: NDArray[np.int8], events: list[tuple[int, int]]) -> int:
    """The most marked micro-batches that are in flight at once in any row.

    Args:
        marks: 1 for each micro-batch that counts, shape [micro-batches, rows].
        events: the micro-batch of every pass in order, and 1 for its forward, -1 for its backward.
    """
    held = np.zeros(marks.shape[1], dtype=np.int32)
    most = held.copy()
    for place, change in events:
        if change > 0:
            held += marks[place]
            np.maximum(most, held, out=most)
        else:
            held -= marks[place]
    return int(most.max(initial=0))


def _distinct(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The distinct rows, where a row fits into an integer; else all rows."""
    if rows.shape[1] > 63:
        return rows
    codes = rows @ (1 << np.arange(rows.shape[1], dtype=np.int64))
    return rows[np.unique(codes, return_index=True)[1]]


def _by_count(table: MicrobatchTable, eager: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """`eager` as one array [(step, rank) pairs, micro-batches] for each number of micro-batches that steps have."""
    counts = np.asarray(table.num_microbatches, dtype=np.int64)
    if table.uniform:
        return [eager.reshape(-1, int(counts[0]))]
    begins = np.concatenate(([0], np.cumsum(counts[:-1] * table.data_parallel_size)))
    found = []
    for count in np.unique(counts):
        steps = begins[counts == count]
        places = steps[:, None] + np.arange(count * table.data_parallel_size)
        found.append(eager[places].reshape(-1, int(count)))
    return found


def _events(
    *, rank: int, pipeline_size: int, num_chunks: int, num_microbatches: int, group: int
) -> list[tuple[int, int]]:
    """The micro-batch of every pass of a pipeline rank in one step, and 1 for its forward, -1 for its backward."""
    begun: Counter[tuple[str, int]] = Counter()
    events = []
    for kind, chunk in passes(
        rank=rank,
        pipeline_size=pipeline_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group=group,
    ):
        events.append((begun[kind, chunk], 1 if kind == "forward" else -1))
        begun[kind, chunk] += 1  # each chunk takes the micro-batches in their order
    return events
