"""Pages of a parquet column chunk: their headers, and the lengths of lists from repetition levels alone.

pyarrow gives the lengths of a column's lists only together with all their values. Repetition levels are run-length
encoded, so that the lengths of lists with thousands of values take a few bytes each; this module reads those bytes
only. Reading list lengths from the levels saves 0.8 s of a command of 1.4 s: `thdprof analyze` of Megatron-Bridge's
packed parquet with 40,000 rows of 4,096 tokens, 369 MB, as `benchmarks/analyze.py` writes it (1.1 s of 1.9 s of
processor time).
Format: parquet.thrift (PageHeader) and Encodings.md (RLE) of apache/parquet-format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.readers.parquet_thrift import CorruptThrift, read_struct, read_varint

_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_RLE = 3
_CODECS = {
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
    "LZ4_RAW": "lz4_raw",
    "UNCOMPRESSED": None,
}
_INFLATION = 64
"""Uncompressed bytes that a page may claim for each compressed byte, beyond `_FREE_BYTES`."""
_FREE_BYTES = 2**29


class CorruptPage(Exception):
    """The pages contradict themselves or their chunk; the text says how."""


class UnsupportedPage(Exception):
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


def pages(chunk: memoryview) -> Iterator[Page]:
    """The pages of a whole column chunk.

    Raises:
        CorruptPage: a header cannot be read, or claims more than the chunk can hold.
    """
    position, allowance = 0, _FREE_BYTES + _INFLATION * len(chunk)
    while position < len(chunk):
        try:
            header, position = read_struct(chunk, position)
        except CorruptThrift as error:
            raise CorruptPage(f"a page header {error}") from error
        kind, inflated, size = header.get(1), header.get(2), header.get(3)
        if not (isinstance(kind, int) and isinstance(inflated, int) and isinstance(size, int)):
            raise CorruptPage("a page header lacks its type or sizes")
        allowance -= inflated
        if not 0 <= size <= len(chunk) - position or inflated < 0 or allowance < 0:
            raise CorruptPage(f"a page claims {size} bytes, {inflated} uncompressed")
        own = header.get({_DATA_PAGE: 5, _DATA_PAGE_V2: 8}.get(kind, 0), {})
        yield Page(kind, own if isinstance(own, dict) else {}, chunk[position : position + size], inflated)
        position += size


def num_values(page: Page) -> int:
    """Number of values of a data page, of levels where the column holds lists; 0 for pages of other kinds."""
    if page.kind not in (_DATA_PAGE, _DATA_PAGE_V2):
        return 0
    count = page.header.get(1)
    if not isinstance(count, int) or count < 0:
        raise CorruptPage("a data page has no number of values")
    return count


def list_lengths(chunk: memoryview, *, codec: str, max_definition: int, rows: int) -> NDArray[np.int64]:
    """Lengths of the lists of one column chunk that has no null and no empty list, shape [rows].

    `codec` is parquet's name of the chunk's compression, `max_definition` the column's highest definition level.

    Raises:
        CorruptPage: the levels end early, or do not make `rows` lists.
        UnsupportedPage: there are nulls or empty lists, or an encoding is not decoded here.
    """
    starts, total = [], 0
    for page in pages(chunk):
        count = num_values(page)
        if count:
            repetition, definition = _levels(page, codec)
            try:
                all_there = _all_equal(definition, count, max_definition)
            except (IndexError, CorruptThrift) as error:
                raise CorruptPage("the definition levels end early") from error
            if not all_there:
                raise UnsupportedPage("nulls or empty lists")
            starts.append(_zeros(repetition, count) + total)
            total += count
    row_starts = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    if len(row_starts) != rows or (rows and row_starts[0] != 0):
        raise CorruptPage(f"its levels make {len(row_starts)} rows where the footer has {rows}")
    return np.diff(row_starts, append=total)


def _levels(page: Page, codec: str) -> tuple[bytes, bytes]:
    """The run-length encoded repetition and definition levels of a data page."""
    if page.kind == _DATA_PAGE_V2:  # the levels lie uncompressed before the values
        definition, repetition = page.header.get(5), page.header.get(6)
        if not isinstance(definition, int) or not isinstance(repetition, int):
            raise CorruptPage("a data page lacks the sizes of its levels")
        if min(definition, repetition) < 0 or definition + repetition > len(page.body):
            raise CorruptPage("the levels of a data page are longer than the page")
        levels = bytes(page.body[: repetition + definition])
        return levels[:repetition], levels[repetition:]
    if page.header.get(3) != _RLE or page.header.get(4) != _RLE:
        raise UnsupportedPage("levels not run-length encoded")
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

    if codec not in _CODECS:
        raise UnsupportedPage(f"compression {codec}")
    name = _CODECS[codec]
    if name is None:
        return page.body
    try:
        return memoryview(pa.Codec(name).decompress(page.body, decompressed_size=page.uncompressed_bytes))
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise CorruptPage(f"a page does not decompress ({codec})") from error


def _zeros(encoded: bytes, count: int) -> NDArray[np.int64]:
    """Positions of the zeros among `count` levels of one bit each, ascending, shape [zeros]."""
    try:
        packed_at, packed_groups, packed, runs = _split_runs(encoded, count)
    except (IndexError, CorruptThrift) as error:
        raise CorruptPage("the repetition levels end early") from error
    zeros = [np.arange(at, min(at + length, count), dtype=np.int64) for at, length in runs]
    if packed:
        groups = np.array(packed_groups)
        before = np.cumsum(groups) - groups
        first = np.repeat(
            np.array(packed_at, dtype=np.int64) - 8 * before, groups
        )  # the level at which byte 0 would lie
        bits = np.unpackbits(np.frombuffer(b"".join(packed), dtype=np.uint8), bitorder="little")
        if len(bits) != 8 * len(first):
            raise CorruptPage("the repetition levels end early")
        unset = np.flatnonzero(bits == 0)
        positions = first[unset >> 3] + unset
        zeros.append(positions[positions < count])
    return np.sort(np.concatenate(zeros)) if zeros else np.empty(0, dtype=np.int64)


def _split_runs(encoded: bytes, count: int) -> tuple[list[int], list[int], list[bytes], list[tuple[int, int]]]:
    """Bit-packed runs (first level, groups of eight, bytes) and runs of zeros (first level, levels) of `encoded`.

    The loop runs twice for each row of the dataset, so numbers of one and two bytes are read without a call.

    Raises:
        IndexError: `encoded` ends before `count` levels.
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
                header, position = read_varint(encoded, position)
        else:
            position += 1
        if header < 2:
            raise CorruptPage("the repetition levels have an empty run")
        if header & 1:
            groups = header >> 1
            packed_at.append(at)
            packed_groups.append(groups)
            packed.append(encoded[position : position + groups])
            position += groups
            at += 8 * groups
        else:
            if not encoded[position]:
                runs.append((at, header >> 1))
            position += 1
            at += header >> 1
    return packed_at, packed_groups, packed, runs


def _all_equal(encoded: bytes, count: int, level: int) -> bool:
    """Whether the `count` levels in `encoded` are all `level`, which is the highest level of the column."""
    width = level.bit_length()
    position = at = 0
    while at < count:
        header, position = read_varint(encoded, position)
        if header & 1:
            size = (header >> 1) * width
            valid_bits = min(size * 8, (count - at) * width)
            bits = np.unpackbits(np.frombuffer(encoded[position : position + size], dtype=np.uint8), bitorder="little")
            if not size or len(bits) < size * 8:
                raise CorruptPage("the definition levels end early")
            expected = np.resize(np.array([level >> i & 1 for i in range(width)], dtype=np.uint8), valid_bits)
            if not np.array_equal(bits[:valid_bits], expected):
                return False
            position += size
            at += (header >> 1) * 8
        else:
            if not header:
                raise CorruptPage("the definition levels have an empty run")
            if encoded[position] != level:
                return False
            position += 1
            at += header >> 1
    return True
