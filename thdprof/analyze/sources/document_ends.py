"""Token files without a header, beside which a file tells where documents end: datatrove's and OLMo-core's.

- datatrove 0.10, `pipeline/tokens/tokenizer.py`: `NAME.ds.index` holds the end of every document in `NAME.ds`, counted
  in tokens, as little-endian u64.
- OLMo-core 3.0, `data/utils.py`: a line of `NAME.csv.gz` begins with the start and the end of a document of `NAME.npy`,
  which is no file of NumPy's format. Tokens between two documents are of none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.base import Format, Shard, check_lengths, join_documents
from thdprof.analyze.sources.readers import json_lines
from thdprof.errors import DataError

_LINE = re.compile(rb"(\d{1,18}),(\d{1,18})(?:,[^\n]*)?\r?\n?")


def _is_index(path: Path) -> bool:
    """Whether the file is named as datatrove's indexes are, and holds whole u64 numbers."""
    return path.name.endswith(".ds.index") and path.stat().st_size % 8 == 0


def _read_index(path: Path) -> NDArray[np.int64]:
    if not _is_index(path):
        raise DataError(f"{path}: is no NAME.ds.index of datatrove: {path.stat().st_size} bytes are no u64 numbers")
    with path.open("rb") as file:
        ends = np.frombuffer(file.read(), dtype="<u8")
    lengths = np.diff(np.concatenate(([0], ends.astype(np.int64))))
    if (wrong := np.flatnonzero(lengths < 0)).size:
        before = ends[wrong[0] - 1] if wrong[0] else 0
        raise DataError(
            f"{path}: document {wrong[0]}: ends at {ends[wrong[0]]}, before the end {before} of the last one"
        )
    tokens, total = path.with_suffix(""), int(ends[-1]) if len(ends) else 0
    if tokens.is_file() and (size := tokens.stat().st_size) not in (2 * total, 4 * total):
        raise DataError(f"{path}: tells of {total} tokens, and {tokens.name} has {size} bytes: write both again")
    return lengths


def _is_metadata(path: Path) -> bool:
    """Whether the file is named as OLMo-core's metadata are, and its first line begins with 0 and a number."""
    if not path.name.endswith(".csv.gz"):
        return False
    first = _LINE.fullmatch(json_lines.sniff(path).partition(b"\n")[0])
    return first is not None and int(first[1]) == 0


def _read_metadata(path: Path) -> NDArray[np.int64]:
    parts = [np.empty(0, dtype=np.int64)]
    for _, first, lines in json_lines.read_parts(path):
        lengths = np.empty(len(lines), dtype=np.int64)
        for number, line in enumerate(lines):
            if (match := _LINE.fullmatch(line)) is None or int(match[1]) > int(match[2]):
                text = line.strip().decode(errors="replace")[:40]
                where = f"{path}: line {first + number}"
                raise DataError(f"{where}: {text!r} does not begin with the start and end of a document")
            lengths[number] = int(match[2]) - int(match[1])
        parts.append(lengths)
    return np.concatenate(parts)


def _scan(path: Path, read_file: Callable[[Path], NDArray[np.int64]]) -> Shard:
    lengths = check_lengths(read_file(path), lambda at: f"{path}: document {at}")
    if len(lengths) == 0:
        raise DataError(f"{path}: holds no documents; write it again with data")
    return Shard((lengths,))


DATATROVE = Format(
    name="datatrove",
    summary="the ends of documents in `.ds.index` (the `.ds` need not exist)",
    suffixes=(".ds.index",),
    recognises=_is_index,
    scan=partial(_scan, read_file=_read_index),
    join=join_documents,
)
OLMO = Format(
    name="olmo",
    summary="the starts and ends of documents in `.csv.gz` (the `.npy` need not exist)",
    suffixes=(".csv.gz",),
    recognises=_is_metadata,
    scan=partial(_scan, read_file=_read_metadata),
    join=join_documents,
)
