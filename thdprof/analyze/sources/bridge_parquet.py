"""Megatron-Bridge's packed parquet: `seq_start_id` and the lengths of the lists `loss_mask`; tokens are never read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thdprof.analyze.sources import bridge_rows
from thdprof.analyze.sources.base import Dataset, Format, fingerprint
from thdprof.analyze.sources.readers import arrow_columns, parquet_lists, row_lists
from thdprof.analyze.sources.readers.parquet_file import ParquetFile, open_parquet, parquet_schema
from thdprof.errors import DataError


def recognises(path: Path) -> bool:
    """Whether the file is parquet with Bridge's three columns."""
    schema = parquet_schema(path)
    return schema is not None and set(bridge_rows.KEYS) <= set(schema.names)


def read(paths: Sequence[Path]) -> Dataset:
    """The rows of `paths`, one file after the other.

    Raises:
        DataError: a column is missing, has another type or nulls, or a row is such that training could not read it.
    """
    parts, digests = [], []
    for path in paths:
        with open_parquet(path) as file:
            parts.append(_read_rows(file))
            digests += [str(path.stat().st_size).encode(), file.footer]
    rows = row_lists.join_rows(parts, "bridge")
    return Dataset(
        format=FORMAT.name,
        uris=tuple(str(path) for path in paths),
        fingerprint=fingerprint(digests),
        content=rows,
        pack_tokens=bridge_rows.pack_size(paths, int(rows.num_tokens().max())),
    )


def _read_rows(file: ParquetFile) -> row_lists.Rows:
    """Document tokens and row offsets of one file."""
    path, names = file.path, file.schema.names
    for name in bridge_rows.KEYS:
        if name not in names:
            raise DataError(f"{path}: column {name} is missing; it has {', '.join(names)}")
    kind = file.schema.field("loss_mask").type
    if not arrow_columns.is_list(kind) or file.leaf("loss_mask") < 0:
        raise DataError(f"{path}: column loss_mask: is {kind}, not lists of numbers")
    where = f"{path}: column seq_start_id"
    starts, offsets = arrow_columns.list_integers(file.read_column("seq_start_id"), where)
    if len(offsets) == 1:
        raise DataError(f"{path}: holds no rows; pack it again with data")
    return bridge_rows.document_tokens(
        starts, offsets, parquet_lists.row_lengths(file, "loss_mask"), str(path)
    ), offsets


FORMAT = Format(
    name="bridge",
    summary="seq_start_id and the list lengths of loss_mask; no token is read",
    sign="parquet with columns input_ids, seq_start_id and loss_mask",
    suffixes=(".parquet", ".pq"),
    recognises=recognises,
    read=read,
)
