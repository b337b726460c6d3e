"""Counts the micro-batches of each class that every rank runs in each step.

Ranks and steps with equal counts share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable

_LARGEST_KEY = 2**62
"""Upper bound of an integer that holds the counts of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Distinct rows of counts, and the row of every rank and step.

    There are few distinct rows, because the order of a rank's micro-batches does not matter.
    """

    counts: NDArray[np.int32]
    """Micro-batches of each class, shape [rows, classes]."""
    row: NDArray[np.int32]
    """Index into `counts` of the row of each rank in each step, shape [steps, ranks]."""

    @classmethod
    def of(cls, table: MicrobatchTable, classes: NDArray[np.integer], num_classes: int) -> RankCounts:
        """The counts of `table`.

        To find equal rows quickly, the counts of a row are written as the digits of one integer, or of several in turn
        where one would be too large.

        Args:
            table: the micro-batches, without `groups`.
            classes: class of each micro-batch, from 0, shape [micro-batches].
            num_classes: number of classes.
        """
        base = int(table.num_microbatches.max()) + 1
        row: NDArray[np.integer] = np.zeros((table.num_steps, table.data_parallel_size), dtype=np.int32)
        counts: NDArray[np.int32] = np.zeros((1, 0), dtype=np.int32)
        first = 0
        while first < num_classes:
            stop = first + 1
            while stop < num_classes and len(counts) * base ** (stop + 1 - first) <= _LARGEST_KEY:
                stop += 1
            values = np.zeros(num_classes, dtype=np.int64)
            values[first:stop] = base ** np.arange(stop - first)
            keys = table.per_rank_step(values[classes], np.add) + row.astype(np.int64) * base ** (stop - first)
            distinct, index = np.unique(keys, return_inverse=True)
            before, digits = np.divmod(distinct, base ** (stop - first))
            columns = (digits[:, None] // values[first:stop] % base).astype(np.int32)
            counts = np.concatenate((counts[before], columns), axis=1)
            row = index.reshape(row.shape).astype(np.int32)
            first = stop
        return cls(counts=counts, row=row.astype(np.int32, copy=False))

    def any_in(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each rank runs a micro-batch of a marked class in each step, shape [steps, ranks].

        Args:
            marked: whether each class is marked, shape [classes].
        """
        return np.asarray((self.counts[:, marked] > 0).any(axis=1)[self.row])
