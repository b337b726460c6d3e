"""Packers that make rows of documents: before training starts, as Megatron-Bridge and TRL do, or for each global batch.

Rules of other trainers: LLaMA-Factory 0.9.5, `data/processor/supervised.py`; ms-swift 4.6, `dataset/packing.py`, with
binpacking 2.0.1; Axolotl 0.19, `utils/samplers/multipack.py` and `core/trainers/base.py`.
Rules of `--packer dp_balanced`: `DpBalancedScheduler` in Megatron-LM's dev branch,
`megatron/core/datasets/data_schedule.py`, as of commit d48bd6be (2026-08-21).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappush, heapreplace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, samplers
from thdprof.analyze.sources.base import PackedRows, RowRule
from thdprof.errors import DataError, UsageError
from thdprof.training import AXOLOTL_PACKERS, TrainingSettings, name_setting

NO_CAP = 2**62
"""Stands for "any number of documents" where a loop wants a whole number."""
_TRL_BATCH = 1000
"""Number of documents that TRL packs together: one batch of `datasets.Dataset.map`."""
_SWIFT_BATCH = 1000
"""Number of documents that ms-swift packs together, with those of the last pack before."""
_AXOLOTL_GROUP = 100_000
"""Number of documents that Axolotl packs together by default, its sample_packing_group_size."""
_AXOLOTL_LEAST = 2
"""Fewest tokens of a document that Axolotl keeps."""

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


def pack_rows(
    document_tokens: NDArray[np.int32], settings: TrainingSettings, trained_from: NDArray[np.int32] | None = None
) -> Packing:
    """Pack documents into rows of `seq_length` tokens with `settings.packer`, before training starts.

    - `first_fit_decreasing`, `first_fit_shuffle` (Megatron-Bridge, rule "bridge"): each document goes into the first
      row that has room for it, the longest document first, or in an order shuffled with `seed`. Documents longer than
      a row are left out. With `pad_seq_to_mult` over 1 documents are padded to that multiple and long ones are cut, as
      Bridge prepares data for context parallelism.
    - `next_fit`: each document goes into the last row or, without room there, into a new one, in file order. Documents
      are padded to `pad_seq_to_mult`, and long ones are cut.
    - `best_fit_decreasing` (TRL's "bfd"): among every 1000 documents the longest comes first, and each goes into the
      fullest row that has room for it. Long documents are cut, empty ones left out. TRL pads micro-batches, so
      `pad_seq_to_mult` has no effect on its documents.
    - `best_fit_split` (TRL's "bfd_split"): the same, but long documents become several of them.
    - `wrapped` (TRL's): the tokens of every 1000 documents are cut into rows, each of which is one document. The last
      row of the 1000 may be shorter. There is no cap on its documents.
    - `greedy_knapsack` (LLaMA-Factory's neat_packing): of every `packing_batch` documents each row takes the longest
      that fits, until none does. A row keeps a token of padding, and long documents are cut to the others.
    - `binpack` (ms-swift): of every 1000 documents, and those of the last row before, the longest comes first, and
      each goes into the emptiest row, or a new one if it does not fit there. Long documents are left out.
    - `swift_sequential` (ms-swift's "sequential"): as `next_fit`. Long documents are left out.
    - `multipack` (Axolotl): of every `packing_batch` documents each goes into the first row that has room for it and
      for another document. A row is a micro-batch, of `micro_batch_size` times as many tokens. Documents that are
      longer than `seq_length`, or have one token, are left out.
    - `multipack_sequential` (Axolotl's sample_packing_sequentially): as `multipack`, but by `next_fit`.
    - `none` (TRL without packing): every document is a row. Long ones are cut; those of which no token is trained are
      left out.

    A row holds at most `max_docs_per_pack` documents, with the one that training may append for its unused tail. The
    packers of TRL, LLaMA-Factory and ms-swift work on neighbouring parts of the documents in `packing_processes`.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents].
        settings: the run.
        trained_from: fewest tokens of each document that train one, as in `UnpackedDocuments`; None: one.

    Raises:
        DataError: no document is left to pack.
        UsageError: the packer is unknown, or the cap leaves no place for a document.
    """
    lengths, packer, pack_tokens = document_tokens.astype(np.int64), settings.packer, settings.seq_length
    notes: list[str] = []
    place: Place = first_fit
    rule: RowRule = "bridge" if packer.startswith("first_fit") else "concatenate" if packer == "next_fit" else "trl"
    together = (packer == "greedy_knapsack" and settings.packing_batch) or _TRL_BATCH
    batches, note_on_batches = _map_batches(len(lengths), settings.packing_processes, together)
    match packer:
        case "first_fit_decreasing" | "first_fit_shuffle":
            lengths = np.sort(_fit_bridge(lengths, pack_tokens, settings.pad_seq_to_mult, notes))
            if packer == "first_fit_shuffle":
                np.random.RandomState(settings.seed).shuffle(lengths)
            else:
                lengths = lengths[::-1].copy()
        case "next_fit":
            place = _next_fit
            lengths = cut(lengths, pack_tokens, settings.pad_seq_to_mult, notes)
        case "best_fit_decreasing" | "best_fit_split":
            if packer == "best_fit_decreasing":
                lengths = cut(lengths, pack_tokens, 1, notes)
            else:
                if num_long := int((lengths > pack_tokens).sum()):
                    notes.append(f"{num_long} documents longer than {pack_tokens} tokens were split")
                lengths, ends = split_documents(lengths, pack_tokens)
                batches = np.append(0, ends)[batches].tolist()
            if empty := int((lengths == 0).sum()):
                notes.append(f"{empty} empty documents were left out")
            notes += note_on_batches
            lengths = np.concatenate([np.sort(lengths[low:high])[::-1] for low, high in pairwise(batches)] or [lengths])
            place = partial(_best_fit, batches=batches)
        case "greedy_knapsack":
            packs_of = _greedy_knapsack(cut(lengths, pack_tokens - 1, 1, notes), pack_tokens - 1, batches)
            lengths, place = _place_as(packs_of)
        case "binpack" | "swift_sequential":
            lengths = _leave_out(lengths, 1, pack_tokens, notes)
            parts = _swift_parts(len(lengths), settings.packing_processes)
            place = _in_parts(_next_fit, parts)
            if packer == "binpack":
                lengths, place = _place_as(_binpack(lengths, pack_tokens, parts))
        case "multipack" | "multipack_sequential":
            lengths = _leave_out(lengths, _AXOLOTL_LEAST, pack_tokens, notes)
            pack_tokens *= settings.micro_batch_size
            groups = [*range(0, len(lengths), settings.packing_batch or _AXOLOTL_GROUP), len(lengths)]
            place = _next_fit if packer == "multipack_sequential" else _in_parts(first_fit, groups)
        case "none":
            kept = (lengths > 0) if trained_from is None else trained_from <= pack_tokens
            if left_out := int((~kept).sum()):
                notes.append(f"{left_out} documents of which no token is trained were left out")
            lengths = cut(lengths[kept], pack_tokens, 1, notes)
        case "wrapped":
            lengths = _wrap(lengths, pack_tokens, batches)
            notes += note_on_batches if len(lengths) else ["none has tokens"]
        case _:
            raise UsageError(f"--packer {packer}: does not make rows before training starts")
    adds_tail = packer.startswith("first_fit") or settings.tail_policy == "append_dummy_seq"
    adds_tail = adds_tail and packer not in AXOLOTL_PACKERS
    are_alone = packer in ("none", "wrapped")
    if are_alone:
        by_pack, sizes = lengths, np.ones_like(lengths)
    else:
        packs = place(lengths, pack_tokens, _cap(settings, int(adds_tail)))
        placed = packs >= 0
        by_pack = lengths[placed][np.argsort(packs[placed], kind="stable")]
        sizes = np.bincount(packs[placed])
    if not len(by_pack):
        reason, do = "; ".join(notes) or "there are none", "train in" if packer == "none" else "pack into"
        raise DataError(f"no document is left to {do} rows of {pack_tokens} tokens: {reason}")
    rows = PackedRows.from_sizes(by_pack, sizes, rule)
    tokens, without_cap = float(lengths.sum()), None
    if settings.max_docs_per_pack is not None and not are_alone:
        without_cap = tokens / ((int(place(lengths, pack_tokens, NO_CAP).max()) + 1) * pack_tokens)
    efficiency = tokens / (rows.num_rows() * pack_tokens)
    return Packing(rows=rows, efficiency=efficiency, efficiency_without_cap=without_cap, notes=tuple(notes))


def _cap(settings: TrainingSettings, tail_documents: int) -> int:
    """How many documents of the data a row may hold: the cap less the `tail_documents` that training may append."""
    if settings.max_docs_per_pack is None:
        return NO_CAP
    free = settings.max_docs_per_pack - tail_documents
    if free < 1:
        raise UsageError(
            f"{name_setting('max_docs_per_pack', settings.max_docs_per_pack)}: leaves no document beside the one for "
            f"the unused tail; use {tail_documents + 1} or more"
        )
    return free


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


def _fit_bridge(lengths: NDArray[np.int64], pack_tokens: int, multiple: int, notes: list[str]) -> NDArray[np.int64]:
    """Prepare documents as Megatron-Bridge does: tokenize_dataset pads and cuts them, create_hist drops long ones."""
    if multiple > 1:
        return cut(lengths, pack_tokens, multiple, notes)
    fits = lengths <= pack_tokens
    if not fits.all():
        notes.append(f"{int((~fits).sum())} documents longer than the pack of {pack_tokens} tokens were left out")
    return lengths[fits]


def _map_batches(num_documents: int, processes: int, together: int) -> tuple[list[int], list[str]]:
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


def split_documents(lengths: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into parts of `longest` tokens and a rest; also where each document's parts end.

    An empty document is an empty part.
    """
    pieces = np.maximum(1, -(-lengths // longest))
    ends = np.cumsum(pieces)
    parts = np.full(int(pieces.sum()), longest, dtype=np.int64)
    parts[ends - 1] = lengths - (pieces - 1) * longest
    return parts, ends


def _wrap(lengths: NDArray[np.int64], pack_tokens: int, batches: Sequence[int]) -> NDArray[np.int64]:
    """Tokens of the rows that each batch is cut into, whatever its documents are; the last row of a batch is short."""
    totals = np.add.reduceat(lengths, batches[:-1]) if len(lengths) else lengths
    return split_documents(totals[totals > 0], pack_tokens)[0]


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


def _next_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    return compiled.run(_next_fit_loop, len(lengths), lengths, pack_tokens, cap)


def _next_fit_loop(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
    """Place each document into the last pack or, without room there, into a new one."""
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


def _best_fit(lengths: NDArray[np.int64], pack_tokens: int, cap: int, *, batches: Sequence[int]) -> NDArray[np.int64]:
    """Place each document into the fullest pack with room; of equally full packs, the one filled so far first wins.

    Empty documents get no pack. The packs of a batch that have room are a sorted list of numbers. The upper bits are
    a pack's free tokens, the lower bits the position of its last document, so that one search finds both.

    Args:
        lengths: tokens of the documents in placing order, int64, shape [documents].
        batches: where the batches that are packed for themselves begin, and the end of the last.
    """
    packs: list[int] = []
    shift = max((high - low for low, high in pairwise(batches)), default=1).bit_length()
    used = 0
    for low, high in pairwise(batches):
        batch = lengths[low:high].tolist()
        chosen: list[int] = []
        with_room: list[int] = []
        counts: dict[int, int] = {}
        for time, need in enumerate(batch):
            if need == 0:
                chosen.append(-1)
                continue
            at = bisect_left(with_room, need << shift)
            if at < len(with_room):
                fill = with_room.pop(at)
                pack, free = chosen[fill & ((1 << shift) - 1)], fill >> shift
            else:
                pack, free, used = used, pack_tokens, used + 1
            chosen.append(pack)
            counts[pack] = counts.get(pack, 0) + 1
            if free > need and counts[pack] < cap:
                insort(with_room, (free - need) << shift | time)
        packs += chosen
    return np.array(packs, dtype=np.int64)


def _leave_out(lengths: NDArray[np.int64], least: int, most: int, notes: list[str]) -> NDArray[np.int64]:
    """Lengths from `least` to `most` tokens alone; adds a sentence to `notes` if others were left out."""
    kept = (lengths >= least) & (lengths <= most)
    if left_out := int((~kept).sum()):
        notes.append(f"{left_out} documents of fewer than {least} or more than {most} tokens were left out")
    return lengths[kept]


def _in_parts(place: Place, bounds: Sequence[int]) -> Place:
    """The rule `place` for each part of the documents alone; `bounds` are the parts' beginnings, and the last's end."""

    def place_parts(lengths: NDArray[np.int64], pack_tokens: int, cap: int) -> NDArray[np.int64]:
        packs, used = [np.empty(0, dtype=np.int64)], 0
        for low, high in pairwise(bounds):
            if low < high:
                packs.append(place(lengths[low:high], pack_tokens, cap) + used)
                used = int(packs[-1].max()) + 1
        return np.concatenate(packs)

    return place_parts


def _place_as(packs: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], Place]:
    """The lengths in `packs`, pack by pack, and the rule that places them so."""
    lengths = np.fromiter(chain.from_iterable(packs), dtype=np.int64)
    numbers = np.repeat(np.arange(len(packs)), np.fromiter(map(len, packs), dtype=np.int64, count=len(packs)))
    return lengths, lambda lengths, pack_tokens, cap: numbers


def _greedy_knapsack(lengths: NDArray[np.int64], pack_tokens: int, batches: Sequence[int]) -> list[list[int]]:
    """Packs of the documents of every batch: each takes the longest that fits, until none does; none is empty."""
    packs = []
    for low, high in pairwise(batches):
        left = sorted(n for n in lengths[low:high].tolist() if n)
        while left:
            packs.append([left.pop()])
            room = pack_tokens - packs[-1][0]
            while at := bisect_right(left, room):
                packs[-1].append(left.pop(at - 1))
                room -= packs[-1][-1]
    return packs


def _swift_parts(num_documents: int, processes: int) -> list[int]:
    """Where the parts of the documents begin that ms-swift's processes pack, with the end of the last."""
    parts = max(1, min(processes, -(-num_documents // _SWIFT_BATCH)))
    return np.linspace(0, num_documents, parts + 1, dtype=np.int64).tolist()


def _binpack(lengths: NDArray[np.int64], pack_tokens: int, parts: Sequence[int]) -> list[list[int]]:
    """Packs of every part by worst fit, the longest document first; the last pack of a batch is packed again."""
    packs: list[list[int]] = []
    for low, high in pairwise(parts):
        last: list[int] = []
        for start in range(low, high, _SWIFT_BATCH):
            batch = sorted(last + lengths[start : min(start + _SWIFT_BATCH, high)].tolist(), reverse=True)
            opened: list[list[int]] = []
            loads: list[tuple[int, int]] = []
            for length in batch:
                if loads and loads[0][0] + length <= pack_tokens:
                    load, pack = loads[0]
                    opened[pack].append(length)
                    heapreplace(loads, (load + length, pack))
                else:
                    heappush(loads, (length, len(opened)))
                    opened.append([length])
            last = opened.pop() if start + _SWIFT_BATCH < high else []
            packs += opened
    return packs


def dp_balanced(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Packing:
    """Pack every global batch of documents by next-fit, then even out the number of packs over the ranks.

    A global batch is packed in the order in which the ranks gather it (`samplers.gather_documents`). A pack holds at
    most `seq_length` tokens (Megatron's max_seqlen_per_dp_cp_rank x context-parallel size) and `max_docs_per_pack`
    documents, one fewer if training may append a dummy document. Until the number of packs is a multiple of
    data-parallel size x micro-batch group, the last pack that holds several documents gives its last one to a new pack
    at the end. Documents are first cut to `seq_length` and padded to a multiple of `pad_seq_to_mult`.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents]. They repeat over epochs.

    Raises:
        DataError: the documents do not fill one step, or a step has too few documents to make that multiple.
        UsageError: the cap leaves no place for a document, or `seq_length` is no multiple of `pad_seq_to_mult`.
    """
    capacity, ranks, size = settings.seq_length, settings.data_parallel_size, settings.global_batch_size
    if capacity % settings.pad_seq_to_mult:
        raise UsageError(f"--seq-length {capacity}: must be a multiple of --pad-seq-to-mult {settings.pad_seq_to_mult}")
    cap = _cap(settings, int(settings.tail_policy == "append_dummy_seq"))
    multiple = ranks * settings.microbatch_group
    lengths = pad(np.minimum(document_tokens.astype(np.int64), capacity), settings.pad_seq_to_mult)
    by_step = samplers.gather_documents(lengths, settings)
    dealt, row_sizes, microbatches, failed = compiled.run(
        _deal, by_step.size * 4, by_step, capacity, cap, ranks, multiple
    )
    if failed >= 0:
        raise DataError(
            f"step {failed}: its {size} documents cannot be spread over a multiple of {multiple} packs, and "
            f"Megatron stops on it; give a --global-batch-size of at least {multiple}, and more documents than packs"
        )
    rows, efficiency = PackedRows.from_sizes(dealt, row_sizes), float(dealt.sum()) / (len(row_sizes) * capacity)
    return Packing(rows=rows, efficiency=efficiency, num_microbatches=microbatches.astype(np.int32))


def _deal(
    by_step: NDArray[np.int64], capacity: int, cap: int, ranks: int, multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Pack the documents of every step [steps, documents], and deal the packs to the ranks.

    Returns the tokens of the documents, pack by pack; the documents of every pack; the micro-batches of one rank in
    every step; and the first step that cannot be dealt, or -1.
    """
    steps, size = by_step.shape
    dealt, row_sizes = np.empty(by_step.size, dtype=np.int64), np.empty(by_step.size, dtype=np.int64)
    microbatches = np.empty(steps, dtype=np.int64)
    starts, sizes = np.empty(size + multiple, dtype=np.int64), np.empty(size + multiple, dtype=np.int64)
    num_rows = num_dealt = 0
    for step in range(steps):
        lengths = by_step[step]
        packs = tokens = 0
        for i in range(size):
            if i > 0 and tokens + lengths[i] <= capacity and sizes[packs - 1] < cap:
                sizes[packs - 1] += 1
                tokens += lengths[i]
            else:
                starts[packs] = i
                sizes[packs] = 1
                packs += 1
                tokens = lengths[i]
        giver = packs - 1
        while packs % multiple != 0:
            while giver >= 0 and sizes[giver] == 1:
                giver -= 1
            if giver < 0:
                return dealt, row_sizes[:num_rows], microbatches, step
            sizes[giver] -= 1
            starts[packs] = starts[giver] + sizes[giver]
            sizes[packs] = 1
            packs += 1
        microbatches[step] = packs // ranks
        for rank in range(ranks):
            for pack in range(rank, packs, ranks):
                row_sizes[num_rows] = sizes[pack]
                num_rows += 1
                for i in range(starts[pack], starts[pack] + sizes[pack]):
                    dealt[num_dealt] = lengths[i]
                    num_dealt += 1
    return dealt, row_sizes[:num_rows], microbatches, -1
