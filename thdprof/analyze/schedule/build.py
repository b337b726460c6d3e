"""Replays how training forms micro-batches: turns the rows of a dataset into a micro-batch table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import blend, packers, samplers
from thdprof.analyze.schedule.conversations import sft_samples
from thdprof.analyze.schedule.dp_balanced import dp_balanced
from thdprof.analyze.schedule.dynamic_cp import dynamic_cp
from thdprof.analyze.schedule.gpt_dataset import Samples, gpt_samples, train_share
from thdprof.analyze.schedule.memo import FORGETFUL, Memo
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.trainer import dataset_shuffle, trainer_table
from thdprof.analyze.sources.base import Conversations, Dataset, PackedRows, TokenStream, UnpackedDocuments
from thdprof.errors import DataError, UsageError
from thdprof.training import DYNAMIC_CP, TrainingSettings

_BRIDGE_ROUNDING = 16
"""Megatron-Bridge rounds the longest row up to a multiple of so many tokens (GPTSFTDataset.pad_seq_length_to_mult)."""


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


Tick = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


def build_schedule(
    dataset: Dataset, settings: TrainingSettings, tick: Tick = lambda done: None, memo: Memo = FORGETFUL
) -> Schedule:
    """Predict the micro-batches of a training run.

    Args:
        dataset: the data.
        settings: the run.
        tick: called with the share of the work that is done, 0 to 1.
        memo: keeps work for the next schedule of this dataset; a memo must not serve two datasets.

    Raises:
        DataError: the data cannot fill one step, or has a row that training would refuse.
        UsageError: the settings do not fit the dataset.
    """
    match dataset.content:
        case PackedRows():
            return _schedule_rows(dataset.content, settings)
        case UnpackedDocuments():
            return _schedule_documents(dataset.content, settings, memo)
        case Conversations():
            return _schedule_conversations(dataset.content, settings)
        case streams:
            return _schedule_streams(streams, settings, tick, memo)


def _schedule_streams(streams: Sequence[TokenStream], settings: TrainingSettings, tick: Tick, memo: Memo) -> Schedule:
    """The schedule of Megatron's GPTDataset over one token stream, or over a blend of several."""
    samples = (
        _blended(streams, settings, tick, memo)
        if len(streams) > 1 or settings.weights
        else _samples_of(streams[0], settings.train_samples, settings, tick, memo)
    )
    if int(samples.n_seqs.max()) > settings.seq_length:
        raise DataError(
            f"a sample of {settings.seq_length} tokens holds {samples.n_seqs.max()} documents, empty ones among them; "
            "GPTDataset has room for no more than tokens: drop empty sequences from the data"
        )
    return _schedule_samples(samples, settings)


