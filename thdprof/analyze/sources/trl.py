"""TRL's packed datasets (`packing_strategy` bfd and bfd_split): column `seq_lengths` of parquet or Arrow files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thdprof.analyze.sources import base
from thdprof.analyze.sources.base import Dataset, Format, Reading, Shard
from thdprof.analyze.sources.readers import arrow
from thdprof.analyze.sources.readers.parquet import open_columns, schema_of

COLUMN = "seq_lengths"


def recognises(path: Path) -> bool:
    """Whether the file has a column `seq_lengths` of lists, and is no cache that `datasets` left beside its data."""
    schema = schema_of(path)
    if schema is None or schema.get_field_index(COLUMN) < 0 or "seq_start_id" in schema.names:
        return False
    return arrow.is_list(schema.field(COLUMN).type)


def _scan(path: Path) -> Shard:
    where = f"{path}: column {COLUMN}"
    with open_columns(path) as file:
        return Shard(base.check_rows(*arrow.list_integers(file.read_column(COLUMN), where), where))


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    return Dataset.from_content(
        name, paths, base.join_rows(shards, "trl"), shards=shards
    )  # no file tells the pack size


FORMAT = Format(
    name="trl",
    summary="the lists of column seq_lengths",
    suffixes=(".parquet", ".pq", ".arrow"),
    recognises=recognises,
    scan=_scan,
    join=_join,
)
