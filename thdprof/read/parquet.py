"""Opens parquet files that may be broken or hostile, and reads the lengths of lists without their values.

Counts and places in a file are checked against its size. pyarrow aborts the process on some broken footers, and gives
the lengths of a column's lists only together with all their values. Repetition levels are run-length encoded, so that
the lengths of lists with thousands of values take a few bytes each; this module reads those bytes only. Reading list
lengths from the levels saves 0.8 s of a command of 1.4 s: `thdprof analyze` of Megatron-Bridge's packed parquet with
40,000 rows of 4,096 tokens, 369 MB, as `benchmarks/analyze.py` writes it (1.1 s of 1.9 s of processor time).
Format: parquet.thrift (PageHeader), thrift's compact protocol, and Encodings.md (RLE) of apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read import arrow
from thdprof.read.arrow import ArrowFile, arrow_errors, is_arrow, open_source
from thdprof.read.json_lines import first_object
from thdprof.read.remote import begins_with

_DEEPEST = 12
_SHIFTS = range(0, 64, 7)
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
Struct = dict[int, Any]
"""A field's id -> its number, bool, list or struct; None stands for texts and floating-point numbers."""


class _CorruptThrift(Exception):
    """The bytes are no struct of thrift's compact protocol; the text says why."""


class _ThriftReader:
    """Reads values of thrift's compact protocol from `data`, one behind the other from `position` on."""

    def __init__(self, data: memoryview | bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def read_struct(self, depth: int = 0) -> Struct:
        if depth > _DEEPEST:
            raise _CorruptThrift("is nested too deeply")
        fields: Struct = {}
        identifier = 0
        try:
            while head := self._read_byte():
                kind = head & 0x0F
                identifier = identifier + (head >> 4) if head >> 4 else self._read_value(_I16, depth)
                fields[identifier] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._read_value(kind, depth)
        except IndexError as error:
            raise _CorruptThrift("runs past its end") from error
        return fields

    def _read_byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def read_varint(self) -> int:
        """An unsigned LEB128 number of at most 64 bits."""
        value = 0
        at = self.position
        for shift in _SHIFTS:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.position = at
                return value
        raise _CorruptThrift("has a number of more than 64 bits")

    def _read_value(self, kind: int, depth: int) -> Any:
        if _I16 <= kind <= _I64:
            value = self.read_varint()
            return (value >> 1) ^ -(value & 1)
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._read_byte()
            size = head >> 4 if head >> 4 < 15 else self.read_varint()
            if size > len(self.data) - self.position:
                raise _CorruptThrift("has a list longer than itself")
            return [self._read_value(head & 0x0F, depth) for _ in range(size)]
        if kind in (_BYTE, _TRUE, _FALSE):  # elements of a list
            return self._read_byte()
        if kind not in (_BINARY, _DOUBLE):
            raise _CorruptThrift(f"has a field of unknown kind {kind}")
        size = 8 if kind == _DOUBLE else self.read_varint()
        self.position += size
        return None


_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_RLE = 3
_CODECS = ("SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4_RAW")
_INFLATION = 64
"""Uncompressed bytes that a page may claim for each compressed byte, beyond `_FREE_BYTES`."""
_FREE_BYTES = 2**29


class CorruptPage(Exception):
    """The pages contradict themselves or their chunk; the text says how."""


class _UnsupportedPage(Exception):
    """A page is valid and not decoded by this module; pyarrow decodes it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a column chunk, still compressed."""

    kind: int
    """Parquet's number of the kind: `_DATA_PAGE` and the like."""
    header: dict[int, Any]
    """Fields that data pages have in their header, by thrift id; empty for other pages."""
    body: memoryview
    """The page's content, compressed as its chunk says."""
    uncompressed_bytes: int
    """Size of `body` after decompression, as the header claims."""
    num_values: int
    """Number of values of a data page, of levels where the column holds lists; 0 for pages of other kinds."""


def pages(chunk: memoryview) -> Iterator[Page]:
    """The pages of a whole column chunk.

    Raises:
        CorruptPage: a header cannot be read, or claims more than the chunk can hold.
    """
    position, allowance = 0, _FREE_BYTES + _INFLATION * len(chunk)
    while position < len(chunk):
        try:
            reader = _ThriftReader(chunk, position)
            header = reader.read_struct()
        except _CorruptThrift as error:
            raise CorruptPage(f"a page header {error}") from error
        position = reader.position
        kind, inflated, size = header.get(1), header.get(2), header.get(3)
        if not (isinstance(kind, int) and isinstance(inflated, int) and isinstance(size, int)):
            raise CorruptPage("a page header lacks its type or sizes")
        allowance -= inflated
        if not 0 <= size <= len(chunk) - position or inflated < 0 or allowance < 0:
            raise CorruptPage(f"a page claims {size} bytes, {inflated} uncompressed")
        own = header.get({_DATA_PAGE: 5, _DATA_PAGE_V2: 8}.get(kind, 0), {})
        own = own if isinstance(own, dict) else {}
        count = own.get(1) if kind in (_DATA_PAGE, _DATA_PAGE_V2) else 0
        if not isinstance(count, int) or count < 0:
            raise CorruptPage("a data page has no number of values")
        yield Page(kind, own, chunk[position : position + size], inflated, count)
        position += size


def list_lengths(chunk: memoryview, *, codec: str, max_definition: int, rows: int) -> NDArray[np.int64]:
    """Lengths of the lists of one column chunk that has no null and no empty list, shape [rows].

    `codec` is parquet's name of the chunk's compression, `max_definition` the column's highest definition level.

    Raises:
        CorruptPage: the levels end early, or do not make `rows` lists.
        UnsupportedPage: there are nulls or empty lists, or an encoding is not decoded here.
    """
    starts, total = [], 0
    for page in pages(chunk):
        count = page.num_values
        if count:
            repetition, definition = _levels(page, codec)
            try:
                if not _all_equal(definition, count, max_definition):
                    raise _UnsupportedPage("nulls or empty lists")
                starts.append(_zeros(repetition, count) + total)
            except (IndexError, _CorruptThrift) as error:
                raise CorruptPage("the levels end early") from error
            total += count
    row_starts = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    if len(row_starts) != rows or (rows and row_starts[0] != 0):
        raise CorruptPage(f"its levels make {len(row_starts)} rows where the footer has {rows}")
    return np.diff(row_starts, append=total)


def _levels(page: Page, codec: str) -> tuple[bytes, bytes]:
    if page.kind == _DATA_PAGE_V2:  # the levels lie uncompressed before the values
        definition, repetition = page.header.get(5), page.header.get(6)
        if not isinstance(definition, int) or not isinstance(repetition, int):
            raise CorruptPage("a data page lacks the sizes of its levels")
        if min(definition, repetition) < 0 or definition + repetition > len(page.body):
            raise CorruptPage("the levels of a data page are longer than the page")
        levels = bytes(page.body[: repetition + definition])
        return levels[:repetition], levels[repetition:]
    if page.header.get(3) != _RLE or page.header.get(4) != _RLE:
        raise _UnsupportedPage("levels not run-length encoded")
    body = _decompress(page, codec)
    parts, position = [], 0
    for _ in range(2):
        start = position + 4
        size = int.from_bytes(body[position:start], "little")
        if start + size > len(body):
            raise CorruptPage("the levels of a data page are longer than the page")
        parts.append(bytes(body[start : start + size]))
        position = start + size
    return parts[0], parts[1]


def _decompress(page: Page, codec: str) -> memoryview:
    import pyarrow as pa

    if codec == "UNCOMPRESSED":
        return page.body
    if codec not in _CODECS:
        raise _UnsupportedPage(f"compression {codec}")
    try:
        return memoryview(pa.Codec(codec.lower()).decompress(page.body, decompressed_size=page.uncompressed_bytes))
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise CorruptPage(f"a page does not decompress ({codec})") from error


def _zeros(encoded: bytes, count: int) -> NDArray[np.int64]:
    """Positions of the zeros among `count` levels of one bit each, ascending, shape [zeros]."""
    packed_at, packed_groups, packed, runs = _split_runs(encoded, count, width=1, usual=1)
    zeros = [np.arange(at, min(at + length, count), dtype=np.int64) for at, length, level in runs if level == 0]
    if packed:
        groups = np.array(packed_groups)
        before = np.cumsum(groups) - groups
        first = np.repeat(
            np.array(packed_at, dtype=np.int64) - 8 * before, groups
        )  # the level at which byte 0 would lie
        unset = np.flatnonzero(_bits(b"".join(packed)) == 0)
        positions = first[unset >> 3] + unset
        zeros.append(positions[positions < count])
    return np.sort(np.concatenate(zeros)) if zeros else np.empty(0, dtype=np.int64)


def _bits(content: bytes) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(content, dtype=np.uint8), bitorder="little")


