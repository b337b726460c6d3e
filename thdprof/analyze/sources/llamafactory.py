"""LLaMA-Factory's tokenised data with `neat_packing`: `sequence_boundaries` in column `packing_params` of Arrow files.

Rules: LLaMA-Factory 0.9.5, `data/processor/supervised.py`, `model/model_utils/packing.py`. A row's last interval is its
padding, which attention leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import base
from thdprof.analyze.sources.base import Dataset, Format, Reading, Shard
from thdprof.analyze.sources.readers import arrow
from thdprof.analyze.sources.readers.arrow import ArrowFile, is_arrow
from thdprof.analyze.sources.readers.parquet import schema_of
from thdprof.errors import DataError

COLUMN, BOUNDARIES = "packing_params", "sequence_boundaries"
_MOST = 2**31
"""Tokens that a row has fewer than."""


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
    rows = base.check_rows(np.diff(boundaries)[inside], offsets - 2 * np.arange(len(offsets)), str(path))
    sizes = {*boundaries[offsets[1:] - 1].tolist()}
    return Shard(rows, {"pack_tokens": sizes.pop() if len(sizes) == 1 else None})


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    sizes = {shard.facts["pack_tokens"] for shard in shards}
    size = sizes.pop() if len(sizes) == 1 else None
    return Dataset.from_content(name, paths, base.join_rows(shards, "trl"), shards=shards, pack_tokens=size)


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
)
