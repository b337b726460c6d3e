"""Lengths in JSON lines, plain or compressed by gzip: every line an integer, a list of integers, or an object."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.dataset import Rows, check_lengths

KEYS = ("length", "lengths", "seq_lengths", "document_lengths", "num_tokens", "n_tokens", "token_count", "seq_len",
        "input_lengths")  # fmt: skip
"""Names of a key or column with lengths, tried in this order."""
TOKENS = "input_ids"
"""Name of a key or column with the tokens of a document, whose number is its length, where there is none of `KEYS`."""
LABELS = "labels"
"""Name of the column beside it with the tokens that are trained."""
IGNORED = -100
"""Label of a token that is not trained."""
PACKED = ("seq_start_id", "cu_seqlens", "packing_params")
"""Names that tell that the tokens beside them are of several documents."""
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, OSError)
"""What broken gzip and zstd raise; an OSError of the system has a number."""

_CHUNK_BYTES = 2**23
_PART_BYTES = 2**20
"""Bytes of lines that `read_parts` gives at a time."""
_SNIFFED_BYTES = 2**16
_LONGEST_SNIFFED_LINE = 2**25
_FREE_BYTES = 2**30
"""Bytes that any gzip may become: equal lengths are legitimate, and become up to 700 times as long."""
_EXPANSION = 200
"""Bytes that a byte of gzip may become, beyond `_FREE_BYTES`; JSON becomes 4 to 20 times as long."""
_LONGEST_PACKED_LINE = 2**27
"""Bytes of the longest line that is unpacked from gzip: a line is held in memory whole."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEFORE_A_VALUE = _BYTE_ORDER_MARK + b" \t\r\n"
_REGULAR = re.compile(rb"(?:(?:\d++|\[[^\[\]{}\n]*+\]|\{[^{}\n]*+\})[ \t]*+\r?+(?:\n|\Z))++")
"""Lines that each hold one whole value, so that a chunk of them can be parsed as one list."""
_LONG_LIST = re.compile(rb"\[[\s\d,]*\Z")
Keys = tuple[str, ...]
"""Names of keys with lengths, tried in this order; `TOKENS` may be the last."""
USUAL_KEYS: Keys = (*KEYS, TOKENS)


def begins_with_lengths(path: Path, keys: Keys = USUAL_KEYS) -> bool:
    """Whether the first line is a value of lengths, or the beginning of a long list of them."""
    head = sniff(path)
    lines = head.removeprefix(_BYTE_ORDER_MARK).lstrip().split(b"\n", 1)
    if len(lines) == 1 and len(head) == _SNIFFED_BYTES and _LONG_LIST.match(lines[0]):
        return True
    value = _first_value(lines[0])
    if isinstance(value, dict):
        key = _find_key(value, keys)
        value = None if key is None or (key == TOKENS and any(name in value for name in PACKED)) else value[key]
    return value is not None and all(type(n) in (int, float) for n in (value if isinstance(value, list) else [value]))


def begins_with_tokens(path: Path, keys: Keys = USUAL_KEYS) -> bool:
    """Whether the first line is an object whose tokens would be counted."""
    value = first_object(path)
    return value is not None and _find_key(value, keys) == TOKENS


def begins_with_list(path: Path) -> bool:
    """Whether the first line begins as a list does."""
    return sniff(path).lstrip(_BEFORE_A_VALUE).startswith(b"[")


def first_object(path: Path) -> dict[str, Any] | None:
    """The object that the first line is; None where it is none."""
    value = _first_value(sniff(path).removeprefix(_BYTE_ORDER_MARK).lstrip().split(b"\n", 1)[0])
    return value if isinstance(value, dict) else None


def sniff(path: Path) -> bytes:
    """The first bytes of the text, unpacked; all of the first line where it begins an object."""
    with path.open("rb") as raw:
        _, file = _unpack(raw)
        try:
            head = file.read(_SNIFFED_BYTES)
            if len(head) == _SNIFFED_BYTES and head.lstrip(_BEFORE_A_VALUE).startswith(b"{") and b"\n" not in head:
                head += file.readline(_LONGEST_SNIFFED_LINE)
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            return b""
    return head


