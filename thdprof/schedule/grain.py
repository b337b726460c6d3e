"""Grain, through which torchtitan and MaxText read and pack documents while training.

Grain keeps some rows open. A document goes into the first row that has room for it, or into the fullest. Where none has
room, all rows are read in an order that a seed draws.

Rules: Grain 0.2.18, `dataset/transformations/packing.py`, `packing_packed_batch.py` and `shuffle.py`, with
`index_shuffle.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.dataset import PackedRows
from thdprof.schedule import compiled
from thdprof.schedule.packing import NO_CAP
from thdprof.schedule.schedule import Samples, Schedule
from thdprof.training import TrainingSettings

_MOST_EPOCHS = 2_000

Read = Callable[[int, int], tuple[PackedRows, int]]
"""(number of a stream, epochs) -> the rows that it packs, and how many of them no later document can join."""


def find_orders(size: int, settings: TrainingSettings) -> Callable[[int], NDArray[np.int64]]:
    """The order of `size` documents in each epoch: Grain's `shuffle` where `sampling` is random."""

    @cache
    def order_of(epoch: int) -> NDArray[np.int64]:
        return np.arange(size) if settings.sampling == "sequential" else shuffle(size, settings.seed + epoch)

    return order_of


def schedule_streams(
    read: Read,
    fill: Callable[[PackedRows], Samples],
    *,
    streams: int,
    of_step: int,
    run: TrainingSettings,
    notes: list[str],
) -> Schedule:
    """The schedule of rows that several readers pack; documents repeat.

    Args:
        read: reads one of the `streams`.
        fill: adds their padding to rows.
        of_step: rows that a stream gives to a step.
        run: the run, of which a row is a row.

    Raises:
        DataError: a stream has no document.
    """
    packed, steps, epochs = _read_streams(read, streams, of_step, run)
    return _make_schedule(packed, steps, epochs, run, fill, notes)


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
    packed: list[PackedRows],
    steps: int,
    epochs: int,
    run: TrainingSettings,
    fill: Callable[[PackedRows], Samples],
    notes: list[str],
) -> Schedule:
    """The schedule of the rows that the streams read in all steps."""
    ranks, accumulation, size = run.data_parallel_size, run.num_microbatches, run.micro_batch_size
    filled = [fill(rows) for rows in packed]

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


def pack(
    lengths: NDArray[np.int64], run: TrainingSettings, bins: int, seed: int | None, *, best_fit: bool = False
) -> tuple[PackedRows, int]:
    """Pack documents as Grain does, in the order in which it reads the rows.

    Args:
        lengths: tokens of the documents in their order, 1 to `run.seq_length`, int64, shape [documents].
        bins: rows that are open at a time.
        seed: what orders rows that were open together; None: they keep their order.
        best_fit: whether a document goes into the fullest row that has room for it, and not into the first.

    Returns:
        The rows, and how many of them no later document can join.
    """
    cap = run.max_docs_per_pack or NO_CAP
    packs = compiled.run(_pack_loop, len(lengths) * bins, lengths, run.seq_length, cap, bins, best_fit)
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
