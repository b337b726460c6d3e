"""A schedule: the micro-batches that training is predicted to form, and how rows become micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import UsageError
from thdprof.read.dataset import PackedRows
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.training import TailPolicy, TrainingSettings


class Memo:
    """Holds the last result of each kind of work. Callers share the results and must not change them.

    `without` begins the kinds that are not held, because they are large and of no use to those who share the memo.
    """

    def __init__(self, *, keeps: bool = True, without: str | None = None) -> None:
        self._keeps, self._without = keeps, without
        self._held: dict[Hashable, tuple[Hashable, Any]] = {}

    def get[R](self, kind: Hashable, key: Hashable, make: Callable[[], R]) -> R:
        """Return `make()`, or its last result for this `kind` of work if that was made for an equal `key`."""
        if not self._keeps or (isinstance(kind, tuple) and kind[0] == self._without):
            return make()
        held = self._held.get(kind)
        if held is None or held[0] != key:
            self._held.pop(kind, None)  # before `make`: memory may not hold two results
            held = self._held[kind] = (key, make())
        return cast("R", held[1])


FORGETFUL = Memo(keeps=False)
"""A memo that keeps nothing, so that a single schedule takes no more memory than it needs."""


Tick = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The predicted micro-batches, with what the user should know about them."""

    table: MicrobatchTable
    notes: tuple[str, ...] = ()
    """Sentences on how the rows became micro-batches: documents that were cut or left out."""
    warnings: tuple[str, ...] = ()
    """Sentences on training that would stop or hang."""
    distinct: int
    """Number of micro-batches that one pass over the data makes, of those that are collated together one."""
    row_tokens: float | None = None
    """Tokens of documents in the mean row where training cuts rows; None where a row holds what the dataset has."""
    packing_efficiency: float | None = None
    """Share of the packed rows' tokens that hold documents; None where thdprof did not pack."""
    packing_efficiency_without_cap: float | None = None
    """The efficiency that the packer would have without max_docs_per_pack; None if there is no such cap."""

    @property
    def independent(self) -> int:
        """Number of micro-batches that are independent samples of the data: neither repeated in later epochs nor
        collated together."""
        return max(1, min(len(self.table), self.distinct))


class Samples(NamedTuple):
    """Sequences as attention sees them: stored rows, samples of a dataset, or micro-batches. All arrays have one shape.

    Rows that ranks read have shape [steps, ranks, rows of one rank and step].
    """

    n_seqs: NDArray[np.integer]
    """Documents of each."""
    max_seqlen: NDArray[np.integer]
    """Tokens of the longest document of each."""
    squared: NDArray[np.float64]
    """Sum of the squared lengths of the documents of each, float64."""
    n_tokens: NDArray[np.int64] | int
    """Tokens of each; one number where all have as many."""

    @classmethod
    def from_rows(cls, rows: PackedRows) -> Samples:
        """Stored rows, without what training adds to them, shape [rows]."""
        return cls(rows.num_documents(), rows.longest(), rows.squared(), rows.num_tokens())

    def apply(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Samples:
        """The samples whose arrays are `function` of these."""
        n_seqs, max_seqlen, squared, n_tokens = self
        tokens = n_tokens if isinstance(n_tokens, int) else function(n_tokens)
        return Samples(function(n_seqs), function(max_seqlen), function(squared), tokens)

    def take(self, indices: NDArray[np.integer]) -> Samples:
        """The samples at `indices`, in the shape of these."""
        return self.apply(lambda values: values[indices])

    def merge_rows(self, settings: TrainingSettings) -> Samples:
        """Every `micro_batch_size` rows of a rank and step as a micro-batch, as Megatron-LM flattens them."""
        if settings.micro_batch_size == 1:
            return self
        shape = (*self.n_seqs.shape[:2], settings.num_microbatches, settings.micro_batch_size)
        return self.apply(lambda values: values.reshape(shape)).join()

    def join(self) -> Samples:
        """All sequences along the last axis as one."""
        n_seqs, max_seqlen, squared, n_tokens = self
        return Samples(
            n_seqs.sum(axis=-1, dtype=np.int64),
            max_seqlen.max(axis=-1),
            squared.sum(axis=-1),
            n_tokens * n_seqs.shape[-1] if isinstance(n_tokens, int) else n_tokens.sum(axis=-1),
        )

    def pad(self, multiple: int) -> Samples:
        """Pad to a multiple of `multiple` tokens, as TRL does: each has position 0 and so begins a document."""
        padding = -self.n_tokens % multiple
        return Samples(
            self.n_seqs + padding, self.max_seqlen, self.squared + padding, np.asarray(self.n_tokens + padding)
        )

    def fill(self, tail: NDArray[np.int64], policy: TailPolicy, last: NDArray[np.integer]) -> Samples:
        """Add `tail` unused tokens by the tail policy `policy`; `last` are the tokens of each last document."""
        if policy == "none":
            return self
        documents, before = self.n_seqs, last.astype(np.int64)
        if policy == "append_dummy_seq":
            documents, before = documents + (tail > 0).astype(np.int32), np.zeros_like(tail)
        return Samples(
            documents,
            np.maximum(self.max_seqlen, before + tail),
            self.squared + np.multiply(tail, 2 * before + tail, dtype=np.float64),
            np.asarray(self.n_tokens + tail),
        )

    def table(
        self,
        settings: TrainingSettings,
        num_microbatches: NDArray[np.int32] | None = None,
        *,
        exact: bool,
        groups: RankGroups | None = None,
    ) -> MicrobatchTable:
        """The table of these micro-batches, which are in its order.

        Args:
            num_microbatches: micro-batches of one rank in every step; None: arrays have shape [steps, ranks, ...].
        """
        if int(self.n_seqs.max()) > np.iinfo(np.int32).max:
            raise UsageError("a micro-batch has more than 2**31 - 1 documents; give a smaller --micro-batch-size")
        if num_microbatches is None:
            num_microbatches = np.broadcast_to(np.int32(settings.num_microbatches), len(self.n_seqs))
        n_tokens = self.n_tokens
        return MicrobatchTable(
            n_seqs=np.ascontiguousarray(self.n_seqs, dtype=np.int32).reshape(-1),
            max_seqlen=np.ascontiguousarray(self.max_seqlen, dtype=np.int32).reshape(-1),
            n_tokens=np.broadcast_to(np.int64(n_tokens), self.n_seqs.size)
            if isinstance(n_tokens, int)
            else n_tokens.reshape(-1).astype(np.int64, copy=False),
            squared=np.ascontiguousarray(self.squared).reshape(-1),
            data_parallel_size=settings.data_parallel_size * (settings.context_parallel_size if groups else 1),
            num_microbatches=num_microbatches,
            exact=exact,
            groups=groups,
        )


def fill_rows(rows: PackedRows, settings: TrainingSettings) -> Samples:
    """Stored rows, each filled up to `seq_length` by the tail policy, shape [rows]."""
    samples = Samples.from_rows(rows)
    return samples.fill(settings.seq_length - rows.num_tokens(), settings.tail_policy, rows.last())