def _first_value(line: bytes) -> Any:
    try:
        return json.loads(line, parse_int=len)  # any whole number, however long; the reader looks at it
    except (ValueError, RecursionError):
        return None


def _find_key(value: dict[str, Any], keys: Keys) -> str | None:
    return next((key for key in keys if key in value), None)


def _chunks(path: Path, raw: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """About `size` bytes of lines at a time of the file `raw`, unpacked."""
    name, file = _unpack(raw)
    if name is None:
        while lines := raw.readlines(size):
            yield lines
        return
    left = _FREE_BYTES + _EXPANSION * path.stat().st_size
    try:
        while lines := _some_lines(file, size, left):
            if any(len(line) == _LONGEST_PACKED_LINE and not line.endswith(b"\n") for line in lines):
                raise DataError(
                    f"{path}: refused: its {name} has a line of more than {_LONGEST_PACKED_LINE / 2**20:.0f} MiB"
                )
            left -= sum(map(len, lines))
            if left <= 0:
                raise DataError(
                    f"{path}: refused: its {name} becomes more than {_EXPANSION} times as long; unpack it first"
                )
            yield lines
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}: its {name} is truncated or corrupt: {' '.join(str(error).split())}") from error


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where gzip or zstd packed them."""
    with path.open("rb") as raw:
        yield _unpack(raw)[1]


def _unpack(raw: BinaryIO) -> tuple[str | None, BinaryIO]:
    """Name of the compression of `raw`, None without one, and a file of what it holds."""
    head = raw.read(len(ZSTD_MAGIC))
    raw.seek(0)
    if head.startswith(GZIP_MAGIC):
        return "gzip", cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head == ZSTD_MAGIC:
        import pyarrow as pa

        return "zstd", io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"))
    return None, raw


def _some_lines(file: BinaryIO, enough_bytes: int, most_bytes: int) -> list[bytes]:
    """About `enough_bytes` of lines, at most `most_bytes`; a line over `_LONGEST_PACKED_LINE` is cut."""
    lines: list[bytes] = []
    size = 0
    while size < min(enough_bytes, most_bytes) and (
        line := file.readline(min(most_bytes - size, _LONGEST_PACKED_LINE))
    ):
        lines.append(line)
        size += len(line)
    return lines


def read_lines(path: Path, keys: Keys = USUAL_KEYS) -> NDArray[np.int32] | Rows:
    """The lengths of a file of JSON lines, a chunk of whole lines at a time.

    Raises:
        DataError: a line is no value of lengths, of another kind than the lines before it, or holds a length that
            cannot be; the message names the line.
    """
    lengths, sizes = [], []
    kind = None
    for _, first, lines in read_parts(path, _CHUNK_BYTES):
        values, numbers = _parse(lines, first, path, keys)
        if not values:
            continue
        values = _look_up(values, numbers, path, keys)
        kind = kind or type(values[0])
        _require(values, kind, numbers, path, keys)
        if kind is list:
            sizes.append(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
            empty = np.flatnonzero(sizes[-1] == 0)
            if empty.size:
                raise DataError(f"{path}: line {numbers[empty[0]]}: its list is empty; a row needs a document")
            numbers = np.repeat(numbers, sizes[-1])
            values = list(chain.from_iterable(values))
            _require(values, int, numbers, path, keys)
        lengths.append(_check_range(values, numbers, path))
    if not lengths:
        raise DataError(f"{path}: holds no lengths; write it again with data")
    joined = np.concatenate(lengths)
    if kind is not list:
        return joined
    return joined, np.concatenate(([0], np.cumsum(np.concatenate(sizes))))


def read_values(path: Path, *, expected: str) -> Iterator[tuple[int, Any]]:
    """The number and the JSON value of every line that is not blank; `expected` says in errors what a line is.

    Raises:
        DataError: a line is not JSON, or the file's gzip is truncated, corrupt or refused.
    """
    for _, first, lines in read_parts(path, _CHUNK_BYTES):
        yield from _load_lines(lines, first, path, expected, "is not JSON; every line is " + expected)


def _load_lines(
    lines: list[bytes], first: int, path: Path, expected: str, too_many_digits: str
) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError | UnicodeError | RecursionError):
                fault = f"is not JSON; every line is {expected}"
            else:  # Python's limit on the digits of a number
                fault = too_many_digits
            raise DataError(f"{path}: line {number}: {_quote(line)} {fault}") from error


def read_parts(path: Path, size: int = _PART_BYTES) -> Iterator[tuple[float, int, list[bytes]]]:
    """About `size` bytes of lines at a time, with the share of the file before their end and the first line's number.

    Raises:
        DataError: the file's compression is truncated, corrupt or refused.
    """
    number, total = 1, max(1, path.stat().st_size)
    with path.open("rb") as raw:
        for lines in _chunks(path, raw, size):
            if number == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            yield min(1.0, raw.tell() / total), number, lines
            number += len(lines)


def _expected(keys: Keys) -> str:
    return f"an integer, a list of integers, or an object with one of {', '.join(keys)}"


def _parse(lines: list[bytes], first: int, path: Path, keys: Keys) -> tuple[list[Any], NDArray[np.int64]]:
    """The value of every line that is not blank, and its number; the first of `lines` is line `first`."""
    if _REGULAR.fullmatch(b"".join(lines)):
        try:
            values = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            values = []
        if len(values) == len(lines):
            return values, np.arange(first, first + len(lines), dtype=np.int64)
    pairs = list(_load_lines(lines, first, path, _expected(keys), "has a number that is not between 0 and 2**31 - 1"))
    return [value for _, value in pairs], np.array([number for number, _ in pairs], dtype=np.int64)


def _look_up(values: list[Any], numbers: NDArray[np.int64], path: Path, keys: Keys) -> list[Any]:
    """`values` themselves or, of objects, the values of the key with lengths, which the first object decides on."""
    if type(values[0]) is not dict:
        return values
    _require(values, dict, numbers, path, keys)
    key = _find_key(values[0], keys)
    if key is None:
        has = ", ".join(values[0]) or "none"
        raise DataError(f"{path}: line {numbers[0]}: has none of the keys {', '.join(keys)}; it has {has}")
    lacking = next((i for i, value in enumerate(values) if key not in value), None)
    if lacking is not None:
        raise DataError(f"{path}: line {numbers[lacking]}: has no key {key}, as lines before it have")
    return [value[key] for value in values] if key != TOKENS else _count_tokens(values, numbers, path)


def _count_tokens(values: list[Any], numbers: NDArray[np.int64], path: Path) -> list[int]:
    for number, value in zip(numbers, values, strict=True):
        packed = _find_key(value, PACKED)
        if packed is not None:
            raise DataError(
                f"{path}: line {number}: {packed} says that {TOKENS} are of several documents; give their lengths"
            )
        tokens = value[TOKENS]
        if type(tokens) is not list or not set(map(type, tokens)) <= {int}:
            raise DataError(f"{path}: line {number}: {TOKENS} is no list of integers")
    return [len(value[TOKENS]) for value in values]


def _require(values: list[Any], kind: type, numbers: NDArray[np.int64], path: Path, keys: Keys) -> None:
    """Refuse values whose type is not `kind`, and a `kind` that is none of those of lengths."""
    if kind in (int, list, dict) and set(map(type, values)) <= {kind}:
        return
    at = next(i for i, value in enumerate(values) if type(value) is not kind or kind not in (int, list, dict))
    value = values[at]
    where = f"{path}: line {numbers[at]}"
    if type(value) in (int, list, dict):
        raise DataError(f"{where}: {_quote(value)} is of another kind than the lines before it; do not mix them")
    fault = "is not a whole number" if type(value) is float else "is no length"
    raise DataError(f"{where}: {_quote(value)} {fault}; every line is {_expected(keys)}")


def _check_range(values: list[int], numbers: NDArray[np.int64], path: Path) -> NDArray[np.int32]:
    try:
        lengths = np.array(values, dtype=np.int64)
    except OverflowError:
        lengths = np.array(values, dtype=object)
    return check_lengths(lengths, lambda at: f"{path}: line {numbers[at]}")


def _quote(value: Any) -> str:
    text = value.strip().decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:41])
    return text if len(text) <= 40 else text[:37] + "..."
