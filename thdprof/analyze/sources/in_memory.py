"""Document lengths that a Python program holds already: a list or array of lengths, or a list of rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.base import Content, Dataset, PackedRows, UnpackedDocuments
from thdprof.errors import UsageError

Documents = Sequence[int] | NDArray[np.integer[Any]]
"""Lengths of documents in tokens: whole numbers of 0 to 2**31 - 1, shape [documents]."""
Lengths = Documents | Sequence[Documents]
"""Lengths of documents that are not packed yet; or rows, each with the lengths of the documents packed in it."""

FORMAT = "lengths"
"""The format's name: these lengths are analysed as those of a file of format `lengths`."""
URI = "<lengths>"
"""Stands for a file's name in results."""
_MOST = np.iinfo(np.int32).max


def lengths_dataset(lengths: Lengths) -> Dataset:
    """The dataset that `lengths` are: documents for a packer, or packed rows where they are lists of lengths.

    Raises:
        UsageError: nothing is there, a row is empty, rows and lengths are mixed, or a length is no whole number of 0 to
            2**31 - 1; the message names the index and the value.
    """
    if isinstance(lengths, np.ndarray) and lengths.ndim != 1:
        raise UsageError(
            f"lengths: the array has {lengths.ndim} dimensions; give one of one dimension, or a list of such arrays"
        )
    if len(lengths) == 0:
        raise UsageError("lengths: the list is empty; give the length of at least one document")
    content: Content
    if _is_list(lengths[0]):
        content = _rows(lengths)
    else:
        content = UnpackedDocuments(document_tokens=_check_integers(lengths, "lengths"))
    dataset = Dataset.from_content(FORMAT, [URI], content)
    if dataset.num_tokens() == 0:
        raise UsageError("lengths: have no tokens: every length is 0")
    return dataset


def _rows(lengths: Sequence[Any] | NDArray[Any]) -> PackedRows:
    rows = []
    for index, row in enumerate(lengths):
        where = f"lengths[{index}]"
        if not _is_list(row):
            raise UsageError(f"{where}: {row!r:.40} is no list, as lengths[0] is; give lengths or rows, not both")
        if isinstance(row, np.ndarray) and row.ndim != 1:
            raise UsageError(f"{where}: the array has {row.ndim} dimensions; a row has one")
        if len(row) == 0:
            raise UsageError(f"{where}: its list is empty; a row needs a document")
        rows.append(_check_integers(row, where))
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return PackedRows(document_tokens=np.concatenate(rows), row_offsets=np.concatenate(([0], np.cumsum(sizes))))


def _check_integers(lengths: Any, where: str) -> NDArray[np.int32]:
    if not isinstance(lengths, np.ndarray):
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, lengths))):
            index = next(i for i, v in enumerate(lengths) if isinstance(v, bool) or not isinstance(v, int | np.integer))
            kind = "a list, as lengths[0] is not" if _is_list(lengths[index]) else "no whole number"
            raise UsageError(f"{where}[{index}]: {lengths[index]!r:.40} is {kind}; give lengths in tokens")
        try:
            lengths = np.array(lengths, dtype=np.int64)
        except OverflowError:
            lengths = np.array(lengths, dtype=object)
    elif lengths.dtype.kind not in "iu":
        first = f"; {where}[0] is {lengths[0]}" if lengths.size else ""
        raise UsageError(f"{where}: an array of {lengths.dtype} holds no whole numbers{first}; give lengths in tokens")
    wrong = np.flatnonzero((lengths < 0) | (lengths > _MOST))
    if wrong.size:
        raise UsageError(f"{where}[{wrong[0]}]: length {lengths[wrong[0]]} is not between 0 and 2**31 - 1")
    return np.asarray(lengths, dtype=np.int32)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
