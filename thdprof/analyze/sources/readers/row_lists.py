"""Checks rows that are given as lists of document lengths, and joins the rows of several files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.base import PackedRows, RowRule
from thdprof.errors import DataError

Rows = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Document tokens, shape [documents], and row offsets, shape [rows + 1], of one file, as in `PackedRows`."""


def check_rows(values: NDArray[np.int64], offsets: NDArray[np.int64], where: str) -> Rows:
    """Check lists of document lengths: row r has values[offsets[r] : offsets[r + 1]].

    Raises:
        DataError: there are no rows, or a row is empty or has an impossible length; the message begins with `where`.
    """
    if len(offsets) == 1:
        raise DataError(f"{where}: holds no rows; write it again with data")
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if empty.size:
        raise DataError(f"{where}: row {empty[0]}: its list is empty; a row needs a document")
    wrong = np.flatnonzero((values < 0) | (values > np.iinfo(np.int32).max))
    if wrong.size:
        row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise DataError(f"{where}: row {row}: length {values[wrong[0]]} is not between 0 and 2**31 - 1")
    return values.astype(np.int32), offsets


def join_rows(parts: Sequence[Rows], rule: RowRule) -> PackedRows:
    """Join the rows of several files, in the order of `parts`."""
    counts = [np.diff(offsets) for _, offsets in parts]
    return PackedRows(
        document_tokens=np.concatenate([tokens for tokens, _ in parts]),
        row_offsets=np.concatenate(([0], np.cumsum(np.concatenate(counts), dtype=np.int64))),
        rule=rule,
    )
