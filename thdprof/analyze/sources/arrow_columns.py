"""Careful reading of integer columns with pyarrow: nothing is believed that the file's size does not bear out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.parquet_pages import CorruptPage, num_values, pages
from thdprof.errors import DataError

PARQUET_MAGIC = b"PAR1"
_FREE_VALUES = 2**24
_VALUES_PER_BYTE = 64
"""Values believed of a byte of the file, beyond `_FREE_VALUES`: run-length encoding packs many into one."""


def is_parquet(path: Path) -> bool:
    """Whether the file begins as parquet files do."""
    with path.open("rb") as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


def parquet_schema(path: Path) -> Any:
    """The `pyarrow.Schema` of a parquet file; None if it is none, or broken."""
    if not is_parquet(path):
        return None
    try:
        with open_parquet(path) as file:
            return file.schema_arrow
    except DataError:
        return None


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises on a broken file into a one-line DataError; a true OSError passes."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()).split(" Detail:")[0][:200] or type(error).__name__
        raise DataError(f"{path}: cannot be read, truncated or corrupt: {reason}") from error


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile` whose footer fits the file.

    Raises:
        DataError: no parquet file, truncated, or a footer that does not hold together.
    """
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with path.open("rb") as raw:
        head = raw.read(len(PARQUET_MAGIC))
        raw.seek(max(0, size - 8))
        tail = raw.read()
    if head != PARQUET_MAGIC:
        raise DataError(f"{path}: not a parquet file: it begins with {head!r}, not {PARQUET_MAGIC!r}")
    if size < 12 or tail[4:] != PARQUET_MAGIC:
        raise DataError(f"{path}: truncated: it does not end with {PARQUET_MAGIC!r} as a parquet file does")
    footer = int.from_bytes(tail[:4], "little")
    if footer > size - 12:
        raise DataError(f"{path}: corrupt: a footer of {footer} bytes in a file of {size}")
    with arrow_errors(path), pq.ParquetFile(path) as file:
        metadata = file.metadata
        groups = sum(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))
        if groups != metadata.num_rows:
            raise DataError(f"{path}: corrupt: {metadata.num_rows} rows, but its row groups hold {groups}")
        yield file


def leaf_of(file: Any, name: str) -> int:
    """Index of the one leaf column below top-level column `name`, or -1 if there is not exactly one."""
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    leaves = [i for i, p in enumerate(paths) if p == name or p.startswith(name + ".")]
    return leaves[0] if len(leaves) == 1 else -1


def column_chunks(path: Path, file: Any, leaf: int) -> Iterator[tuple[int, Any, memoryview]]:
    """Row group, metadata and raw bytes of every chunk of a leaf column; row groups without rows are left out.

    Raises:
        DataError: a chunk lies outside the file, or its counts cannot be.
    """
    size = path.stat().st_size
    name = file.schema.column(leaf).path
    with path.open("rb") as raw:
        for group in range(file.metadata.num_row_groups):
            where = f"{path}: corrupt: row group {group}, column {name}"
            row_group = file.metadata.row_group(group)
            if leaf >= row_group.num_columns:
                raise DataError(f"{where}: missing")
            chunk = row_group.column(leaf)
            if row_group.num_rows == 0 and chunk.num_values == 0:
                continue
            start, length = chunk.data_page_offset, chunk.total_compressed_size
            if chunk.dictionary_page_offset is not None and 0 < chunk.dictionary_page_offset < start:
                start = chunk.dictionary_page_offset
            if start < 4 or length < 0 or start + length > size:
                raise DataError(f"{where}: bytes {start} to {start + length} of a file of {size}")
            if not row_group.num_rows <= chunk.num_values <= _FREE_VALUES + _VALUES_PER_BYTE * size:
                raise DataError(f"{where}: {chunk.num_values} values for {row_group.num_rows} rows")
            raw.seek(start)
            yield group, chunk, memoryview(raw.read(length))


