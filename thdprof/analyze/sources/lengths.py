"""Plain document lengths: JSON lines, parquet or `.npy`.

- JSON lines: every line an integer, a list of integers, or an object with one of `KEYS`.
- parquet: one of `KEYS` as a column of integers or lists of integers.
- `.npy`: integers of one dimension.

Integers are documents that a packer has yet to pack; lists are packed rows. A length may be zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.base import Content, Dataset, Format, UnpackedDocuments, check_lengths, fingerprint
from thdprof.analyze.sources.readers import arrow_columns, npy_header, parquet_file, row_lists
from thdprof.errors import DataError

KEYS = ("length", "lengths", "seq_lengths", "document_lengths", "num_tokens")
"""Names of a key or column with lengths, tried in this order."""
_CHUNK_BYTES = 2**23
_SNIFFED_BYTES = 2**16
_LONGEST_SNIFFED_LINE = 2**25
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEFORE_A_VALUE = _BYTE_ORDER_MARK + b" \t\r\n"
_REGULAR = re.compile(rb"(?:(?:\d++|\[[^\[\]{}\n]*+\]|\{[^{}\n]*+\})[ \t]*+\r?+(?:\n|\Z))++")
"""Lines that each hold one whole value, so that a chunk of them can be parsed as one list."""
_LONG_LIST = re.compile(rb"\[[\s\d,]*\Z")
_WHAT = f"an integer, a list of integers, or an object with one of {', '.join(KEYS)}"

Lengths = NDArray[np.int32] | row_lists.Rows
"""What one file holds: lengths of single documents, or of rows."""


def recognises(path: Path) -> bool:
    """Whether the file holds lengths and nothing that another format could mean."""
    with path.open("rb") as file:
        head = file.read(_SNIFFED_BYTES)
        file.seek(0)
        if head.startswith(npy_header.MAGIC):
            header = npy_header.read_header(file)
            return header is not None and len(header[0]) == 1 and header[1].kind in "iu"
        if len(head) == _SNIFFED_BYTES and head.lstrip(_BEFORE_A_VALUE).startswith(b"{") and b"\n" not in head:
            file.seek(len(head))
            head += file.readline(_LONGEST_SNIFFED_LINE)
    if head.startswith(parquet_file.MAGIC):
        schema = parquet_file.parquet_schema(path)
        return schema is not None and _column_of(schema) is not None
    return _begins_with_lengths(head)


def read(paths: Sequence[Path]) -> Dataset:
    """The lengths of `paths`, one file after the other.

    Raises:
        DataError: neither of the kinds, integers mixed with lists, a length that cannot be.
    """
    parts = [_read_file(path) for path in paths]
    rows = [part for part in parts if isinstance(part, tuple)]
    documents = [part for part in parts if not isinstance(part, tuple)]
    content: Content
    if rows and documents:
        other = next(path for path, part in zip(paths, parts, strict=True) if not isinstance(part, tuple))
        raise DataError(f"{other}: holds single lengths where another file holds lists; analyse them apart")
    if rows:
        content = row_lists.join_rows(rows, "concatenate")
        digest = fingerprint((content.document_tokens, content.row_offsets))
    else:
        content = UnpackedDocuments(document_tokens=np.concatenate(documents))
        digest = fingerprint((content.document_tokens,))
    return Dataset(format=FORMAT.name, uris=tuple(map(str, paths)), fingerprint=digest, content=content)


def _read_file(path: Path) -> Lengths:
    with path.open("rb") as file:
        head = file.read(len(npy_header.MAGIC))
    if head.startswith(parquet_file.MAGIC):
        return _read_parquet(path)
    return _read_npy(path) if head == npy_header.MAGIC else _read_lines(path)


def _read_parquet(path: Path) -> Lengths:
    with parquet_file.open_parquet(path) as file:
        name = _column_of(file.schema)
        if name is None:
            raise DataError(f"{path}: no column of integers or lists of them is named {', '.join(KEYS)}")
        column, where = file.read_column(name), f"{path}: column {name}"
        if arrow_columns.is_list(column.type):
            return row_lists.check_rows(*arrow_columns.list_integers(column, where), where)
        return _documents(arrow_columns.integers(column, where), where)


def _column_of(schema: Any) -> str | None:
    """The first of `KEYS` that is a column of integers or of lists of integers."""
    import pyarrow.types as types

    for name in KEYS:
        if schema.get_field_index(name) >= 0:
            kind = schema.field(name).type
            if types.is_integer(kind.value_type if arrow_columns.is_list(kind) else kind):
                return name
    return None


def _read_npy(path: Path) -> Lengths:
    with path.open("rb") as file:
        header = npy_header.read_header(file)
        if header is None or len(header[0]) != 1 or header[1].kind not in "iu":
            raise DataError(f"{path}: is no .npy of integers of one dimension")
        (count,), dtype = header
        held = path.stat().st_size - file.tell()
        if held != count * dtype.itemsize:
            raise DataError(
                f"{path}: truncated or corrupt: {held} bytes of content, {count} lengths of {dtype.itemsize}"
            )
        return _documents(np.fromfile(file, dtype=dtype, count=count), str(path))


def _documents(lengths: NDArray[np.integer], where: str) -> NDArray[np.int32]:
    if len(lengths) == 0:
        raise DataError(f"{where}: holds no lengths; write it again with data")
    return check_lengths(lengths, where)


def _begins_with_lengths(head: bytes) -> bool:
    """Whether the first line of text is a value of lengths, or the beginning of a long list of them."""
    lines = head.removeprefix(_BYTE_ORDER_MARK).lstrip().split(b"\n", 1)
    if len(lines) == 1 and len(head) == _SNIFFED_BYTES and _LONG_LIST.match(lines[0]):
        return True
    try:
        value = json.loads(lines[0], parse_int=len)  # any whole number, however long; the reader looks at it
    except (ValueError, RecursionError):
        return False
    if isinstance(value, dict):
        value = next((value[key] for key in KEYS if key in value), None)
    return all(type(n) in (int, float) for n in (value if isinstance(value, list) else [value]))


def _read_lines(path: Path) -> Lengths:
    """The lengths of a file of JSON lines, a chunk of whole lines at a time."""
    lengths, sizes = [], []
    kind, first = None, 1
    with path.open("rb") as file:
        while lines := file.readlines(_CHUNK_BYTES):
            if first == 1:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            values, numbers = _parse(lines, first, path)
            first += len(lines)
            if not values:
                continue
            values = _look_up(values, numbers, path)
            kind = kind or type(values[0])
            _require(values, kind, numbers, path)
            if kind is list:
                sizes.append(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
                empty = np.flatnonzero(sizes[-1] == 0)
                if empty.size:
                    raise DataError(f"{path}: line {numbers[empty[0]]}: its list is empty; a row needs a document")
                numbers = np.repeat(numbers, sizes[-1])
                values = list(chain.from_iterable(values))
                _require(values, int, numbers, path)
            lengths.append(_in_range(values, numbers, path))
    if not lengths:
        raise DataError(f"{path}: holds no lengths; write it again with data")
    joined = np.concatenate(lengths)
    if kind is not list:
        return joined
    return joined, np.concatenate(([0], np.cumsum(np.concatenate(sizes))))


def _parse(lines: list[bytes], first: int, path: Path) -> tuple[list[Any], NDArray[np.int64]]:
    """The value of every line that is not blank, and its number; the first of `lines` is line `first`."""
    numbers = np.arange(first, first + len(lines), dtype=np.int64)
    if _REGULAR.fullmatch(b"".join(lines)):
        try:
            values = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            values = []
        if len(values) == len(lines):
            return values, numbers
    values, kept = [], []
    for number, line in zip(numbers, lines, strict=True):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError | UnicodeError | RecursionError):
                fault = f"{_shown(line)} is not JSON; every line is {_WHAT}"
            else:  # Python's limit on the digits of a number
                fault = f"{_shown(line)} has a number that is not between 0 and 2**31 - 1"
            raise DataError(f"{path}: line {number}: {fault}") from error
        kept.append(number)
    return values, np.array(kept, dtype=np.int64)


def _look_up(values: list[Any], numbers: NDArray[np.int64], path: Path) -> list[Any]:
    """Objects replaced by what their key with lengths holds: that of the first of them, the same in all."""
    if type(values[0]) is not dict:
        return values
    _require(values, dict, numbers, path)
    key = next((key for key in KEYS if key in values[0]), None)
    if key is None:
        raise DataError(f"{path}: line {numbers[0]}: has none of the keys {', '.join(KEYS)}")
    lacking = next((i for i, value in enumerate(values) if key not in value), None)
    if lacking is not None:
        raise DataError(f"{path}: line {numbers[lacking]}: has no key {key}, as lines before it have")
    return [value[key] for value in values]


def _require(values: list[Any], kind: type, numbers: NDArray[np.int64], path: Path) -> None:
    """Refuse values of another type than `kind`, or that no line of lengths has."""
    if kind in (int, list, dict) and set(map(type, values)) <= {kind}:
        return
    at = next(i for i, value in enumerate(values) if type(value) is not kind or kind not in (int, list, dict))
    value = values[at]
    where = f"{path}: line {numbers[at]}"
    if type(value) in (int, list, dict):
        raise DataError(f"{where}: {_shown(value)} is of another kind than the lines before it; do not mix them")
    fault = "is not a whole number" if type(value) is float else "is no length"
    raise DataError(f"{where}: {_shown(value)} {fault}; every line is {_WHAT}")


def _in_range(values: list[int], numbers: NDArray[np.int64], path: Path) -> NDArray[np.int32]:
    try:
        lengths = np.array(values, dtype=np.int64)
        wrong = np.flatnonzero((lengths < 0) | (lengths > np.iinfo(np.int32).max))
    except OverflowError:
        wrong = np.array([i for i, value in enumerate(values) if not 0 <= value < 2**31])
    if wrong.size:
        at = wrong[0]
        raise DataError(f"{path}: line {numbers[at]}: length {_shown(values[at])} is not between 0 and 2**31 - 1")
    return lengths.astype(np.int32)


def _shown(value: Any) -> str:
    text = value.strip().decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


FORMAT = Format(
    name="lengths",
    summary=f"integers or lists of integers: JSON lines, parquet ({', '.join(KEYS)}), .npy",
    suffixes=(".jsonl", ".parquet", ".pq", ".npy"),
    recognises=recognises,
    read=read,
)