def _all_equal(encoded: bytes, count: int, level: int) -> bool:
    """Whether the `count` levels in `encoded` are all `level`, which is the highest level of the column."""
    width = level.bit_length()
    packed_at, _, packed, others = _split_runs(encoded, count, width=width, usual=level)
    one = np.array([level >> i & 1 for i in range(width)], dtype=np.uint8)
    for at, content in zip(packed_at, packed, strict=True):
        bits = _bits(content)[: (count - at) * width]
        if not np.array_equal(bits, np.resize(one, len(bits))):
            return False
    return not others


def _split_runs(
    encoded: bytes, count: int, *, width: int, usual: int
) -> tuple[list[int], list[int], list[bytes], list[tuple[int, int, int]]]:
    """The runs of `count` levels of `width` bits: bit-packed ones (first level, groups of eight, bytes), and those of a
    level other than `usual` (first level, levels, level).

    The loop runs twice for each row of the dataset, so numbers of one and two bytes are read without a call.
    """
    packed_at, packed_groups, packed, runs = [], [], [], []
    position = at = 0
    while at < count:
        header = encoded[position]
        if header >= 0x80:
            second = encoded[position + 1]
            if second < 0x80:
                header += (second - 1) << 7
                position += 2
            else:
                reader = _ThriftReader(encoded, position)
                header, position = reader.read_varint(), reader.position
        else:
            position += 1
        if header < 2:
            raise CorruptPage("the levels have an empty run")
        length = header >> 1
        if header & 1:
            packed_at.append(at)
            packed_groups.append(length)
            packed.append(encoded[position : position + length * width])
            position += length * width
            at += 8 * length
        else:
            if encoded[position] != usual:
                runs.append((at, length, encoded[position]))
            position += 1
            at += length
    if position > len(encoded):
        raise CorruptPage("the levels end early")
    return packed_at, packed_groups, packed, runs


