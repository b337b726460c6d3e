"""How many micro-batches of each class every rank runs in a step; ranks and steps with equal counts share a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable

_LARGEST_KEY = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Distinct rows of counts, and the row of every rank and step. Few rows are distinct: a row has no order."""

    counts: NDArray[np.int32]
    """Micro-batches of each class, shape [rows, classes]."""
    row: NDArray[np.int32]
    """Index of the counts of each rank in each step, shape [steps, ranks]."""

    @classmethod
    def of(cls, table: MicrobatchTable, classes: NDArray[np.integer], num_classes: int) -> RankCounts:
        """The counts of `table`, whose micro-batches are in `classes`, shape [micro-batches]; no `table.groups`.

        A row of counts is the digits of one integer; where that would be too large, of several, one after the other.
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
            found, index = np.unique(keys, return_inverse=True)
            before, digits = np.divmod(found, base ** (stop - first))
            columns = (digits[:, None] // values[first:stop] % base).astype(np.int32)
            counts = np.concatenate((counts[before], columns), axis=1)
            row = index.reshape(row.shape).astype(np.int32)
            first = stop
        return cls(counts=counts, row=row.astype(np.int32, copy=False))

    def any_in(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each rank runs a micro-batch of a class that is `marked`, shape [classes]: [steps, ranks]."""
        return np.asarray((self.counts[:, marked] > 0).any(axis=1)[self.row])