def check_column(path: Path, file: Any, leaf: int) -> None:
    """Walk the page headers of a leaf column, so that decoding it takes memory in proportion to the file.

    Raises:
        DataError: a chunk or page that cannot be.
    """
    values = 0
    for _, chunk, data in column_chunks(path, file, leaf):
        try:
            held = sum(num_values(page) for page in pages(data))
        except CorruptPage as error:
            raise DataError(f"{path}: corrupt: column {file.schema.column(leaf).path}: {error}") from error
        values += held
        if held != chunk.num_values or values > _FREE_VALUES + _VALUES_PER_BYTE * path.stat().st_size:
            raise DataError(
                f"{path}: corrupt: column {file.schema.column(leaf).path}: its pages hold {held} values where the "
                f"footer has {chunk.num_values}"
            )


def read_parquet_column(path: Path, file: Any, name: str) -> Any:
    """Top-level column `name` as a `pyarrow.ChunkedArray`.

    Raises:
        DataError: nested deeper than lists, or corrupt.
    """
    leaf = leaf_of(file, name)
    if leaf < 0:
        raise DataError(
            f"{path}: column {name}: is {file.schema_arrow.field(name).type}, not integers or lists of them"
        )
    check_column(path, file, leaf)
    with arrow_errors(path):
        column = file.read(columns=[file.schema.column(leaf).path]).column(0)
    if len(column) != file.metadata.num_rows:  # pyarrow stops at an empty page without a word
        raise DataError(
            f"{path}: column {name}: holds {len(column)} rows of the {file.metadata.num_rows} in the footer"
        )
    return column


def is_list(kind: Any) -> bool:
    """Whether an arrow type is one of the lists that `list_integers` takes."""
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def integers(column: Any, where: str) -> NDArray[np.int64]:
    """A `ChunkedArray` of integers as int64, shape [n]; `where` names it in messages.

    Raises:
        DataError: another type, a null, a number over 2**63 - 1.
    """
    import pyarrow.types as types

    if not types.is_integer(column.type):
        raise DataError(f"{where}: is {column.type}, not integers")
    parts, row = [np.empty(0, dtype=np.int64)], 0
    for chunk in column.chunks:
        if chunk.null_count:
            raise DataError(f"{where}: row {row + _first_null(chunk)}: is null")
        parts.append(_int64(chunk, where))
        row += len(chunk)
    return np.concatenate(parts)


def list_integers(column: Any, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A `ChunkedArray` of integer lists: the values, int64 [values], and row offsets into them, int64 [rows + 1].

    Raises:
        DataError: another type, a null row, a null in a list.
    """
    import pyarrow.types as types

    kind = column.type
    if not is_list(kind) or not types.is_integer(kind.value_type):
        raise DataError(f"{where}: is {kind}, not lists of integers")
    values, lengths = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    row = 0
    for chunk in column.chunks:
        lengths.append(list_lengths(chunk, where, row))
        values.append(_int64(chunk.flatten(), where))
        row += len(chunk)
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(lengths), dtype=np.int64)))
    return np.concatenate(values), offsets


def list_lengths(lists: Any, where: str, first_row: int) -> NDArray[np.int64]:
    """Lengths of the lists of an `Array`, int64, shape [rows]; `first_row` is the number of its first row.

    Raises:
        DataError: a null row, a null in a list.
    """
    if lists.null_count:
        raise DataError(f"{where}: row {first_row + _first_null(lists)}: is null")
    lengths = _int64(lists.value_lengths(), where)
    inner = lists.flatten()
    if inner.null_count:
        row = int(np.searchsorted(np.cumsum(lengths), _first_null(inner), side="right"))
        raise DataError(f"{where}: row {first_row + row}: has a null in its list")
    return lengths


def _int64(array: Any, where: str) -> NDArray[np.int64]:
    """An integer `Array` without nulls as int64; its own `to_numpy` would import pandas."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype=np.int64)
    values = np.frombuffer(buffer, dtype=str(array.type))[array.offset : array.offset + len(array)]
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where}: {int(values.max())} is larger than 2**63 - 1")
    return values.astype(np.int64, copy=False)


def validate(array: Any, where: str) -> Any:
    """`array`, whose buffers came as they are from a file, after a check that its offsets stay inside them.

    Raises:
        DataError: they do not.
    """
    import pyarrow as pa

    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: corrupt: {' '.join(str(error).split())}") from error
    return array


def _first_null(array: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.index(array.is_null(), True).as_py())
