"""Packers: document lengths -> rows, as the training stacks pack them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled
from thdprof.analyze.sources.base import PackedRows, RowRule
from thdprof.errors import DataError, UsageError
from thdprof.training import shown

NO_CAP = 2**62
"""Stands for "any number of documents" where a loop wants a whole number."""
_TRL_BATCH = 1000
"""Documents that TRL packs together: one batch of `datasets.Dataset.map`."""

Place = Callable[[NDArray[np.int64], int, int], NDArray[np.int64]]
"""(document tokens in placing order, pack tokens, cap) -> the pack of each, -1 for none, int64, shape [documents]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Rows that a packer made."""

    rows: PackedRows
    efficiency: float
    """Share of the rows' tokens that hold documents, 0 to 1."""
    efficiency_without_cap: float | None
    """That of the same packer without a cap on documents; None if there was no cap."""
    notes: tuple[str, ...]
    """What happened to documents that did not fit."""


def pack_rows(
    document_tokens: NDArray[np.int32],
    *,
    packer: str,
    pack_tokens: int,
    seed: int,
    max_documents: int | None = None,
    pad_to_multiple: int = 1,
    tail_documents: int = 0,
) -> Packing:
    """Pack documents of `document_tokens` [documents] into rows of `pack_tokens`.

    - `first_fit_decreasing`, `first_fit_shuffle` (Megatron-Bridge, rule "bridge"): longest first, or shuffled with
      `seed`; each document goes into the first row that it fits. Longer ones are left out; with `pad_to_multiple`
      over 1 documents are padded to it and longer ones cut, as Bridge prepares data for context parallelism.
    - `next_fit`: in file order, into the last row or a new one; padded to `pad_to_multiple`, longer ones cut.
    - `best_fit_decreasing` (TRL's "bfd"): of every 1000 documents the longest first, each into the fullest row that
      it fits; longer ones are cut, empty ones left out. TRL pads micro-batches, not documents.

    `max_documents` caps the documents of a row with `tail_documents` (0 or 1) of them kept free for the document
    that training may add for the unused tail: the packer puts in at most max_documents - tail_documents.

    Raises:
        DataError: no document is left to pack.
        UsageError: an unknown packer, or a cap that leaves no place for a document.
    """
    lengths = document_tokens.astype(np.int64)
    notes: list[str] = []
    place: Place
    rule: RowRule = "concatenate"
    match packer:
        case "first_fit_decreasing" | "first_fit_shuffle":
            rule, place = "bridge", _first_fit
            lengths = _fit_bridge(lengths, pack_tokens, pad_to_multiple, notes)
            lengths.sort()
            if packer == "first_fit_shuffle":
                np.random.RandomState(seed).shuffle(lengths)
            else:
                lengths = lengths[::-1].copy()
        case "next_fit":
            place = _next_fit
            lengths = cut(lengths, pack_tokens, pad_to_multiple, notes)
        case "best_fit_decreasing":
            rule, place = "trl", _best_fit
            lengths = _longest_first(cut(lengths, pack_tokens, 1, notes), notes)
        case _:
            raise UsageError(f"--packer {packer}: makes no rows ahead of training")
    cap = NO_CAP if max_documents is None else free_documents(max_documents, tail_documents)
    packs = place(lengths, pack_tokens, cap)
    if not (packs >= 0).any():
        why = "; ".join(notes) or "there are none"
        raise DataError(f"no document is left to pack into rows of {pack_tokens} tokens: {why}")
    rows = _rows(lengths[packs >= 0], packs[packs >= 0], rule)
    without_cap = None
    if max_documents is not None:
        num_rows = int(place(lengths, pack_tokens, NO_CAP).max()) + 1
        without_cap = _efficiency(lengths, num_rows, pack_tokens)
    return Packing(
        rows=rows,
        efficiency=_efficiency(lengths, rows.num_rows(), pack_tokens),
        efficiency_without_cap=without_cap,
        notes=tuple(notes),
    )


def free_documents(max_documents: int, tail_documents: int) -> int:
    """How many documents of the data a row may hold: the cap less the `tail_documents` that training may append.

    Raises:
        UsageError: the cap leaves no place for a document.
    """
    free = max_documents - tail_documents
    if free < 1:
        raise UsageError(
            f"{shown('max_docs_per_pack', max_documents)}: leaves no document beside the one for the unused tail; "
            f"use {tail_documents + 1} or more"
        )
    return free


def _efficiency(lengths: NDArray[np.int64], num_rows: int, pack_tokens: int) -> float:
    return float(lengths.sum()) / (num_rows * pack_tokens)