MAGIC = b"PAR1"
_CODEC_NAMES = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
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

        They are read here, because pyarrow ends the process where its metadata of a broken chunk are looked at.

        Raises:
            DataError: the footer contradicts itself or cannot be read.
        """
        try:
            footer = _ThriftReader(self.footer).read_struct()
            groups: list[Struct] = footer.get(4, [])
            if footer[3] != sum(group[3] for group in groups):
                raise DataError(f"{self.path}: corrupt: {footer[3]} rows, but its row groups hold others")
        except (_CorruptThrift, KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path}: corrupt: its footer does not hold together") from error
        return groups

    def num_rows(self) -> int:
        """Number of rows of all row groups."""
        return sum(group[3] for group in self.row_groups)

    def leaf(self, name: str) -> int:
        """Index of the one leaf column below top-level column `name`.

        Raises:
            DataError: there is no such column, or it has several leaves.
        """
        arrow.require_column(self.schema, name, self.path)
        paths = [self.arrow.schema.column(i).path for i in range(len(self.arrow.schema))]
        leaves = [i for i, p in enumerate(paths) if p == name or p.startswith(name + ".")]
        if len(leaves) != 1:
            kind = self.schema.field(name).type
            raise DataError(f"{self.path}: column {name}: is {kind}, not integers or lists of them")
        return leaves[0]

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
                    codec, values, length, start = _CODEC_NAMES[meta[4]], meta[5], meta[7], meta[9]
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
                held = sum(page.num_values for page in pages(chunk.content))
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
            DataError: there is no such column, it is nested deeper than lists, or corrupt.
        """
        leaf = self.leaf(name)
        self.check_pages(leaf)
        with arrow_errors(self.path):
            column = self.arrow.read(columns=[self.arrow.schema.column(leaf).path]).column(0)
        self._check_rows(name, len(column), self.num_rows())
        return column

    def _check_rows(self, name: str, found: int, rows: int) -> None:
        if found != rows:  # pyarrow stops at an empty page without an error
            raise DataError(f"{self.path}: column {name}: {found} rows of the footer's {rows}")

    def batches(self, names: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of the columns `names`, of at most `rows` rows."""
        return iter(self.arrow.iter_batches(batch_size=rows, columns=list(names), use_threads=False))

    def row_lengths(self, name: str) -> NDArray[np.int64]:
        """Lengths of the lists in top-level column `name`, shape [rows].

        Raises:
            DataError: the column is corrupt, or holds a null.
        """
        leaf = self.leaf(name)
        column = self.arrow.schema.column(leaf)
        lengths, row = [np.empty(0, dtype=np.int64)], 0
        for chunk in self.chunks(leaf):
            try:
                if column.max_repetition_level != 1:
                    raise _UnsupportedPage("nested lists")
                of_chunk = list_lengths(
                    chunk.content, codec=chunk.codec, max_definition=column.max_definition_level, rows=chunk.num_rows
                )
            except CorruptPage as error:
                raise DataError(f"{self.path}: corrupt: row group {chunk.group}, column {name}: {error}") from error
            except _UnsupportedPage:  # pyarrow decodes these
                self.check_pages(leaf)
                with arrow_errors(self.path):
                    lists = self.arrow.read_row_group(chunk.group, columns=[name]).column(0)
                self._check_rows(name, len(lists), chunk.num_rows)
                of_chunk = arrow.row_lengths(lists, f"{self.path}: column {name}", row)
            lengths.append(of_chunk)
            row += chunk.num_rows
        return np.concatenate(lengths)


def is_parquet(path: Path) -> bool:
    """Whether the file begins as parquet files do."""
    return begins_with(path, MAGIC)


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
    # pre_buffer keeps all that was read in memory
    with arrow_errors(path), pq.ParquetFile(open_source(path), pre_buffer=False) as arrow:
        yield ParquetFile(path, arrow, footer)


# --- files of columns, parquet or Arrow, of which one column is read --------------------------------------------------


def column_names(path: Path) -> Collection[str]:
    """Names of the columns of a file of columns, or of the keys of a file of JSON lines; none where it has neither."""
    if not holds_columns(path):
        return first_object(path) or ()
    schema = schema_of(path)
    return () if schema is None else schema.names


def holds_columns(path: Path) -> bool:
    """Whether the file begins as parquet or Arrow files do."""
    return begins_with(path, MAGIC, *arrow.MAGICS)


def schema_of(path: Path) -> Any:
    """The `pyarrow.Schema` of a parquet or Arrow file; None if it is neither, broken, or a cache of `datasets`."""
    if not is_parquet(path) and (not is_arrow(path) or arrow.is_cache(path)):
        return None
    try:
        with open_columns(path) as file:
            return file.schema if file.schema.names else None  # names that are no UTF-8 raise here
    except DataError:
        return None


@contextmanager
def open_columns(path: Path) -> Iterator[ParquetFile | ArrowFile]:
    """Open a parquet or Arrow file; pyarrow's exceptions become a DataError.

    Raises:
        DataError: the file is neither, truncated or corrupt.
    """
    if is_parquet(path):
        with open_parquet(path) as file:
            yield file
        return
    with arrow_errors(path):
        yield ArrowFile(path)


_ROWS = 1000
"""Rows of a batch."""


def read_batches(path: Path, names: Collection[str]) -> Iterator[tuple[float, Any]]:
    """The columns of `path` that are among `names`, as record batches, each with the share of rows before its end.

    Raises:
        DataError: the file is truncated or corrupt.
    """
    with open_columns(path) as file, arrow_errors(path):
        wanted = [name for name in file.schema.names if name in names]
        done, total = 0, max(1, file.num_rows())
        for batch in file.batches(wanted, _ROWS):
            done += batch.num_rows
            yield done / total, batch
