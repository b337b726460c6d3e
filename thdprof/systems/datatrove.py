"""datatrove's token files, which have no header: `NAME.ds.index` holds the end of every document in `NAME.ds`.

Ends are counted in tokens, as little-endian u64. Rules: datatrove 0.10, `pipeline/tokens/tokenizer.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.dataset import Format, Shard, check_documents, join_documents


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


def _scan(path: Path) -> Shard:
    return Shard((check_documents(_read_index(path), path),))


FORMAT = Format(
    name="datatrove",
    summary="the ends of documents in `.ds.index` (the `.ds` need not exist)",
    suffixes=(".ds.index",),
    recognises=_is_index,
    scan=_scan,
    join=join_documents,
)
