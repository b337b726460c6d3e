"""The micro-batch table: documents and tokens of the micro-batch in every forward pass of every rank and step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ROWS_A_BATCH = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The ranks that run each micro-batch under dynamic context parallelism. Every array has shape [micro-batches]."""

    cp_size: NDArray[np.int32]
    """Number of ranks that run the micro-batch together; they are neighbours."""
    first_rank: NDArray[np.int64]
    """The lowest of these ranks, counted over all data-parallel x context-parallel ranks."""
    microbatch: NDArray[np.int64]
    """Number of micro-batches that the lowest rank runs before this one in the step."""
    step: NDArray[np.int64]
    """Optimizer step, from 0."""
    round: NDArray[np.int64]
    """Round, counted over all steps from 0. In a round every rank belongs to one group; at its end all ranks wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTable:
    """Micro-batches sorted by step, data-parallel rank and position in the step.

    With `groups`, ranks are counted over all data-parallel x context-parallel ranks. A micro-batch that several ranks
    share is one entry, which stands at the lowest of them.
    """

    n_seqs: NDArray[np.int32]
    """Documents of every micro-batch, shape [micro-batches]."""
    max_seqlen: NDArray[np.int32]
    """Tokens of the longest document of every micro-batch, shape [micro-batches]."""
    n_tokens: NDArray[np.int64]
    """Tokens of every micro-batch over all its context-parallel ranks, shape [micro-batches]."""
    data_parallel_size: int
    """Number of ranks that the table covers: data-parallel ranks; with `groups`, context-parallel ones as well."""
    num_microbatches: NDArray[np.int32]
    """Micro-batches of one rank in every step, int32, shape [steps]. All ranks have as many; with `groups` it is the
    number of the rank that has most."""
    exact: bool
    """Whether training forms these micro-batches in this order; else they were drawn, or training stops on a step,
    or `size_guessed`."""
    squared: NDArray[np.float64] | None = None
    """Sum of the squared lengths of every micro-batch's documents as attention sees them, over all its context-parallel
    ranks, shape [micro-batches]: attention's work grows with it. None: not known. `record_batches` leaves it out."""
    groups: RankGroups | None = None
    """The groups of ranks that run the micro-batches; None: every rank has micro-batches of its own."""
    shared_capture_ranks: int = 1
    """Neighbouring ranks that replay one bucket together, or all run eagerly; 1 with `groups`."""
    size_guessed: bool = False
    """Whether the order is training's, and only the pack size that tails are counted by is a guess."""
    held: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What was counted of these micro-batches: analyses that share the table share it."""

    @property
    def drawn(self) -> bool:
        """Whether micro-batches were drawn, because the order in which training reads rows is not known."""
        return not self.exact and self.groups is None and not self.size_guessed

    def hold[R](self, key: Hashable, make: Callable[[], R]) -> R:
        """`make()`, which counts something of the table, or what it returned before for this `key`."""
        if key not in self.held:
            self.held[key] = make()
        return cast("R", self.held[key])

    def __len__(self) -> int:
        """Number of micro-batches over all ranks and steps."""
        return len(self.n_seqs)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.num_microbatches)

    @property
    def total_squared(self) -> float | None:
        """Sum of `squared`; None where it is not known."""
        squared = self.squared
        return None if squared is None else self.hold("total squared", lambda: float(squared.sum()))

    @property
    def uniform(self) -> bool:
        """Whether every rank has equally many micro-batches in all steps."""
        if self.groups is not None:
            return False
        counts = self.num_microbatches
        return counts.strides == (0,) or bool((counts == counts[0]).all())

    def joint(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest of `values` among the micro-batches that ranks decide on together, shape [micro-batches].

        These are the i-th micro-batches of a step on `shared_capture_ranks` neighbouring ranks.

        Args:
            values: one for each micro-batch, or one for all of them, with shape [1].
        """
        size = self.shared_capture_ranks
        if size == 1 or len(values) != len(self):
            return values
        if self.uniform:
            counts = int(self.num_microbatches[0])
            grouped = values.reshape(-1, size, counts)
            return np.repeat(grouped.max(axis=1, keepdims=True), size, axis=1).reshape(-1)
        of_group = np.repeat(self.num_microbatches.astype(np.int64), self.data_parallel_size // size)
        ends = np.cumsum(of_group)
        stride = np.repeat(of_group, of_group)
        first = np.arange(len(stride)) + np.repeat((ends - of_group) * (size - 1), of_group)  # on the lowest rank
        joined = np.empty_like(values)
        largest = values[first]
        for rank in range(1, size):
            np.maximum(largest, values[first + rank * stride], out=largest)
        for rank in range(size):
            joined[first + rank * stride] = largest
        return joined

    def per_rank_step(self, values: NDArray[np.generic], reduce: np.ufunc) -> NDArray[np.generic]:
        """Reduce `values` [micro-batches, ...] over the micro-batches of a rank and step: shape [steps, ranks, ...]."""
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
        """Whether a rank runs a micro-batch that is `marked` [micro-batches] in a step: bool, shape [steps, ranks]."""
        if self.groups is None:
            return self.per_rank_step(marked, np.logical_or).astype(np.bool_, copy=False)
        changes = np.zeros((self.num_steps, self.data_parallel_size + 1), dtype=np.int64)
        step, first, size = (a[marked] for a in (self.groups.step, self.groups.first_rank, self.groups.cp_size))
        np.add.at(changes, (step, first), 1)
        np.add.at(changes, (step, first + size), -1)
        return np.asarray(np.cumsum(changes, axis=1)[:, :-1] > 0)

    def position(self, index: int) -> tuple[int, int, int]:
        """Step, rank (with `groups`, the lowest) and position on that rank of micro-batch `index`."""
        (step,), (rank,), (place,) = self._positions(np.array([index]), self._step_ends())
        return int(step), int(rank), int(place)

    def _step_ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.num_microbatches, dtype=np.int64) * self.data_parallel_size

    def _positions(
        self, rows: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """What `position` gives of each of the micro-batches `rows`; `ends` are the ends of the steps."""
        if (groups := self.groups) is not None:
            return groups.step[rows], groups.first_rank[rows], groups.microbatch[rows]
        step = np.searchsorted(ends, rows, side="right")
        counts = self.num_microbatches[step].astype(np.int64)
        return step, *np.divmod(rows - ends[step] + counts * self.data_parallel_size, counts)

    def record_batches(self) -> Iterator[pa.RecordBatch]:
        """The table as Arrow record batches: `step`, `dp_rank`, `microbatch`, `n_seqs`, `max_seqlen`, `n_tokens`.

        With `groups` there is also `cp_size`: ranks dp_rank .. dp_rank + cp_size - 1 run the micro-batch together, and
        `microbatch` is its position on rank dp_rank.
        """
        import pyarrow as pa

        groups, ends = self.groups, self._step_ends()
        for start in range(0, len(self), _ROWS_A_BATCH):
            part = slice(start, min(start + _ROWS_A_BATCH, len(self)))
            step, rank, microbatch = self._positions(np.arange(part.start, part.stop), ends)
            columns = {
                "step": step.astype(np.int32),
                "dp_rank": rank.astype(np.int32),
                "microbatch": microbatch.astype(np.int32),
                "n_seqs": self.n_seqs[part],
                "max_seqlen": self.max_seqlen[part],
                "n_tokens": np.ascontiguousarray(self.n_tokens[part]),
            }
            yield pa.record_batch(columns | ({} if groups is None else {"cp_size": groups.cp_size[part]}))

    def to_pandas(self) -> pd.DataFrame:
        """The table as a data frame with the columns of `record_batches`."""
        import pyarrow as pa

        frame: pd.DataFrame = pa.Table.from_batches(self.record_batches()).to_pandas()
        return frame

    def write_parquet(self, path: Path) -> None:
        """Write the table to `path` as parquet. A write that fails leaves `path` as it was."""
        from thdprof.files import write_batches

        write_batches(path, self.record_batches())


def join_steps(tables: Sequence[MicrobatchTable], num_steps: int) -> MicrobatchTable:
    """The first `num_steps` steps of `tables`, one after the other: those of one run, without `groups`."""
    counts = np.concatenate([table.num_microbatches for table in tables])[:num_steps]
    end = int(counts.sum()) * tables[0].data_parallel_size
    columns = ("n_seqs", "max_seqlen", "n_tokens", "squared")
    joined: dict[str, Any] = {name: np.concatenate([getattr(t, name) for t in tables])[:end] for name in columns}
    return replace(tables[0], num_microbatches=counts, **joined)
