"""Packers of trainers whose data go through Grain: torchtitan and MaxText pack while training.

Rules: Grain 0.2.18, `dataset/transformations/packing.py`, `packing_packed_batch.py` and `shuffle.py`, with
`index_shuffle.cc`; torchtitan with its pull request 4156, `components/data/packing.py` and `dataset.py`; MaxText at
commit e591f30c (2026-08-22), `input_pipeline/grain_data_processing.py` and `utils/gradient_accumulation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, packers
from thdprof.analyze.schedule.schedule import Samples, Schedule
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError
from thdprof.training import TrainingSettings

_TORCHTITAN_BINS = 8
"""torchtitan's default of FirstFitPackingConfig.num_packing_bins."""
_MOST_EPOCHS = 2_000
_MAXTEXT_SEED = 0
"""Seed by which Grain orders MaxText's finished rows, whatever its data_shuffle_seed is."""

Read = Callable[[int, int], tuple[PackedRows, int]]
"""(number of a stream, epochs) -> the rows that it packs, and how many of them no later document can join."""


def schedule_grain(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of documents that torchtitan or MaxText packs with Grain while training.

    Grain keeps `packing_bins` rows open. A document goes into the first row that has room for it, or with
    `maxtext_best_fit` into the fullest. Where none has room, all rows are read in an order that a seed draws.

    - `torchtitan_first_fit`: a row is a micro-batch of `micro_batch_size` x `seq_length` tokens. Documents are split
      into parts of at most `seq_length` tokens, and so is the padding. A rank reads neighbouring documents.
    - `maxtext_first_fit`, `maxtext_best_fit`: a row has `seq_length` tokens, and documents are cut to it. A host reads
      each so-many-th document. Its `packing_bins` rows are those of its ranks in one step.

    With random `sampling` documents are in the order of Grain's `shuffle`, by `seed` plus the epoch. They repeat.

    Args:
        document_tokens: tokens of every document in the order of the dataset, int32, shape [documents].

    Raises:
        DataError: a rank or host has no document.
    """
    lengths, size = document_tokens.astype(np.int64), settings.micro_batch_size
    notes: list[str] = []
    if empty := int((lengths == 0).sum()):
        notes.append(f"{empty} empty documents were left out")

    @cache
    def order_of(epoch: int) -> NDArray[np.int64]:
        if settings.sampling == "sequential":
            return np.arange(len(lengths))
        return shuffle(len(lengths), settings.seed + epoch)

    if settings.packer == "torchtitan_first_fit":
        run = replace(
            settings,
            micro_batch_size=1,
            seq_length=size * settings.seq_length,
            global_batch_size=settings.global_batch_size // size,
        )
        if split := int((lengths > settings.seq_length).sum()):
            notes.append(f"{split} documents longer than {settings.seq_length} tokens were split")
        streams, of_step = settings.data_parallel_size, run.num_microbatches
        bins, seed = settings.packing_bins or _TORCHTITAN_BINS, settings.seed
        share, more = divmod(len(lengths), streams)
        drawn = settings.sampling == "random"

        def read(stream: int, epochs: int) -> tuple[PackedRows, int]:
            own = slice(stream * share + min(stream, more), (stream + 1) * share + min(stream + 1, more))
            documents = np.concatenate([lengths[order_of(epoch)[own]] for epoch in range(epochs)])
            parts, _ = packers.split_documents(documents[documents > 0], settings.seq_length)
            return pack(parts, run, bins, seed if drawn else None)

    else:
        run = settings
        lengths = packers.cut(lengths, settings.seq_length, 1, notes)
        rows = settings.num_microbatches * size
        bins = of_step = settings.packing_bins or rows
        streams = settings.data_parallel_size * rows // bins

        def read(stream: int, epochs: int) -> tuple[PackedRows, int]:
            order = np.concatenate([order_of(epoch) for epoch in range(epochs)])
            documents = lengths[order[stream::streams]]
            return pack(documents[documents > 0], run, bins, _MAXTEXT_SEED)

    packed, steps, epochs = _read_streams(read, streams, of_step, settings)
    return _make_schedule(packed, steps, epochs, run, settings.seq_length, notes)


def _read_streams(
    read: Read, streams: int, of_step: int, settings: TrainingSettings
) -> tuple[list[PackedRows], int, int]:
    """The rows of every stream in all steps, the number of steps, and the epochs that hold them."""
    wanted = None if settings.train_samples is None else settings.train_samples // settings.global_batch_size
    needed, epochs = (wanted or 1) * of_step, 1
    while True:
        made = [read(stream, epochs) for stream in range(streams)]
        if any(rows.num_rows() == 0 for rows, _ in made):
            raise DataError(
                f"--packer {settings.packer}: one of {streams} readers has no document; give more documents or a "
                "smaller --data-parallel-size"
            )
        finished = min(count for _, count in made)
        if finished >= needed:
            break
        epochs = max(epochs, epochs * needed // finished) + 1 if finished else 2 * epochs
        if epochs > _MOST_EPOCHS:
            raise DataError(
                f"--packer {settings.packer}: the documents are so few that a reader's {needed:,} rows take more than "
                f"{_MOST_EPOCHS:,} epochs; give more documents"
            )
    steps = wanted or finished // of_step
    return [_first_rows(rows, steps * of_step) for rows, _ in made], steps, epochs


def _first_rows(rows: PackedRows, count: int) -> PackedRows:
    offsets = rows.row_offsets[: count + 1]
    return replace(rows, document_tokens=rows.document_tokens[: offsets[-1]], row_offsets=offsets)


def _make_schedule(
    packed: list[PackedRows], steps: int, epochs: int, run: TrainingSettings, longest: int, notes: list[str]
) -> Schedule:
    """The schedule of the rows that the streams read in all steps; `longest` is the tokens of a part of padding."""
    ranks, accumulation, size = run.data_parallel_size, run.num_microbatches, run.micro_batch_size
    filled = [_pad(rows, run, longest) for rows in packed]

    def deal(values: tuple[Any, ...]) -> Any:
        together = np.stack([of_stream.reshape(steps, -1) for of_stream in values], axis=1)
        # MaxText deals a rank's rows to its micro-batches one by one
        by_rank = together.reshape(steps, ranks, size, accumulation).swapaxes(2, 3)
        return by_rank.reshape(steps, ranks, accumulation * size)

    read = Samples(*map(deal, zip(*filled, strict=True)))
    table = read.merge_rows(run).table(run, exact=True)
    num_rows = sum(rows.num_rows() for rows in packed)
    used = sum(float(rows.num_tokens().sum()) for rows in packed) / (num_rows * run.seq_length)
    return Schedule(table=table, notes=tuple(notes), distinct=len(table) // epochs, packing_efficiency=used)


def _pad(rows: PackedRows, run: TrainingSettings, longest: int) -> Samples:
    """Rows with their padding, shape [rows].

    torchtitan parts it into documents of at most `longest` tokens, and MaxText's attention leaves it out.
    """
    n_seqs, max_seqlen, squared, n_tokens = Samples.from_rows(rows)
    if run.packer != "torchtitan_first_fit":
        return Samples(n_seqs, max_seqlen, squared, np.full_like(n_tokens, run.seq_length))
    parts, rest = np.divmod(run.seq_length - n_tokens, longest)
    return Samples(
        n_seqs + parts + (rest > 0),
        np.maximum(max_seqlen, np.where(parts > 0, longest, rest)),
        squared + parts * float(longest) ** 2 + np.square(rest, dtype=np.float64),
        np.full_like(n_tokens, run.seq_length),
    )


def pack(lengths: NDArray[np.int64], run: TrainingSettings, bins: int, seed: int | None) -> tuple[PackedRows, int]:
    """Pack documents as Grain does, in the order in which it reads the rows.

    Args:
        lengths: tokens of the documents in their order, 1 to `run.seq_length`, int64, shape [documents].
        bins: rows that are open at a time.
        seed: what orders rows that were open together; None: they keep their order.

    Returns:
        The rows, and how many of them no later document can join.
    """
    cap = run.max_docs_per_pack or packers.NO_CAP
    best = run.packer == "maxtext_best_fit"
    packs = compiled.run(_pack_loop, len(lengths) * bins, lengths, run.seq_length, cap, bins, best)
    count = int(packs.max()) + 1 if len(packs) else 0
    finished = max(0, count - 1) // bins * bins
    read = np.arange(count)
    if seed is not None:
        for first in range(0, count, bins):
            together = range(min(bins, count - first))
            read[first : first + bins] = first + np.random.default_rng(seed + first).permuted(together)
    place = np.empty(count, dtype=np.int64)
    place[read] = np.arange(count)
    by_row = np.argsort(place[packs], kind="stable")
    return PackedRows.from_sizes(lengths[by_row], np.bincount(packs, minlength=count)[read]), finished


def _pack_loop(lengths: NDArray[np.int64], capacity: int, cap: int, bins: int, best: bool) -> NDArray[np.int64]:
    """The row of every document, int64, shape [documents]; every `bins` rows were open together."""
    packs = np.empty_like(lengths)
    tokens, counts = np.zeros(bins, dtype=np.int64), np.zeros(bins, dtype=np.int64)
    first = opened = 0
    for i in range(len(lengths)):
        chosen = -1
        for row in range(opened):
            if tokens[row] + lengths[i] > capacity or counts[row] >= cap:
                continue
            if chosen < 0 or tokens[row] > tokens[chosen]:
                chosen = row
            if not best:
                break
        if chosen < 0:
            if opened == bins:
                first += bins
                opened = 0
            chosen = opened
            opened += 1
            tokens[chosen] = counts[chosen] = 0
        packs[i] = first + chosen
        tokens[chosen] += lengths[i]
        counts[chosen] += 1
    return packs


_KEYS = 4
"""Rounds of the cipher by which Grain shuffles."""


def shuffle(size: int, seed: int) -> NDArray[np.int64]:
    """The order in which Grain's `MapDataset.shuffle(seed=seed)` reads `size` elements, int64, shape [size].

    Grain encrypts an index by a block cipher until the result is an index again. Where `size` is a power of 2 and one
    more, the cipher's blocks are too small for the last index, which Grain reads as index 0.
    """
    most = size - 1
    if most <= 0:
        return np.zeros(size, dtype=np.int64)
    bits = math.ceil(math.log2(most))
    word = np.uint64(max(bits + bits % 2, 16) // 2)
    mask = (np.uint64(1) << word) - np.uint64(1)

    def rotate(values: NDArray[np.uint64], by: int) -> NDArray[np.uint64]:
        return (values << np.uint64(by)) & mask | values >> (word - np.uint64(by))

    def scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return rotate(values, 1) & rotate(values, 8) ^ rotate(values, 2)

    keys = [np.uint64(key) & mask for key in _make_keys(seed % 2**32)]

    def encrypt(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> word & mask, values & mask
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            left ^= scramble(right) ^ even
            right ^= scramble(left) ^ odd
        return left << word | right

    if (
        word == 8
    ):  # blocks may be far more than elements, which are encrypted thousands of times: twice as often a round
        table = encrypt(np.arange(2**16, dtype=np.uint64)).astype(np.int64)
        while (table[:size] > most).any():
            table = np.where(table > most, table[table], table)
        return table[np.arange(size) % 2**16]
    order = np.arange(size, dtype=np.uint64)
    outside_at = np.arange(size)
    while len(outside_at):
        order[outside_at] = encrypt(order[outside_at])
        outside_at = outside_at[order[outside_at] > most]
    return order.astype(np.int64)


def _make_keys(seed: int) -> list[int]:
    """Four numbers of 32 bits, as C++'s `std::seed_seq{seed}` generates them."""
    keys, low = [0x8B8B8B8B] * _KEYS, 2**32 - 1
    for k in range(2 * _KEYS):
        this, after, behind = k % _KEYS, (k + 1) % _KEYS, (k + 2) % _KEYS
        before = keys[(k - 1) % _KEYS]
        if k < _KEYS:
            mixed = keys[this] ^ keys[after] ^ before
            first = 1664525 * (mixed ^ mixed >> 27) & low
            second = first + (1, this + seed, this, this)[k] & low
            keys[after] = keys[after] + first & low
            keys[behind] = keys[behind] + second & low
        else:
            mixed = keys[this] + keys[after] + before & low
            first = 1566083941 * (mixed ^ mixed >> 27) & low
            second = first - this & low
            keys[after] ^= first
            keys[behind] ^= second
        keys[this] = second
    return keys
