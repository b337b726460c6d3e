"""Megatron-Bridge packed parquet: `seq_start_id`, and of `loss_mask` the list lengths; tokens are never read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import arrow_columns, bridge_rows, parquet_pages, row_lists
from thdprof.analyze.sources.base import Dataset, Format, fingerprint
from thdprof.errors import DataError


def recognises(path: Path) -> bool:
    """Whether the file is parquet with Bridge's three columns."""
    schema = arrow_columns.parquet_schema(path)
    return schema is not None and set(bridge_rows.KEYS) <= set(schema.names)


def read(paths: Sequence[Path]) -> Dataset:
    """The rows of `paths`, one file after the other.

    Raises:
        DataError: a column is missing, of another type, has nulls, or a row that training could not read.
    """
    parts, digests = [], []
    for path in paths:
        with arrow_columns.open_parquet(path) as file:
            parts.append(_read_rows(path, file))
        digests += [str(path.stat().st_size).encode(), _footer(path)]
    rows = row_lists.join_rows(parts, "bridge")
    return Dataset(
        format=FORMAT.name,
        uris=tuple(str(path) for path in paths),
        fingerprint=fingerprint(digests),
        content=rows,
        pack_tokens=bridge_rows.pack_size(paths, int(rows.num_tokens().max())),
    )


def _read_rows(path: Path, file: Any) -> row_lists.Rows:
    """Document tokens and row offsets of one file."""
    schema = file.schema_arrow
    for name in bridge_rows.KEYS:
        if name not in schema.names:
            raise DataError(f"{path}: column {name} is missing; it has {', '.join(schema.names)}")
    kind = schema.field("loss_mask").type
    if not arrow_columns.is_list(kind) or arrow_columns.leaf_of(file, "loss_mask") < 0:
        raise DataError(f"{path}: column loss_mask: is {kind}, not lists of numbers")
    column = arrow_columns.read_parquet_column(path, file, "seq_start_id")
    starts, offsets = arrow_columns.list_integers(column, f"{path}: column seq_start_id")
    if len(offsets) == 1:
        raise DataError(f"{path}: holds no rows; pack it again with data")
    lengths = _row_lengths(path, file)
    if len(lengths) != len(offsets) - 1:
        raise DataError(f"{path}: corrupt: {len(offsets) - 1} rows of seq_start_id, {len(lengths)} of loss_mask")
    return bridge_rows.document_tokens(starts, offsets, lengths, str(path)), offsets


def _row_lengths(path: Path, file: Any) -> NDArray[np.int64]:
    """Tokens of every row, int64, shape [rows]: the lengths of the lists of `loss_mask`."""
    leaf = arrow_columns.leaf_of(file, "loss_mask")
    column = file.schema.column(leaf)
    lengths, row = [], 0
    for group, chunk, data in arrow_columns.column_chunks(path, file, leaf):
        rows = file.metadata.row_group(group).num_rows
        try:
            if column.max_repetition_level != 1:
                raise parquet_pages.UnsupportedPage("nested lists")
            found = parquet_pages.list_lengths(
                data, codec=chunk.compression, max_definition=column.max_definition_level, rows=rows
            )
        except parquet_pages.CorruptPage as error:
            raise DataError(f"{path}: corrupt: row group {group}, column loss_mask: {error}") from error
        except parquet_pages.UnsupportedPage:
            found = _decoded_lengths(path, file, group, row)
        lengths.append(found)
        row += rows
    return np.concatenate(lengths)


def _decoded_lengths(path: Path, file: Any, group: int, row: int) -> NDArray[np.int64]:
    """The same of one row group by decoding the column, for whatever parquet allows; `row` is its first row."""
    arrow_columns.check_column(path, file, arrow_columns.leaf_of(file, "loss_mask"))
    with arrow_columns.arrow_errors(path):
        lists = file.read_row_group(group, columns=["loss_mask"]).column(0)
    where = f"{path}: column loss_mask"
    lengths = []
    for chunk in lists.chunks:
        lengths.append(arrow_columns.list_lengths(chunk, where, row))
        row += len(chunk)
    return np.concatenate(lengths)


def _footer(path: Path) -> bytes:
    """The parquet footer: sizes, offsets and statistics of every chunk."""
    with path.open("rb") as raw:
        raw.seek(-8, 2)
        size = int.from_bytes(raw.read(4), "little")
        raw.seek(-8 - size, 2)
        return raw.read(size)


FORMAT = Format(
    name="bridge",
    summary="seq_start_id and the list lengths of loss_mask; no token is read",
    suffixes=(".parquet", ".pq"),
    recognises=recognises,
    read=read,
)
