"""Arrow files, of which one column is read over a memory map, and pyarrow's columns as checked NumPy arrays.

Hugging Face `datasets` writes IPC streams (`save_to_disk`, caches). pyarrow's own conversion to NumPy would import
pandas.
"""

from __future__ import annotations

import json
import mmap
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.remote import begins_with, is_remote


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turn pyarrow's exceptions about a broken file into a DataError of one line; an OSError of the system passes."""
    import pyarrow as pa

    try:
        yield
    except (
        *(pa.ArrowException, OSError, MemoryError, ValueError, OverflowError, UnicodeError, struct.error),
        *(EOFError, zlib.error),  # of gzip
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()).split(" Detail:")[0][:200] or type(error).__name__
        raise DataError(f"{path}: cannot be read, truncated or corrupt: {reason}") from error


def open_source(path: Path) -> Any:
    """`path` as pyarrow can open it: its text; where the name is not UTF-8 a memory map; or a file in a store."""
    import pyarrow as pa

    if is_remote(str(path)):
        return pa.PythonFile(path.open("rb"), mode="r")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:  # the map stays open after the file, until the last array over it is freed
            return pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return str(path)


def is_list(kind: Any) -> bool:
    """Whether an arrow type is one of the lists that `list_integers` takes."""
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def integers(column: Any, where: str) -> NDArray[np.integer]:
    """The integers of a `ChunkedArray`, shape [n]: int32 if they all fit, else int64; `where` names it in messages.

    Raises:
        DataError: another type, a null, a number over 2**63 - 1.
    """
    import pyarrow.types as types

    if not types.is_integer(column.type):
        raise DataError(f"{where}: is {column.type}, not integers")
    if column.null_count:
        raise DataError(f"{where}: row {_first_null(column)}: is null")
    parts: list[NDArray[np.integer]] = [np.empty(0, dtype=np.int32)]
    for values in (_int64(chunk, where) for chunk in column.chunks):
        limits = np.iinfo(np.int32)
        fits = not values.size or (limits.min <= values.min() and values.max() <= limits.max)
        parts.append(values.astype(np.int32) if fits else values)
    return np.concatenate(parts)


def list_integers(column: Any, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The values of a `ChunkedArray` of integer lists, shape [values], and row offsets into them, shape [rows + 1].

    Raises:
        DataError: another type, a null row, a null in a list.
    """
    import pyarrow.types as types

    kind = column.type
    if not is_list(kind) or not types.is_integer(kind.value_type):
        raise DataError(f"{where}: is {kind}, not lists of integers")
    lengths = row_lengths(column, where)
    values = [np.empty(0, dtype=np.int64), *(_int64(chunk.flatten(), where) for chunk in column.chunks)]
    return np.concatenate(values), np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def make_lists(values: Any, lengths: NDArray[np.integer]) -> Any:
    """An Arrow array of lists of these `lengths`, which hold `values` one after the other."""
    import pyarrow as pa

    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), pa.array(values))


def row_lengths(column: Any, where: str, first_row: int = 0) -> NDArray[np.int64]:
    """Lengths of the lists of a `ChunkedArray`, shape [rows]; `first_row` is the number of its first row.

    Raises:
        DataError: a null row, a null in a list.
    """
    if column.null_count:
        raise DataError(f"{where}: row {first_row + _first_null(column)}: is null")
    parts = [np.empty(0, dtype=np.int64)]
    for chunk in column.chunks:
        lengths, inner = _int64(chunk.value_lengths(), where), chunk.flatten()
        if inner.null_count:
            row = int(np.searchsorted(np.cumsum(lengths), _first_null(inner), side="right"))
            raise DataError(f"{where}: row {first_row + row}: has a null in its list")
        parts.append(lengths)
        first_row += len(chunk)
    return np.concatenate(parts)


def _int64(array: Any, where: str) -> NDArray[np.int64]:
    """The numbers of an integer `Array` without nulls; its own `to_numpy` would import pandas."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype=np.int64)
    values = np.frombuffer(buffer, dtype=str(array.type))[array.offset : array.offset + len(array)]
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where}: {int(values.max())} is larger than 2**63 - 1")
    return values.astype(np.int64, copy=False)


def _first_null(array: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.index(array.is_null(), True).as_py())


_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff\xff\xff\xff"
MAGICS = _FILE_MAGIC, _STREAM_MAGIC
"""What IPC files and IPC streams begin with."""


def is_arrow(path: Path) -> bool:
    """Whether the file begins as an IPC file or an IPC stream does."""
    return begins_with(path, *MAGICS)


