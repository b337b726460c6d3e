"""Rows made of documents: what a packer makes, and the steps that packers of several systems share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import PackedRows, RowRule
from thdprof.schedule import compiled
from thdprof.training import TrainingSettings, name_setting

NO_CAP = 2**62
"""Stands for "any number of documents" where a loop wants a whole number."""

Place = Callable[[NDArray[np.int64], int, int], NDArray[np.int64]]
"""A rule of packing: (tokens of the documents in placing order, tokens of a pack, cap on its documents) -> index of the
pack that takes each document, -1 for none, int64, shape [documents]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The rows that a packer made."""

    rows: PackedRows
    efficiency: float
    """Share of the rows' tokens that hold documents, 0 to 1."""
    efficiency_without_cap: float | None = None
    """The efficiency of this packer without a cap on documents; None if there was no cap."""
    notes: tuple[str, ...] = ()
    """Sentences on documents that were cut or left out."""
    num_microbatches: NDArray[np.int32] | None = None
    """Micro-batches of one rank in every step, shape [steps], where rows are in order of step, data-parallel rank and
    micro-batch; None: training orders the rows."""

    def summarize(self) -> dict[str, Any]:
        """What a `Schedule` says of the packing, by its names."""
        return {
            "notes": self.notes,
            "packing_efficiency": self.efficiency,
            "packing_efficiency_without_cap": self.efficiency_without_cap,
        }


@dataclass(frozen=True, slots=True)
class DocumentsToPack:
    """Documents in the order in which a packer places them, and its rule."""

    lengths: NDArray[np.int64]
    """Tokens of the documents, shape [documents]."""
    place: Place | None
    """None: every document is a row of its own, and no cap applies."""
    pack_tokens: int
    """Tokens of a row."""

    def pack(
        self, settings: TrainingSettings, *, rule: RowRule, counts_tail: bool, notes: Sequence[str], verb: str
    ) -> Packing:
        """The rows of at most `max_docs_per_pack` documents, one fewer if the cap counts a dummy tail.

        Args:
            verb: what becomes of the documents, for the message where none is left.

        Raises:
            DataError: no document is left to pack.
            UsageError: the cap leaves no place for a document.
        """
        lengths, pack_tokens = self.lengths, self.pack_tokens
        if self.place is None:
            by_pack, sizes = lengths, np.ones_like(lengths)
        else:
            packs = self.place(lengths, pack_tokens, count_free_places(settings, int(counts_tail)))
            placed = packs >= 0
            by_pack = lengths[placed][np.argsort(packs[placed], kind="stable")]
            sizes = np.bincount(packs[placed])
        if not len(by_pack):
            reason = "; ".join(notes) or "there are none"
            raise DataError(f"no document is left to {verb} rows of {pack_tokens} tokens: {reason}")
        rows = PackedRows.from_sizes(by_pack, sizes, rule)
        tokens, without_cap = float(lengths.sum()), None
        if settings.max_docs_per_pack is not None and self.place is not None:
            without_cap = tokens / ((int(self.place(lengths, pack_tokens, NO_CAP).max()) + 1) * pack_tokens)
        efficiency = tokens / (rows.num_rows() * pack_tokens)
        return Packing(rows=rows, efficiency=efficiency, efficiency_without_cap=without_cap, notes=tuple(notes))


def count_free_places(settings: TrainingSettings, tail_documents: int) -> int:
    """How many documents of the data a row may hold: the cap less the `tail_documents` that training may append.

    Raises:
        UsageError: the cap leaves no place for a document.
    """
    if settings.max_docs_per_pack is None:
        return NO_CAP
    free = settings.max_docs_per_pack - tail_documents
    if free < 1:
        raise UsageError(
            f"{name_setting('max_docs_per_pack', settings.max_docs_per_pack)}: leaves no document beside the one for "
            f"the unused tail; use {tail_documents + 1} or more"
        )
    return free


# --- documents before they are placed ---------------------------------------------------------------------------------


