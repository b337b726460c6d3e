"""Reads the header of a `.npy` by a pattern; NumPy's own reader evaluates it as a Python literal."""

from __future__ import annotations

import re
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"\x93NUMPY"
_LONGEST = 10_000
_HEADER = re.compile(
    r"\s*\{\s*'descr':\s*'([<>|=]?(?:O8?|b1|[iu][1248]|f[248]))',\s*'fortran_order':\s*(?:True|False),"
    r"\s*'shape':\s*\(((?:\d{1,18},?\s*)*)\),?\s*\}\s*"
)


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype of the `.npy` in `file`, whose position is then the array's content.

    None where the file is no `.npy`, or its dtype is neither of plain numbers nor of objects.
    """
    start = file.read(len(MAGIC) + 2)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + 2 or start[-2] not in (1, 2, 3):
        return None
    size = int.from_bytes(file.read(2 if start[-2] == 1 else 4), "little")
    match = _HEADER.fullmatch(file.read(size).decode("latin1")) if size <= _LONGEST else None
    if match is None:
        return None
    return tuple(int(n) for n in match[2].replace(",", " ").split()), np.dtype(match[1])
