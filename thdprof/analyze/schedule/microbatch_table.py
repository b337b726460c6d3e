"""The micro-batch table: what every forward pass of every rank and step will see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ROWS_A_BATCH = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Who runs each micro-batch under dynamic context parallelism; every array has shape [micro-batches]."""

    cp_size: NDArray[np.int32]
    """Ranks that run it together."""
    first_rank: NDArray[np.int64]
    """The lowest of them, of all data-parallel x context-parallel ranks; the others are its neighbours above."""
    microbatch: NDArray[np.int64]
    """How many micro-batches that rank ran in the step before this one."""
    step: NDArray[np.int64]
    round: NDArray[np.int64]
    """Rounds are counted over all steps; in each every rank has one group, and at its end all wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTable:
    """Micro-batches sorted by step, data-parallel rank and position in the step.

    With `groups` the ranks are all data-parallel x context-parallel ones, and a micro-batch that several of them share
    is one row, that of the first.
    """

    n_seqs: NDArray[np.int32]
    """Documents of every micro-batch, shape [micro-batches]."""
    max_seqlen: NDArray[np.int32]
    """Tokens of its longest document, shape [micro-batches]."""
    n_tokens: NDArray[np.int64]
    """Tokens of the micro-batch over all context-parallel ranks, shape [micro-batches]."""
    data_parallel_size: int
    num_microbatches: NDArray[np.int32]
    """Micro-batches of one rank in every step, the same on all ranks (with `groups`: the most), shape [steps]."""
    exact: bool
    """Whether training forms these micro-batches in this order; else they were drawn, or training stops on a step."""
    groups: RankGroups | None = None
    """Groups of ranks of varying size that run the micro-batches; None: every rank has its own."""

    def __len__(self) -> int:
        """Micro-batches over all ranks and steps."""
        return len(self.n_seqs)

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return len(self.num_microbatches)

    @property
    def uniform(self) -> bool:
        """Whether every rank has the same number of micro-batches in every step."""
        if self.groups is not None:
            return False
        counts = self.num_microbatches
        return counts.strides == (0,) or bool((counts == counts[0]).all())

    def per_rank_step(self, values: NDArray[np.generic], reduce: np.ufunc) -> NDArray[np.generic]:
        """`values` [micro-batches, ...] reduced over the micro-batches of each rank: [steps, ranks, ...]."""
        ranks = self.data_parallel_size
        rest = values.shape[1:]
        if self.uniform:
            shape = (self.num_steps, ranks, int(self.num_microbatches[0]), *rest)
            if shape[2] == 1:
                return values.reshape(self.num_steps, ranks, *rest)
            return np.asarray(reduce.reduce(values.reshape(shape), axis=2))
        counts = np.repeat(self.num_microbatches, ranks).astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        return np.asarray(reduce.reduceat(values, starts, axis=0)).reshape(self.num_steps, ranks, *rest)

    def any_per_rank_step(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each rank runs one of the micro-batches that are `marked` in a step: [steps, ranks]."""
        if self.groups is None:
            return self.per_rank_step(marked, np.logical_or).astype(np.bool_, copy=False)
        changes = np.zeros((self.num_steps, self.data_parallel_size + 1), dtype=np.int64)
        step, first, size = (a[marked] for a in (self.groups.step, self.groups.first_rank, self.groups.cp_size))
        np.add.at(changes, (step, first), 1)
        np.add.at(changes, (step, first + size), -1)
        return np.asarray(np.cumsum(changes, axis=1)[:, :-1] > 0)

    def position(self, index: int) -> tuple[int, int, int]:
        """Step, rank (with `groups`: the first) and place on it of micro-batch `index`, as in `record_batches`."""
        if self.groups is not None:
            where = (self.groups.step, self.groups.first_rank, self.groups.microbatch)
            return int(where[0][index]), int(where[1][index]), int(where[2][index])
        ends = np.cumsum(self.num_microbatches, dtype=np.int64) * self.data_parallel_size
        step = int(np.searchsorted(ends, index, side="right"))
        count = int(self.num_microbatches[step])
        rank, place = divmod(index - int(ends[step]) + count * self.data_parallel_size, count)
        return step, rank, place

    def record_batches(self) -> Iterator[pa.RecordBatch]:
        """The table as Arrow record batches: `step`, `dp_rank`, `microbatch` and the three measures.

        With `groups` also `cp_size`: ranks dp_rank .. dp_rank + cp_size - 1 run the micro-batch together, and
        `microbatch` is its position on the first of them.
        """
        import pyarrow as pa

        if self.groups is not None:
            columns = {
                "step": self.groups.step.astype(np.int32),
                "dp_rank": self.groups.first_rank.astype(np.int32),
                "microbatch": self.groups.microbatch.astype(np.int32),
                "n_seqs": self.n_seqs,
                "max_seqlen": self.max_seqlen,
                "n_tokens": self.n_tokens,
                "cp_size": self.groups.cp_size,
            }
            yield from pa.table(columns).to_batches(_ROWS_A_BATCH)
            return
        counts = self.num_microbatches.astype(np.int64)
        step_ends = np.cumsum(counts * self.data_parallel_size)
        for start in range(0, len(self), _ROWS_A_BATCH):
            stop = min(start + _ROWS_A_BATCH, len(self))
            rows = np.arange(start, stop, dtype=np.int64)
            step = np.searchsorted(step_ends, rows, side="right")
            within = rows - (step_ends[step] - counts[step] * self.data_parallel_size)
            yield pa.record_batch(
                {
                    "step": step.astype(np.int32),
                    "dp_rank": (within // counts[step]).astype(np.int32),
                    "microbatch": (within % counts[step]).astype(np.int32),
                    "n_seqs": self.n_seqs[start:stop],
                    "max_seqlen": self.max_seqlen[start:stop],
                    "n_tokens": np.ascontiguousarray(self.n_tokens[start:stop]),
                }
            )

    def to_pandas(self) -> pd.DataFrame:
        """The table as a data frame with the columns of `record_batches`."""
        import pyarrow as pa

        frame: pd.DataFrame = pa.Table.from_batches(self.record_batches()).to_pandas()
        return frame

    def write_parquet(self, path: Path) -> None:
        """Write the table to `path`, whole or not at all."""
        import pyarrow.parquet as pq

        from thdprof.files import replacing

        batches = self.record_batches()
        first = next(batches)
        with (
            replacing(path) as temporary,
            temporary.open("wb") as file,  # pyarrow itself opens names in UTF-8 alone
            pq.ParquetWriter(file, first.schema) as writer,
        ):
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