def _schedule_conversations(conversations: Conversations, settings: TrainingSettings) -> Schedule:
    """The schedule of Megatron's SFTDataset over one file, or over a blend of several."""

    def samples_of(file: int, num_samples: int | None) -> Samples:
        return sft_samples(
            conversations.files[file],
            seq_length=settings.seq_length,
            context_parallel_size=settings.context_parallel_size,
            split=settings.split,
            num_samples=num_samples,
        )

    if settings.weights is None:
        samples = samples_of(0, settings.train_samples)
    else:
        assert settings.train_samples is not None  # resolve_settings refuses weights without it
        weights = blend.normalize(settings.weights)
        sizes = blend.drawn_and_built(weights, settings.train_samples)
        parts = [samples_of(file, built) for file, (_, built) in enumerate(sizes)]
        order = blend.blend_order(weights, sum(drawn for drawn, _ in sizes))
        samples = _in_order(order, parts, [file.path for file in conversations.files])
    distinct = max(1, conversations.num_lines() // settings.micro_batch_size)
    schedule = _schedule_samples(samples, settings)
    row_tokens = np.concatenate([file.line_tokens() for file in conversations.files])
    return replace(
        schedule,
        independent=min(schedule.independent, distinct),
        row_tokens=float(np.minimum(row_tokens, settings.seq_length).mean()),
    )


def _schedule_samples(samples: Samples, settings: TrainingSettings) -> Schedule:
    """The schedule of samples of equal length, which Megatron's samplers `single` and `cyclic` read."""
    steps, warnings = _num_steps(len(samples), settings)
    if settings.loader == "cyclic":
        rows = samplers.cyclic_rows(len(samples), steps, settings)
        n_seqs, max_seqlen, squared = samples.n_seqs[rows], samples.max_seqlen[rows], samples.squared[rows]
    else:
        n_seqs, max_seqlen = (_in_file_order(a, steps, settings) for a in (samples.n_seqs, samples.max_seqlen))
        squared = _in_file_order(samples.squared, steps, settings)
    tokens = settings.micro_batch_size * settings.seq_length
    table = _merge(n_seqs, max_seqlen, squared, tokens, settings)
    return Schedule(table=table, warnings=warnings, independent=len(table))


def _samples_of(
    stream: TokenStream, num_samples: int | None, settings: TrainingSettings, tick: Tick, memo: Memo
) -> Samples:
    """The samples of one token stream's training split; None samples: one epoch."""
    lengths = stream.sequence_tokens[train_share(settings.split, len(stream.sequence_tokens))]
    seq_length, seed, add_extra_token = settings.seq_length, settings.seed, settings.add_extra_token
    return memo.get(
        ("samples", stream.path),
        (len(lengths), seq_length, num_samples, seed, add_extra_token),
        lambda: gpt_samples(
            lengths,
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
            add_extra_token=add_extra_token,
            where=stream.path,
            tick=tick,
            memo=memo,
        ),
    )


def _blended(streams: Sequence[TokenStream], settings: TrainingSettings, tick: Tick, memo: Memo) -> Samples:
    """The samples of a blend of several token streams, in the order in which BlendedDataset serves them."""
    ends = np.cumsum([len(s.sequence_tokens) for s in streams]) / sum(len(s.sequence_tokens) for s in streams)
    ticks = [partial(_tick_between, tick, low, high) for low, high in zip([0.0, *ends], ends, strict=False)]
    if settings.weights is not None:
        assert settings.train_samples is not None  # resolve_settings refuses weights without it
        weights: Sequence[float] = blend.normalize(settings.weights)
        sizes = blend.drawn_and_built(weights, settings.train_samples)
        parts = [_samples_of(s, n, settings, t, memo) for s, (_, n), t in zip(streams, sizes, ticks, strict=True)]
        order = blend.blend_order(weights, sum(drawn for drawn, _ in sizes))
    else:
        parts = [_samples_of(s, None, settings, t, memo) for s, t in zip(streams, ticks, strict=True)]
        weights = [len(p) for p in parts]
        if settings.train_samples is None:
            order = blend.exhaustive_order([len(p) for p in parts])
        else:
            order = blend.blend_order(weights, min(settings.train_samples, sum(len(p) for p in parts)))
    return _in_order(order, parts, [s.path for s in streams])


def _in_order(order: NDArray[np.int16], parts: Sequence[Samples], paths: Sequence[str]) -> Samples:
    """The samples of a blend: `order` has the index of the dataset that gives each, and `parts` their samples."""
    blend.check_draws(order, [len(p) for p in parts], paths)
    n_seqs, max_seqlen = (np.empty(len(order), dtype=np.int32) for _ in range(2))
    squared = np.empty(len(order), dtype=np.float64)
    for index, part in enumerate(parts):
        here = order == index  # every dataset gives its samples in its own order
        count = int(here.sum())
        n_seqs[here], max_seqlen[here] = part.n_seqs[:count], part.max_seqlen[:count]
        squared[here] = part.squared[:count]
    return Samples(n_seqs=n_seqs, max_seqlen=max_seqlen, squared=squared)


def _tick_between(tick: Tick, low: float, high: float, done: float) -> None:
    """Report share `done` of a part of the work that reaches from share `low` to share `high` of all work."""
    tick(low + (high - low) * done)


def _schedule_documents(documents: UnpackedDocuments, settings: TrainingSettings, memo: Memo) -> Schedule:
    """The schedule of documents that `settings.packer` packs, before training starts or step by step."""
    if settings.packer in DYNAMIC_CP:
        return _schedule_dynamic_cp(documents, settings)
    if settings.packer == "dp_balanced":
        rows, num_microbatches = dp_balanced(documents.document_tokens, settings=settings)
        n_seqs, max_seqlen, tokens, squared = _plain_rows(rows, settings)
        table = MicrobatchTable(
            n_seqs=n_seqs,
            max_seqlen=max_seqlen,
            n_tokens=tokens,
            squared=squared,
            data_parallel_size=settings.data_parallel_size,
            num_microbatches=num_microbatches,
            exact=settings.loader == "single",
        )
        used = float(rows.num_tokens().sum()) / (rows.num_rows() * settings.seq_length)
        one_epoch = len(table) * len(documents.document_tokens) // max(1, len(rows.document_tokens))
        independent = max(1, min(len(table), one_epoch))
        return Schedule(table=table, independent=independent, packing_efficiency=used)
    adds_tail = settings.packer.startswith("first_fit") or settings.tail_policy == "append_dummy_seq"
    options: dict[str, Any] = {
        "packer": settings.packer,
        "pack_tokens": settings.seq_length,
        "seed": settings.seed,
        "max_documents": settings.max_docs_per_pack,
        "pad_to_multiple": settings.pad_seq_to_mult,
        "tail_documents": int(adds_tail),
        "processes": settings.packing_processes,
    }
    lengths = documents.document_tokens
    if settings.shuffle_seed is not None:  # TRL shuffles before it packs, and the rows after
        lengths = lengths[dataset_shuffle(len(lengths), settings.shuffle_seed)]
    packing = memo.get(
        "packed", (*options.items(), settings.shuffle_seed), lambda: packers.pack_rows(lengths, **options)
    )
    schedule = _schedule_rows(packing.rows, settings)
    return Schedule(
        table=schedule.table,
        notes=packing.notes,
        warnings=schedule.warnings,
        independent=schedule.independent,
        packing_efficiency=packing.efficiency,
        packing_efficiency_without_cap=packing.efficiency_without_cap,
    )


def _schedule_dynamic_cp(documents: UnpackedDocuments, settings: TrainingSettings) -> Schedule:
    """The schedule of documents under dynamic context parallelism."""
    table, used, notes, warnings = dynamic_cp(documents.document_tokens, settings=settings)
    one_epoch = len(table) * len(documents.document_tokens) // (table.num_steps * settings.global_batch_size)
    independent = max(1, min(len(table), one_epoch))
    return Schedule(
        table=table,
        notes=tuple(notes),
        warnings=tuple(warnings),
        independent=independent,
        packing_efficiency=used,
    )


def _schedule_rows(rows: PackedRows, settings: TrainingSettings) -> Schedule:
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
    steps, warnings = _num_steps(num_rows, settings)
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
    documents, longest, tokens_by_row, squared_by_row = _plain_rows(rows, settings)
    shape = (*read.shape[:2], settings.num_microbatches, settings.micro_batch_size)
    n_seqs = documents[read].reshape(shape).sum(axis=3, dtype=np.int64)
    max_seqlen = longest[read].reshape(shape).max(axis=3)
    tokens = tokens_by_row[read].reshape(shape).sum(axis=3)
    squared = squared_by_row[read].reshape(shape).sum(axis=3)
    if rows.rule == "trl":
        padding = -tokens % settings.pad_seq_to_mult  # every padding token has position 0 and so begins a document
        n_seqs, tokens, squared = n_seqs + padding, tokens + padding, squared + padding
    table = _table(n_seqs, max_seqlen, tokens, squared, settings)
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
    return _table(n_seqs, np.maximum(longest, tail), length, squared, settings)


def _plain_rows(
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


def _num_steps(num_rows: int, settings: TrainingSettings) -> tuple[int, tuple[str, ...]]:
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


def _in_file_order[T: np.generic](values: NDArray[T], steps: int, settings: TrainingSettings) -> NDArray[T]:
    """Deal `values` [rows] as the sampler `single` deals rows: shape [steps, ranks, rows of one rank and step]."""
    shape = (steps, settings.num_microbatches, settings.data_parallel_size, settings.micro_batch_size)
    dealt = values[: steps * settings.global_batch_size].reshape(shape).transpose(0, 2, 1, 3)
    return dealt.reshape(steps, settings.data_parallel_size, -1)


def _merge(
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
    return _table(n_seqs, max_seqlen, np.broadcast_to(np.int64(tokens), n_seqs.shape), squared, settings)


def _table(
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
