"""LLaMA-Factory: tokenised data with `neat_packing`, and its packer.

Packed rows have `sequence_boundaries` in column `packing_params` of Arrow files. A row's last interval is its padding,
which attention leaves out. Tokenised data have `images`, `videos` and `audios` beside `input_ids` and `labels`, even
for text alone, which TRL's never have; those that it packed have `position_ids` too.

Rules: LLaMA-Factory 0.9.5, `data/processor/`, `data/processor/supervised.py`, `model/model_utils/packing.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read import arrow
from thdprof.read.arrow import ArrowFile, is_arrow
from thdprof.read.dataset import ColumnKind, Dataset, Format, Reading, Shard, check_rows, join_rows
from thdprof.read.json_lines import PACKED
from thdprof.read.parquet import schema_of
from thdprof.schedule.packing import DocumentsToPack, cut, keep_packs, map_batches
from thdprof.systems.base import Packer
from thdprof.training import TrainingSettings

COLUMN, BOUNDARIES = "packing_params", "sequence_boundaries"
_MOST = 2**31
"""Tokens that a row has fewer than."""
_BESIDE_TOKENS = {"attention_mask", "labels", "images", "videos"}
"""Columns beside the tokens of its data; `audios` are newer."""
_BATCH = 1000
"""Documents that are packed together by default, its preprocessing_batch_size."""


def recognises(path: Path) -> bool:
    """Whether the file has a column `packing_params` with lists `sequence_boundaries`."""
    import pyarrow.types as types

    schema = schema_of(path) if is_arrow(path) else None
    if schema is None or schema.get_field_index(COLUMN) < 0:
        return False
    kind = schema.field(COLUMN).type
    return (
        types.is_struct(kind) and kind.get_field_index(BOUNDARIES) >= 0 and arrow.is_list(kind.field(BOUNDARIES).type)
    )


def _scan(path: Path) -> Shard:
    """The rows of a file without their padding, and their tokens with it, if all have as many."""
    boundaries, offsets = _read_boundaries(path)
    inside = np.ones(len(boundaries) - 1, dtype=np.bool_)
    inside[offsets[1:-1] - 1] = False  # from a row to the next
    inside[offsets[1:] - 2] = False  # the padding
    rows = check_rows(np.diff(boundaries)[inside], offsets - 2 * np.arange(len(offsets)), str(path))
    sizes = {*boundaries[offsets[1:] - 1].tolist()}
    return Shard(rows, {"pack_tokens": sizes.pop() if len(sizes) == 1 else None})


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    sizes = {shard.facts["pack_tokens"] for shard in shards}
    size = sizes.pop() if len(sizes) == 1 else None
    return Dataset.from_content(name, paths, join_rows(shards, "trl"), shards=shards, pack_tokens=size)


def _read_boundaries(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where intervals begin and end in every row, shape [boundaries], and row offsets, shape [rows + 1]."""
    import pyarrow as pa

    where = f"{path}: column {COLUMN}"
    if not recognises(path):
        raise DataError(f"{where}: is missing, or has no lists {BOUNDARIES}, which neat_packing writes")
    params = ArrowFile(path).read_column(COLUMN)
    if params.null_count:
        raise DataError(f"{where}: has nulls; pack all rows with neat_packing")
    lists = pa.chunked_array([c.field(BOUNDARIES) for c in params.chunks], params.type.field(BOUNDARIES).type)
    boundaries, offsets = arrow.list_integers(lists, where)
    counts = np.diff(offsets)
    if len(counts) == 0:
        raise DataError(f"{where}: holds no rows; write it again with data")
    wrong = counts < 3
    if not wrong.any():
        last = offsets[1:] - 1
        descends = np.append(np.diff(boundaries) < 0, False)
        descends[last] = False
        wrong = (boundaries[offsets[:-1]] != 0) | (boundaries[last] >= _MOST)
        wrong |= np.logical_or.reduceat(descends, offsets[:-1])
    if wrong.any():
        row = int(wrong.argmax())
        values = boundaries[offsets[row] : offsets[row + 1]][:4].tolist()
        raise DataError(f"{where}: row {row}: {BOUNDARIES} {values} do not ascend from 0 to the padding and its end")
    return boundaries, offsets


FORMAT = Format(
    name="llamafactory",
    summary="the lists sequence_boundaries of column packing_params",
    suffixes=(".arrow",),
    recognises=recognises,
    scan=_scan,
    join=_join,
    loader="trainer",
    size_owner="LLaMA-Factory's cutoff_len",
)


def claim_columns(path: Path, names: set[str], column: str, kind: ColumnKind) -> str | None:
    """LLaMA-Factory's packer for its tokenised data.

    Raises:
        DataError: the rows are packed, and no column has the lengths of their documents.
    """
    if kind != "tokens" or not names >= _BESIDE_TOKENS:
        return None
    if "position_ids" in names:
        raise DataError(
            f"{path}: LLaMA-Factory packed these rows, and no column {' or '.join(PACKED[2:])} tells their "
            "documents: tokenise with neat_packing of LLaMA-Factory 0.9.5 or later, or without packing"
        )
    return PACKERS[0].name


# --- its packers ------------------------------------------------------------------------------------------------------


def _prepare(lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str]) -> DocumentsToPack:
    """Of every `packing_batch` documents each row takes the longest that fits, until none does.

    A row keeps a token of padding, and long documents are cut to the others.
    """
    batches, _ = map_batches(len(lengths), settings.packing_processes, settings.packing_batch or _BATCH)
    room = settings.seq_length - 1
    return keep_packs(_greedy_knapsack(cut(lengths, room, 1, notes), room, batches), settings.seq_length)


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


PACKERS = (
    Packer(
        name="greedy_knapsack",
        prepare=_prepare,
        loader="trainer",
        usual="LLaMA-Factory's neat_packing",
        limit=None,
        reads=("tail_policy", "pad_seq_to_mult", "packing_batch"),
        pads_documents=False,
    ),
)
