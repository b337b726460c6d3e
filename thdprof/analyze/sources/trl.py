"""TRL's packed datasets (`packing_strategy` bfd and bfd_split): column `seq_lengths` of parquet or Arrow files.

Arrow files are IPC files and IPC streams; Hugging Face `datasets` writes streams (`save_to_disk`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.analyze.sources.base import Dataset, Format, fingerprint
from thdprof.analyze.sources.readers import arrow_columns, row_lists
from thdprof.analyze.sources.readers.parquet_file import is_parquet, open_parquet, parquet_schema
from thdprof.errors import DataError

COLUMN = "seq_lengths"
_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"


def recognises(path: Path) -> bool:
    """Whether the file has a column `seq_lengths` of lists; not one that `datasets` cached beside its data."""
    if is_parquet(path):
        schema = parquet_schema(path)
    else:
        schema = _arrow_schema(path) if _is_arrow(path) and _belongs(path) else None
    if schema is None or schema.get_field_index(COLUMN) < 0 or "seq_start_id" in schema.names:
        return False
    return arrow_columns.is_list(schema.field(COLUMN).type)


def read(paths: Sequence[Path]) -> Dataset:
    """The rows of `paths`, one file after the other; the pack size is that of the fullest row.

    Raises:
        DataError: the column is missing or of another type, a null, an empty row, a length that cannot be.
    """
    rows = row_lists.join_rows([_read_rows(path) for path in paths], "trl")
    fullest = int(rows.num_tokens().max())
    told = 0 < fullest <= np.iinfo(np.int32).max
    note = f"pack size taken from the fullest row, {fullest} tokens; TRL's max_length is that or more"
    return Dataset(
        format=FORMAT.name,
        uris=tuple(str(path) for path in paths),
        fingerprint=fingerprint((rows.document_tokens, rows.row_offsets)),
        content=rows,
        pack_tokens=fullest if told else None,
        notes=(note,) if told else (),
    )


def _read_rows(path: Path) -> row_lists.Rows:
    """Document tokens and row offsets of one file."""
    where = f"{path}: column {COLUMN}"
    if is_parquet(path):
        with open_parquet(path) as file:
            _require(file.schema, path)
            column = file.read_column(COLUMN)
    else:
        column = _read_arrow(path)
    with arrow_columns.arrow_errors(path):
        values, offsets = arrow_columns.list_integers(column, where)
    return row_lists.check_rows(values, offsets, where)


def _arrow_schema(path: Path) -> Any:
    """The schema of an Arrow file; None if it is broken."""
    try:
        with _open_arrow(path) as reader:
            return reader.schema if reader.schema.names else None  # names that are no UTF-8 raise here
    except DataError:
        return None


def _require(schema: Any, path: Path) -> int:
    if COLUMN not in schema.names:
        raise DataError(f"{path}: column {COLUMN} is missing; it has {', '.join(schema.names)}")
    return int(schema.get_field_index(COLUMN))


def _read_arrow(path: Path) -> Any:
    """The column of an Arrow file as a `ChunkedArray`; the other columns stay on disk."""
    import pyarrow as pa

    if not _is_arrow(path):
        raise DataError(f"{path}: neither a parquet nor an Arrow file")
    with _open_arrow(path) as reader:
        field = _require(reader.schema, path)
        kind = reader.schema.field(field).type
    with _open_arrow(path, [field]) as reader:
        batches = iter(reader) if hasattr(reader, "read_next_batch") else map(reader.get_batch, _batches(reader))
        columns = [arrow_columns.validate(batch.column(0), f"{path}: column {COLUMN}") for batch in batches]
        return pa.chunked_array(columns, type=kind)


def _batches(reader: Any) -> range:
    return range(reader.num_record_batches)


@contextmanager
def _open_arrow(path: Path, fields: list[int] | None = None) -> Iterator[Any]:
    """An IPC reader of `fields`, over a memory map."""
    import pyarrow as pa

    with arrow_columns.arrow_errors(path), _mapped(path) as source:
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        yield (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)


def _mapped(path: Path) -> Any:
    import pyarrow as pa

    file = arrow_columns.opened(path)
    return pa.memory_map(file) if isinstance(file, str) else file


def _is_arrow(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(len(_FILE_MAGIC))
    return head == _FILE_MAGIC or head[:4] == _STREAM_MAGIC


def _belongs(path: Path) -> bool:
    """Whether the dataset that `save_to_disk` wrote here, if any, counts `path` among its files."""
    try:
        state = json.loads((path.parent / "state.json").read_bytes())
        files = {entry["filename"] for entry in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
    return path.name in files


FORMAT = Format(
    name="trl",
    summary="the lists of column seq_lengths",
    suffixes=(".parquet", ".pq", ".arrow"),
    recognises=recognises,
    read=read,
)
