"""Careful reading of parquet: nothing is believed that the file's size does not bear out."""

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
"""Values believed of a byte of the file, beyond `_FREE_VALUES`: run-length encoding packs many into one.
Decoding takes some 16 bytes of memory a value."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group, as it lies in the file."""

    group: int
    """Index of its row group."""
    num_rows: int
    num_values: int
    """Values, nulls and empty lists counted as one each."""
    codec: str
    """Name of the compression in parquet's definition."""
    content: memoryview


class ParquetFile:
    """An open parquet file; `arrow` is pyarrow's reader of it."""

    def __init__(self, path: Path, arrow: Any, footer: bytes) -> None:
        self.path = path
        self.arrow = arrow
        self.schema = arrow.schema_arrow
        self.footer = footer
        """The bytes of the footer: counts, places and statistics of every chunk."""

    @cached_property
    def row_groups(self) -> list[Struct]:
        """The footer's row groups, by the field ids of parquet.thrift.

        Raises:
            DataError: the footer does not hold together.
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
        """Rows of all row groups."""
        return sum(group[3] for group in self.row_groups)

    def leaf(self, name: str) -> int:
        """Index of the one leaf column below top-level column `name`, or -1 if there is not exactly one."""
        paths = [self.arrow.schema.column(i).path for i in range(len(self.arrow.schema))]
        leaves = [i for i, p in enumerate(paths) if p == name or p.startswith(name + ".")]
        return leaves[0] if len(leaves) == 1 else -1

    def chunks(self, leaf: int) -> Iterator[Chunk]:
        """A leaf column's chunks, row group by row group, those without rows left out.

        Raises:
            DataError: a chunk lies outside the file, or its counts cannot be.
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
        """Walk the page headers of a leaf column, so that decoding it takes memory in proportion to the file.

        Raises:
            DataError: a chunk or page that cannot be.
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
            DataError: nested deeper than lists, or corrupt.
        """
        leaf = self.leaf(name)
        if leaf < 0:
            kind = self.schema.field(name).type
            raise DataError(f"{self.path}: column {name}: is {kind}, not integers or lists of them")
        self.check_pages(leaf)
        with arrow_errors(self.path):
            column = self.arrow.read(columns=[self.arrow.schema.column(leaf).path]).column(0)
        if len(column) != self.num_rows():  # pyarrow stops at an empty page without a word
            raise DataError(f"{self.path}: column {name}: {len(column)} rows of the footer's {self.num_rows()}")
        return column


def is_parquet(path: Path) -> bool:
    """Whether the file begins as parquet files do."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parquet_schema(path: Path) -> Any:
    """The `pyarrow.Schema` of a parquet file; None if it is none, or broken."""
    if not is_parquet(path):
        return None
    try:
        with open_parquet(path) as file:
            return file.schema if file.schema.names else None  # names that are no UTF-8 raise here
    except DataError:
        return None


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a parquet file whose footer lies in the file.

    Raises:
        DataError: no parquet file, truncated, or a footer that pyarrow refuses.
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
