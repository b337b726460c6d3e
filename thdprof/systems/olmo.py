"""OLMo-core's token files, which have no header: `NAME.csv.gz` tells where documents in `NAME.npy` begin and end.

A line begins with the start and the end of a document. `NAME.npy` is no file of NumPy's format. Tokens between two
documents are of none. Rules: OLMo-core 3.0, `data/utils.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read import json_lines
from thdprof.read.dataset import Format, Shard, check_documents, join_documents

_LINE = re.compile(rb"(\d{1,18}),(\d{1,18})(?:,[^\n]*)?\r?\n?")


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


def _scan(path: Path) -> Shard:
    return Shard((check_documents(_read_metadata(path), path),))


FORMAT = Format(
    name="olmo",
    summary="the starts and ends of documents in `.csv.gz` (the `.npy` need not exist)",
    suffixes=(".csv.gz",),
    recognises=_is_metadata,
    scan=_scan,
    join=join_documents,
)
