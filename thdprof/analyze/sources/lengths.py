"""Plain document lengths: JSON lines, parquet, Arrow or `.npy`.

- JSON lines, also compressed by gzip: every line an integer, a list of integers, or an object with one of `KEYS`.
- parquet and Arrow: one of `KEYS` as a column of integers or lists of integers.
- `.npy`: integers of one dimension.

Integers are documents that a packer has yet to pack; lists are packed rows. A length may be zero.
Where there is none of `KEYS`, each list `TOKENS` is a document. Only its length is read, in parquet and Arrow without
the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import base
from thdprof.analyze.sources.base import Content, Dataset, Format, UnpackedDocuments, check_lengths
from thdprof.analyze.sources.readers import arrow, json_lines, npy
from thdprof.analyze.sources.readers.json_lines import KEYS, PACKED, TOKENS, Lengths
from thdprof.analyze.sources.readers.parquet import holds_columns, open_columns, schema_of
from thdprof.errors import DataError


def recognises(path: Path) -> bool:
    """Whether the file holds lengths, or lists of tokens, and nothing that another format could mean."""
    with path.open("rb") as file:
        if file.read(len(npy.MAGIC)) == npy.MAGIC:
            file.seek(0)
            header = npy.read_header(file)
            return header is not None and len(header[0]) == 1 and header[1].kind in "iu"
    if holds_columns(path):  # TRL's packed data alone are written as Arrow with seq_lengths
        return _column_of(schema_of(path)) not in (None, *(["seq_lengths"] if arrow.is_arrow(path) else []))
    return json_lines.begins_with_lengths(path)


def _holds_tokens(path: Path) -> bool:
    if holds_columns(path):
        return _column_of(schema_of(path)) == TOKENS
    return json_lines.begins_with_tokens(path)


def read(paths: Sequence[Path]) -> Dataset:
    """Read the lengths of `paths`, one file after the other.

    Raises:
        DataError: a file holds no lengths, files of integers are mixed with files of lists, or a length is impossible.
    """
    parts = [_read_file(path) for path in paths]
    rows = [part for part in parts if isinstance(part, tuple)]
    documents = [part for part in parts if not isinstance(part, tuple)]
    content: Content
    if rows and documents:
        other = next(path for path, part in zip(paths, parts, strict=True) if not isinstance(part, tuple))
        raise DataError(f"{other}: holds single lengths where another file holds lists; analyse them apart")
    if rows:
        content = base.join_rows(rows, "concatenate")
    else:
        content = UnpackedDocuments(document_tokens=np.concatenate(documents))
    note = f"each list {TOKENS} is counted as one document; if they are packed, give the lengths of their documents"
    return Dataset.from_content(FORMAT.name, paths, content, notes=(note,) if any(map(_holds_tokens, paths)) else ())


def _read_file(path: Path) -> Lengths:
    with path.open("rb") as file:
        is_npy = file.read(len(npy.MAGIC)) == npy.MAGIC
    if holds_columns(path):
        return _read_column(path)
    return _read_npy(path) if is_npy else json_lines.read_lines(path)


def _read_column(path: Path) -> Lengths:
    with open_columns(path) as file:
        name = _column_of(file.schema)
        if name is None:
            raise DataError(f"{path}: no column of integers or lists of them is named {', '.join(KEYS)}, nor {TOKENS}")
        where = f"{path}: column {name}"
        if name == TOKENS:
            return _documents(file.row_lengths(name), where)
        column = file.read_column(name)
        if arrow.is_list(column.type):
            return base.check_rows(*arrow.list_integers(column, where), where)
        return _documents(arrow.integers(column, where), where)


def _column_of(schema: Any) -> str | None:
    """The first of `KEYS` that is a column of integers or of lists of integers, else `TOKENS`."""
    import pyarrow.types as types

    if schema is None:
        return None
    for name in KEYS:
        if schema.get_field_index(name) >= 0:
            kind = schema.field(name).type
            if types.is_integer(kind.value_type if arrow.is_list(kind) else kind):
                return name
    if schema.get_field_index(TOKENS) < 0 or any(name in schema.names for name in PACKED):
        return None
    kind = schema.field(TOKENS).type
    return TOKENS if arrow.is_list(kind) and types.is_integer(kind.value_type) else None


def _read_npy(path: Path) -> Lengths:
    with path.open("rb") as file:
        header = npy.read_header(file)
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


FORMAT = Format(
    name="lengths",
    summary=f"integers or lists of integers: JSON lines, parquet or Arrow ({', '.join(KEYS)}), .npy; or lists {TOKENS}",
    sign=f"JSON lines (also .gz), parquet or Arrow with {', '.join(KEYS)} or lists {TOKENS}; or .npy of integers",
    suffixes=(".jsonl", ".jsonl.gz", ".parquet", ".pq", ".arrow", ".npy"),
    recognises=recognises,
    read=read,
    yields=_holds_tokens,
)
