"""Arrow files: IPC files and IPC streams, of which one column is read over a memory map.

Hugging Face `datasets` writes streams (`save_to_disk`, caches).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thdprof.analyze.sources.readers import arrow_columns
from thdprof.errors import DataError

_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"


def is_arrow(path: Path) -> bool:
    """Whether the file begins as an IPC file or an IPC stream does."""
    with path.open("rb") as file:
        head = file.read(len(_FILE_MAGIC))
    return head == _FILE_MAGIC or head[:4] == _STREAM_MAGIC


def arrow_schema(path: Path) -> Any:
    """The `pyarrow.Schema` of an Arrow file; None if the file is broken, or is a cache that `datasets` left behind.

    Beside the files of a dataset that `save_to_disk` wrote, `datasets` caches others, which `state.json` does not name.
    """
    if not is_arrow(path) or not _belongs(path):
        return None
    try:
        with _open_arrow(path) as reader:
            return reader.schema if reader.schema.names else None  # names that are no UTF-8 raise here
    except DataError:
        return None


def read_column(path: Path, name: str) -> Any:
    """Column `name` of an Arrow file as a `pyarrow.ChunkedArray`; the other columns stay on disk.

    Raises:
        DataError: no Arrow file, truncated, corrupt, or without the column.
    """
    import pyarrow as pa

    if not is_arrow(path):
        raise DataError(f"{path}: neither a parquet nor an Arrow file")
    with _open_arrow(path) as reader:
        field = require_column(reader.schema, name, path)
        kind = reader.schema.field(field).type
    with _open_arrow(path, [field]) as reader:
        batches = iter(reader) if hasattr(reader, "read_next_batch") else map(reader.get_batch, _batches(reader))
        columns = [arrow_columns.validate(batch.column(0), f"{path}: column {name}") for batch in batches]
        return pa.chunked_array(columns, type=kind)


def require_column(schema: Any, name: str, path: Path) -> int:
    """Index of column `name`.

    Raises:
        DataError: there is no such column; the message names those that there are.
    """
    if name not in schema.names:
        raise DataError(f"{path}: column {name} is missing; it has {', '.join(schema.names)}")
    return int(schema.get_field_index(name))


def _batches(reader: Any) -> range:
    return range(reader.num_record_batches)


@contextmanager
def _open_arrow(path: Path, fields: list[int] | None = None) -> Iterator[Any]:
    """An IPC reader of the columns `fields` (None: all), over a memory map."""
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


def _belongs(path: Path) -> bool:
    """Whether the dataset that `save_to_disk` wrote here, if any, counts `path` among its files."""
    try:
        state = json.loads((path.parent / "state.json").read_bytes())
        files = {entry["filename"] for entry in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
    return path.name in files
