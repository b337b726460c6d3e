"""Opens parquet files that may be broken or hostile: counts and places in them are checked against the file's size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thdprof.analyze.sources.readers.arrow_columns import arrow_errors, opened
from thdprof.analyze.sources.readers.parquet_pages import CorruptPage, num_values, pages
from thdprof.analyze.sources.readers.parquet_thrift import CorruptThrift, Struct, read_struct
from thdprof.errors import DataError

MAGIC = b"PAR1"
_CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
_FREE_VALUES = 2**26
_VALUES_PER_BYTE = 64
"""Values that a file may claim for each of its bytes, beyond `_FREE_VALUES`; run-length encoding puts many in one byte.
Decoding takes about 16 bytes of memory for each value."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, still encoded."""

    group: int
    """Index of the row group."""
    num_rows: int
    """Rows of the row group."""
    num_values: int
    """Values in the lists of the rows; a null and an empty list count as one value each."""
    codec: str
    """Name of the compression in parquet's definition."""
    content: memoryview
    """The bytes of the chunk's pages."""


class ParquetFile:
    """An open parquet file with its footer; `arrow` is pyarrow's reader of the same file."""

    def __init__(self, path: Path, arrow: Any, footer: bytes) -> None:
        self.path = path
        self.arrow = arrow
        self.schema = arrow.schema_arrow
        self.footer = footer
        """The bytes of the footer, which holds counts, places and statistics of every chunk."""

    @cached_property
    def row_groups(self) -> list[Struct]:
        """The row groups that the footer describes, as structs with the field ids of parquet.thrift.

        Raises:
            DataError: the footer contradicts itself or cannot be read.
        """
        try:
            footer, _ = read_struct(self.footer, 0)
            groups: list[Struct] = footer.get(4, [])
            if footer[3] != sum(group[3] for group in groups):
                raise DataError(f"{self.path}: corrupt: {footer[3]} rows, but its row groups hold others")
        except (CorruptThrift, KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path}: corrupt: its footer does not hold together") from error
        return groups

    def num_rows(self) -> int:
        """Number of rows of all row groups."""
        return sum(group[3] for group in self.row_groups)

    def leaf(self, name: str) -> int:
        """Index of the one leaf column below top-level column `name`, or -1 if there is not exactly one."""
        paths = [self.arrow.schema.column(i).path for i in range(len(self.arrow.schema))]
        leaves = [i for i, p in enumerate(paths) if p == name or p.startswith(name + ".")]
        return leaves[0] if len(leaves) == 1 else -1

    def chunks(self, leaf: int) -> Iterator[Chunk]:
        """The chunks of a leaf column, row group by row group; row groups without rows are left out.

        Raises:
            DataError: a chunk lies outside the file, or its counts are impossible.
        """
        size = self.path.stat().st_size
        with self.path.open("rb") as raw:
            for group, fields in enumerate(self.row_groups):
                if fields[3] == 0:
                    continue
                where = f"{self.path}: corrupt: row group {group}, column {self.arrow.schema.column(leaf).path}"
                try:
                    meta = fields[1][leaf][3]
                    codec, values, length, start = _CODECS[meta[4]], meta[5], meta[7], meta[9]
                    if 0 < meta.get(11, 0) < start:  # the dictionary lies before the data
                        start = meta[11]
                    inside = 4 <= start <= start + length <= size
                    possible = 0 < fields[3] <= values
                except (KeyError, IndexError, TypeError, AttributeError) as error:
                    raise DataError(f"{where}: its place is missing") from error
                if not inside or not possible:
                    raise DataError(f"{where}: {values} values in bytes {start} to {start + length} of {size}")
                if values > self._most_values:
                    raise self._too_many(leaf, values)
                raw.seek(start)
                yield Chunk(group, fields[3], values, codec, memoryview(raw.read(length)))

    @cached_property
    def _most_values(self) -> int:
        return _FREE_VALUES + _VALUES_PER_BYTE * self.path.stat().st_size

    def _too_many(self, leaf: int, values: int) -> DataError:
        return DataError(
            f"{self.path}: refused: column {self.arrow.schema.column(leaf).path}: {values} values in a file of "
            f"{self.path.stat().st_size} bytes, more than {self._most_values}, would take too much memory; "
            "split the file"
        )

    def check_pages(self, leaf: int) -> None:
        """Check the page headers of a leaf column, so that decoding the column takes memory in proportion to the file.

        Raises:
            DataError: a chunk or page claims an impossible count or place.
        """
        name, total = self.arrow.schema.column(leaf).path, 0
        for chunk in self.chunks(leaf):
            try:
                held = sum(num_values(page) for page in pages(chunk.content))
            except CorruptPage as error:
                raise DataError(f"{self.path}: corrupt: column {name}: {error}") from error
            total += held
            if held != chunk.num_values:
                raise DataError(
                    f"{self.path}: corrupt: column {name}: {held} values in its pages, {chunk.num_values} in the footer"
                )
            if total > self._most_values:
                raise self._too_many(leaf, total)

    def read_column(self, name: str) -> Any:
        """Top-level column `name` as a `pyarrow.ChunkedArray`.

        Raises:
            DataError: the column is nested deeper than lists, or corrupt.
        """
        leaf = self.leaf(name)
        if leaf < 0:
            kind = self.schema.field(name).type
            raise DataError(f"{self.path}: column {name}: is {kind}, not integers or lists of them")
        self.check_pages(leaf)
        with arrow_errors(self.path):
            column = self.arrow.read(columns=[self.arrow.schema.column(leaf).path]).column(0)
        if len(column) != self.num_rows():  # pyarrow stops at an empty page without an error
            raise DataError(f"{self.path}: column {name}: {len(column)} rows of the footer's {self.num_rows()}")
        return column


def is_parquet(path: Path) -> bool:
    """Whether the file begins as parquet files do."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parquet_schema(path: Path) -> Any:
    """The `pyarrow.Schema` of a parquet file; None if the file is no parquet file, or broken."""
    if not is_parquet(path):
        return None
    try:
        with open_parquet(path) as file:
            return file.schema if file.schema.names else None  # names that are no UTF-8 raise here
    except DataError:
        return None


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a parquet file after checking that its footer lies inside the file.

    Raises:
        DataError: the file is no parquet file, is truncated, or has a footer that pyarrow refuses.
    """
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with path.open("rb") as raw:
        head = raw.read(len(MAGIC))
        raw.seek(max(0, size - 8))
        tail = raw.read()
        if head != MAGIC:
            raise DataError(f"{path}: not a parquet file: it begins with {head!r}, not {MAGIC!r}")
        if size < 12 or tail[4:] != MAGIC:
            raise DataError(f"{path}: truncated: it does not end with {MAGIC!r} as a parquet file does")
        length = int.from_bytes(tail[:4], "little")
        if length > size - 12:
            raise DataError(f"{path}: corrupt: a footer of {length} bytes in a file of {size}")
        raw.seek(size - 8 - length)
        footer = raw.read(length)
    with arrow_errors(path), pq.ParquetFile(opened(path)) as arrow:
        yield ParquetFile(path, arrow, footer)
