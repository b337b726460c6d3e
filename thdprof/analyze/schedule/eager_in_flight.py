"""Counts the eager micro-batches that are in flight at once, between forward and backward, in the worst step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.pipeline_slots import passes

_AT_ONCE = 1 << 24
"""Most elements of an array that is computed at once."""


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
        rows = np.unique(rows[rows.any(axis=1)], axis=0) if rows.shape[1] <= 64 else rows[rows.any(axis=1)]
        for rank in range(pipeline_size):
            order, change = _events(
                rank=rank,
                pipeline_size=pipeline_size,
                num_chunks=num_chunks,
                num_microbatches=rows.shape[1],
                group=group or pipeline_size,
            )
            at_once = max(1, _AT_ONCE // len(order))
            for first in range(0, len(rows), at_once):
                changes = rows[first : first + at_once, order] * change
                worst = np.cumsum(changes, axis=1, dtype=np.int32).max(initial=0)
                most[rank] = max(most[rank], int(worst))
    return most


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
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """The micro-batch of every pass of a pipeline rank in one step, and 1 for its forward, -1 for its backward."""
    begun: dict[tuple[str, int], int] = {}
    order, change = [], []
    for kind, chunk in passes(
        rank=rank,
        pipeline_size=pipeline_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group=group,
    ):
        place = begun.get((kind, chunk), 0)  # each chunk takes the micro-batches in their order
        begun[kind, chunk] = place + 1
        order.append(place)
        change.append(1 if kind == "forward" else -1)
    return np.array(order), np.array(change, dtype=np.int8)