def _rows(lengths: NDArray[np.int64], packs: NDArray[np.int64], rule: RowRule) -> PackedRows:
    """Documents in placing order, gathered by pack."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(packs))))
    by_pack = lengths[np.argsort(packs, kind="stable")]
    return PackedRows(document_tokens=by_pack.astype(np.int32), row_offsets=offsets.astype(np.int64), rule=rule)


def pad(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Lengths in tokens, each rounded up to a multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def cut(lengths: NDArray[np.int64], pack_tokens: int, multiple: int, notes: list[str]) -> NDArray[np.int64]:
    """Lengths padded to `multiple` and cut to what of a pack is a multiple of it."""
    longest = pack_tokens // multiple * multiple
    if longest == 0:
        raise UsageError(f"--pad-seq-to-mult {multiple}: is more than --seq-length {pack_tokens}")
    num_long = int((lengths > longest).sum())
    if num_long:
        notes.append(f"{num_long} documents longer than {longest} tokens were cut to that")
    return np.minimum(pad(lengths, multiple), longest)


def _fit_bridge(lengths: NDArray[np.int64], pack_tokens: int, multiple: int, notes: list[str]) -> NDArray[np.int64]:
    """What Megatron-Bridge's preparation leaves: tokenize_dataset pads and cuts, create_hist drops."""
    if multiple > 1:
        return cut(lengths, pack_tokens, multiple, notes)
    fits = lengths <= pack_tokens
    if not fits.all():
        notes.append(f"{int((~fits).sum())} documents longer than the pack of {pack_tokens} tokens were left out")
    return lengths[fits]


def _longest_first(lengths: NDArray[np.int64], notes: list[str]) -> NDArray[np.int64]:
    """Lengths with every batch of TRL's sorted for itself, longest first."""
    batches = [np.sort(lengths[start : start + _TRL_BATCH])[::-1] for start in range(0, len(lengths), _TRL_BATCH)]
    empty = int((lengths == 0).sum())
    if empty:
        notes.append(f"{empty} empty documents were left out")
    if len(batches) > 1:
        notes.append(f"packed {_TRL_BATCH} documents at a time, as TRL does")
    return np.concatenate(batches) if batches else lengths


def _first_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Each document into the first pack with room, found in a tree of maxima over the packs' free tokens."""
    leaves = 1 << max(1, len(lengths) - 1).bit_length()
    free = np.full(2 * leaves, -1, dtype=np.int64)
    packs, counts = np.empty_like(lengths), np.zeros_like(lengths)
    work = len(lengths) * leaves.bit_length()
    return compiled.run(_first_fit_loop, work, lengths, pack_tokens, cap, leaves, free, counts, packs)


def _first_fit_loop(lengths, pack_tokens, cap, leaves, free, counts, packs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    used = 0
    for i in range(len(lengths)):
        need = lengths[i]
        if free[1] >= need:
            node = 1
            while node < leaves:
                node *= 2
                if free[node] < need:
                    node += 1
        else:
            node = leaves + used
            free[node] = pack_tokens
            used += 1
        pack = node - leaves
        packs[i] = pack
        counts[pack] += 1
        free[node] = free[node] - need if counts[pack] < cap else -1
        while node > 1:
            node //= 2
            most = max(free[2 * node], free[2 * node + 1])
            if free[node] == most:
                break
            free[node] = most
    return packs


def _next_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Each document into the last pack, or a new one."""
    return compiled.run(_next_fit_loop, len(lengths), lengths, pack_tokens, cap, np.empty_like(lengths))


def _next_fit_loop(lengths, pack_tokens, cap, packs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    pack = count = tokens = 0
    for i in range(len(lengths)):
        if count > 0 and (tokens + lengths[i] > pack_tokens or count >= cap):
            pack += 1
            count = tokens = 0
        packs[i] = pack
        count += 1
        tokens += lengths[i]
    return packs


def _best_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Each document into the fullest pack with room, of several the one that came to this fill first; empty ones
    into none.

    A batch's packs with room are a sorted list of numbers, the free tokens above and the time of the last document
    below, so that one search finds both.
    """
    packs: list[int] = []
    shift = _TRL_BATCH.bit_length()
    used = 0
    for start in range(0, len(lengths), _TRL_BATCH):
        batch = lengths[start : start + _TRL_BATCH].tolist()
        chosen: list[int] = []
        with_room: list[int] = []
        counts: dict[int, int] = {}
        for time, need in enumerate(batch):
            if need == 0:
                chosen.append(-1)
                continue
            at = bisect_left(with_room, need << shift)
            if at < len(with_room):
                found = with_room.pop(at)
                pack, free = chosen[found & ((1 << shift) - 1)], found >> shift
            else:
                pack, free, used = used, pack_tokens, used + 1
            chosen.append(pack)
            counts[pack] = counts.get(pack, 0) + 1
            if free > need and counts[pack] < cap:
                insort(with_room, (free - need) << shift | time)
        packs += chosen
    return np.array(packs, dtype=np.int64)
