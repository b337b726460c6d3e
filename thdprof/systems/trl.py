"""TRL: its packed datasets and packing strategies.

Rows packed by `packing_strategy` bfd and bfd_split have a column `seq_lengths` in parquet or Arrow files. The
strategies are those of TRL 1.16, `data_utils.py`; Hugging Face's Trainer reads the rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.read import arrow
from thdprof.read.dataset import ColumnKind, Dataset, Format, Reading, Shard, check_rows, join_rows
from thdprof.read.parquet import open_columns, schema_of
from thdprof.schedule.packing import DocumentsToPack, cut, map_batches, split_documents
from thdprof.systems.base import Packer
from thdprof.training import TrainingSettings

COLUMN = "seq_lengths"
MAX_LENGTH = 1024
"""TRL's max_length where nobody gives another."""
USUAL_PACKER = "best_fit_decreasing"
"""TRL's default packing_strategy, bfd."""
_BATCH = 1000
"""Number of documents that TRL packs together: one batch of `datasets.Dataset.map`."""


def recognises(path: Path) -> bool:
    """Whether the file has a column `seq_lengths` of lists, and is no cache that `datasets` left beside its data."""
    schema = schema_of(path)
    if schema is None or schema.get_field_index(COLUMN) < 0 or "seq_start_id" in schema.names:
        return False
    return arrow.is_list(schema.field(COLUMN).type)


def _scan(path: Path) -> Shard:
    where = f"{path}: column {COLUMN}"
    with open_columns(path) as file:
        return Shard(check_rows(*arrow.list_integers(file.read_column(COLUMN), where), where))


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    return Dataset.from_content(name, paths, join_rows(shards, "trl"), shards=shards)  # no file tells the pack size


FORMAT = Format(
    name="trl",
    summary="the lists of column seq_lengths",
    suffixes=(".parquet", ".pq", ".arrow"),
    recognises=recognises,
    scan=_scan,
    join=_join,
    size_owner="TRL's max_length",
)


def claim_columns(path: Path, names: set[str], column: str, kind: ColumnKind) -> str | None:
    """TRL's packer for rows of tokens, which nobody else claimed."""
    return USUAL_PACKER if kind == "tokens" else None


# --- its packers ------------------------------------------------------------------------------------------------------


def _prepare_best_fit(
    lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str], *, splits: bool
) -> DocumentsToPack:
    """Among every 1000 documents the longest comes first, and each goes into the fullest row that has room for it.

    Empty ones are left out. Long ones are cut, or become several documents.
    """
    pack_tokens = settings.seq_length
    batches, batch_notes = map_batches(len(lengths), settings.packing_processes, _BATCH)
    if splits:
        if num_long := int((lengths > pack_tokens).sum()):
            notes.append(f"{num_long} documents longer than {pack_tokens} tokens were split")
        lengths, ends = split_documents(lengths, pack_tokens)
        batches = np.append(0, ends)[batches].tolist()
    else:
        lengths = cut(lengths, pack_tokens, 1, notes)
    if empty := int((lengths == 0).sum()):
        notes.append(f"{empty} empty documents were left out")
    notes += batch_notes
    lengths = np.concatenate([np.sort(lengths[low:high])[::-1] for low, high in pairwise(batches)] or [lengths])
    return DocumentsToPack(lengths, partial(_best_fit, batches=batches), pack_tokens)


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


def _prepare_wrapped(lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str]) -> DocumentsToPack:
    """The tokens of every 1000 documents are cut into rows, each of which is one document; the last may be shorter."""
    batches, batch_notes = map_batches(len(lengths), settings.packing_processes, _BATCH)
    totals = np.add.reduceat(lengths, batches[:-1]) if len(lengths) else lengths
    rows = split_documents(totals[totals > 0], settings.seq_length)[0]
    notes += batch_notes if len(rows) else ["none has tokens"]
    return DocumentsToPack(rows, None, settings.seq_length)


def _prepare_rows(lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str]) -> DocumentsToPack:
    """Every document is a row; long ones are cut."""
    return DocumentsToPack(cut(lengths, settings.seq_length, 1, notes), None, settings.seq_length)


_make = partial(Packer, is_trl=True, pads_documents=False)
PACKERS = (
    _make(
        name=USUAL_PACKER,
        prepare=partial(_prepare_best_fit, splits=False),
        loader="trainer",
        usual="TRL's default packing_strategy",
    ),
    _make(name="best_fit_split", prepare=partial(_prepare_best_fit, splits=True), loader="trainer", overlong="split"),
    _make(name="wrapped", prepare=_prepare_wrapped, overlong="split"),
    _make(name="none", prepare=_prepare_rows, row_is_document=True),
)