def pad(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Lengths in tokens, each rounded up to a multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def cut(lengths: NDArray[np.int64], pack_tokens: int, multiple: int, notes: list[str]) -> NDArray[np.int64]:
    """Pad lengths to a multiple of `multiple`, and cut them to the largest multiple that a pack holds.

    Adds a sentence to `notes` if documents were cut.

    Raises:
        UsageError: `multiple` is more than `pack_tokens`.
    """
    longest = pack_tokens // multiple * multiple
    if longest == 0:
        raise UsageError(f"--pad-seq-to-mult {multiple}: is more than --seq-length {pack_tokens}")
    num_long = int((lengths > longest).sum())
    if num_long:
        notes.append(f"{num_long} documents longer than {longest} tokens were cut to that")
    return np.minimum(pad(lengths, multiple), longest)


def leave_out(lengths: NDArray[np.int64], least: int, most: int, notes: list[str]) -> NDArray[np.int64]:
    """Lengths from `least` to `most` tokens alone; adds a sentence to `notes` if others were left out."""
    kept = (lengths >= least) & (lengths <= most)
    if left_out := int((~kept).sum()):
        notes.append(f"{left_out} documents of fewer than {least} or more than {most} tokens were left out")
    return lengths[kept]


def split_documents(lengths: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into parts of `longest` tokens and a rest; also where each document's parts end.

    An empty document is an empty part.
    """
    pieces = np.maximum(1, -(-lengths // longest))
    ends = np.cumsum(pieces)
    parts = np.full(int(pieces.sum()), longest, dtype=np.int64)
    parts[ends - 1] = lengths - (pieces - 1) * longest
    return parts, ends


def map_batches(num_documents: int, processes: int, together: int) -> tuple[list[int], list[str]]:
    """Where batches of `together` documents that are packed alone begin, with the end of the last; a note on several.

    `datasets.Dataset.map` gives each of its processes a contiguous part, and cuts it into batches.
    """
    parts = min(processes, max(num_documents, 1))
    share, more = divmod(num_documents, parts)
    starts = [number * share + min(number, more) for number in range(parts + 1)]
    batches = [at for low, high in pairwise(starts) for at in range(low, high, together)]
    each = "" if processes == 1 else f" in each of {parts} processes"
    notes = [f"packed {together} documents at a time{each}, as TRL does"] if len(batches) > 1 else []
    return [*batches, num_documents], notes


# --- rules of several systems -----------------------------------------------------------------------------------------


def first_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Place each document into the first pack with room: a `Place`."""
    work = len(lengths) * max(1, len(lengths) - 1).bit_length()
    return compiled.run(_first_fit_loop, work, lengths, pack_tokens, cap)


def _first_fit_loop(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Place each document into the first pack with room, found by a tree of maxima over the packs' free tokens."""
    leaves = 2
    while leaves < len(lengths):
        leaves *= 2
    free = np.full(2 * leaves, -1, dtype=np.int64)
    packs, counts = np.empty_like(lengths), np.zeros_like(lengths)
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


def next_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Place each document into the last pack or, without room there, into a new one: a `Place`."""
    return compiled.run(_next_fit_loop, len(lengths), lengths, pack_tokens, cap)


def _next_fit_loop(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    packs = np.empty_like(lengths)
    pack = count = tokens = 0
    for i in range(len(lengths)):
        if count > 0 and (tokens + lengths[i] > pack_tokens or count >= cap):
            pack += 1
            count = tokens = 0
        packs[i] = pack
        count += 1
        tokens += lengths[i]
    return packs


def place_in_parts(place: Place, bounds: Sequence[int]) -> Place:
    """The rule `place` for each part of the documents alone; `bounds` are the parts' beginnings, and the last's end."""

    def place_parts(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
        packs, used = [np.empty(0, dtype=np.int64)], 0
        for low, high in pairwise(bounds):
            if low < high:
                packs.append(place(lengths[low:high], pack_tokens, cap) + used)
                used = int(packs[-1].max()) + 1
        return np.concatenate(packs)

    return place_parts


def keep_packs(packs: Sequence[Sequence[int]], pack_tokens: int) -> DocumentsToPack:
    """Documents that are in `packs` already, pack by pack."""
    lengths = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
    numbers = np.repeat(np.arange(len(packs)), np.fromiter(map(len, packs), dtype=np.int64, count=len(packs)))
    return DocumentsToPack(lengths, lambda lengths, pack_tokens, cap: numbers, pack_tokens)
