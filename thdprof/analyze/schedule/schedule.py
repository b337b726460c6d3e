"""A schedule: the micro-batches that training is predicted to form, and how rows become micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import samplers
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError, UsageError
from thdprof.training import TrainingSettings


class Memo:
    """Holds the last result of each kind of work. Callers share the results and must not change them."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: dict[Hashable, tuple[Hashable, Any]] = {}

    def get[R](self, kind: Hashable, key: Hashable, make: Callable[[], R]) -> R:
        """Return `make()`, or its last result for this `kind` of work if that was made for an equal `key`."""
        if not self._keeps:
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
    independent: int
    """Number of micro-batches that are independent samples of the data: neither repeated in later epochs nor collated
    together."""
    row_tokens: float | None = None
    """Tokens of documents in the mean row where training cuts rows; None where a row holds what the dataset has."""
    packing_efficiency: float | None = None
    """Share of the packed rows' tokens that hold documents; None where thdprof did not pack."""
    packing_efficiency_without_cap: float | None = None
    """The efficiency that the packer would have without max_docs_per_pack; None if there is no such cap."""


def num_steps(num_rows: int, settings: TrainingSettings) -> tuple[int, tuple[str, ...]]:
    """The number of steps to predict, and a warning if the data ends before the run does."""
    one_epoch = samplers.steps_of_one_epoch(num_rows, settings)
    if one_epoch == 0:
        raise DataError(
            f"{num_rows} rows do not make one step of --global-batch-size {settings.global_batch_size}; "
            "give more data or a smaller batch"
        )
    if settings.train_samples is None:
        return one_epoch, ()
    steps = settings.train_samples // settings.global_batch_size
    if settings.loader == "single" and steps > one_epoch:
        warning = (
            f"the run asks for {steps} steps, but the data ends after {one_epoch}: the single loader does not start "
            "again, and training stops there"
        )
        return one_epoch, (warning,)
    return steps, ()


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