class ArrowFile:
    """An Arrow file, of which columns are read one at a time; the others stay on disk."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            DataError: no Arrow file, truncated or corrupt.
        """
        if not is_arrow(path):
            raise DataError(f"{path}: neither a parquet nor an Arrow file")
        self.path = path
        with _open_arrow(path) as (self.schema, _):
            pass

    def read_column(self, name: str, *, values: bool = True) -> Any:
        """Column `name` as a `pyarrow.ChunkedArray`; without `values` the numbers in its lists may be any.

        Raises:
            DataError: there is no such column, or it is truncated or corrupt.
        """
        import pyarrow as pa

        field = require_column(self.schema, name, self.path)
        with self._open([field], values) as (_, batches):
            columns = [batch.column(0) for batch in batches]
            try:
                for column in columns:  # whose offsets were taken from the file unread
                    column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise DataError(f"{self.path}: column {name}: corrupt: {' '.join(str(error).split())}") from error
            return pa.chunked_array(columns, type=self.schema.field(field).type)

    def num_rows(self) -> int:
        """Number of rows of all record batches."""
        with self._open([]) as (_, batches):
            return sum(batch.num_rows for batch in batches)

    def batches(self, names: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of the columns `names`, of at most `rows` rows."""
        with self._open([self.schema.get_field_index(name) for name in names]) as (_, batches):
            for batch in batches:
                batch.validate(full=True)  # its offsets were taken from the file unread
                for begin in range(0, batch.num_rows, rows):
                    yield batch.slice(begin, rows)

    def row_lengths(self, name: str) -> NDArray[np.int64]:
        """Lengths of the lists in column `name`, shape [rows]."""
        return row_lengths(self.read_column(name, values=False), f"{self.path}: column {name}")

    @cached_property
    def _copy(self) -> _SparseCopy | None:
        return _SparseCopy(self.path) if is_remote(str(self.path)) and not begins_with(self.path, _FILE_MAGIC) else None

    def _open(self, fields: list[int], values: bool = True) -> AbstractContextManager[tuple[Any, Iterator[Any]]]:
        return _open_arrow(self.path if self._copy is None else self._copy.fill(fields, values), fields)


class _SparseCopy:
    """A local file as large as an IPC stream in a store, with its messages' headers and the columns that are asked for.

    pyarrow reads a stream from its beginning to its end; over a memory map it touches those columns alone.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, path.stat().st_size
        self._file = tempfile.NamedTemporaryFile(suffix=".arrow")  # noqa: SIM115 -- removed with this object
        self._file.truncate(self._size)
        position = 0
        with arrow_errors(path), path.open("rb") as source:
            while position + 8 <= self._size:
                source.seek(position)
                prefix = source.read(8)
                length = int.from_bytes(prefix[4:], "little")
                header = source.read(length) if length < self._size - position else b""
                self._write(position, prefix + header)
                if not header or prefix[:4] != _STREAM_MAGIC:  # the end, or what pyarrow refuses
                    break
                position += 8 + length + max(0, _body_bytes(header))

    def _write(self, position: int, content: bytes) -> None:
        self._file.seek(position)
        self._file.write(content)
        self._file.flush()

    def fill(self, fields: list[int], values: bool) -> Path:
        """The file with the columns `fields` of every batch; without `values` it lacks what their lists hold."""
        import pyarrow as pa

        copy, ranges = Path(self._file.name), list[tuple[int, int]]()
        with arrow_errors(self._path), pa.memory_map(str(copy)) as source:
            base = source.read_buffer(1).address
            source.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            for column in (c for batch in pa.ipc.open_stream(source, options=options) for c in batch.columns):
                buffers = column.buffers() if values else column.buffers()[:-1]
                ranges += [(buffer.address - base, buffer.size) for buffer in buffers if buffer is not None]
        with self._path.open("rb") as remote:
            if any(not 0 <= start <= start + size <= self._size for start, size in ranges):  # compressed bodies
                ranges = [(0, self._size)]
            for start, size in ranges:
                remote.seek(start)
                self._write(start, remote.read(size))
        return copy


def _body_bytes(header: bytes) -> int:
    """Bytes of the body behind a message: `bodyLength`, the fourth field of a flatbuffer Message (Message.fbs)."""
    (table,) = struct.unpack_from("<I", header)
    (back,) = struct.unpack_from("<i", header, table)
    (size,) = struct.unpack_from("<H", header, table - back)
    field = struct.unpack_from("<H", header, table - back + 10)[0] if size > 10 else 0
    return int(struct.unpack_from("<q", header, table + field)[0]) if field else 0


def require_column(schema: Any, name: str, path: Path) -> int:
    """Index of column `name`.

    Raises:
        DataError: there is no such column; the message names those that there are.
    """
    if name not in schema.names:
        raise DataError(f"{path}: column {name} is missing; it has {', '.join(schema.names)}")
    return int(schema.get_field_index(name))


@contextmanager
def _open_arrow(path: Path, fields: list[int] | None = None) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema of a file, and its batches of the columns `fields`; None: of all."""
    import pyarrow as pa

    file = open_source(path)
    with arrow_errors(path), pa.memory_map(file) if isinstance(file, str) else file as source:
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
        yield reader.schema, map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)


def is_cache(path: Path) -> bool:
    """Whether `datasets` cached the file beside a dataset that `save_to_disk` wrote, whose `state.json` lacks it."""
    try:
        state = json.loads((path.parent / "state.json").read_bytes())
        files = {entry["filename"] for entry in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return path.name not in files
