"""Megatron-Bridge's legacy packed `.npy`: a pickled array of dicts, read as data and never executed."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import bridge_rows
from thdprof.analyze.sources.base import Dataset, Format, fingerprint
from thdprof.analyze.sources.readers import plain_pickle, row_lists
from thdprof.analyze.sources.readers.npy_header import read_header
from thdprof.errors import DataError


def recognises(path: Path) -> bool:
    """Whether the file is `.npy` with an array of objects, of at most one dimension."""
    with path.open("rb") as file:
        header = read_header(file)
    return header is not None and header[1].hasobject and len(header[0]) <= 1


def read(paths: Sequence[Path]) -> Dataset:
    """The rows of `paths`, one file after the other.

    Raises:
        DataError: not such a file, anything but plain data in it, or a row that training could not read.
    """
    parts = [_read_rows(path) for path in paths]
    rows = row_lists.join_rows(parts, "bridge")
    return Dataset(
        format=FORMAT.name,
        uris=tuple(str(path) for path in paths),
        fingerprint=fingerprint((rows.document_tokens, rows.row_offsets)),
        content=rows,
        pack_tokens=bridge_rows.pack_size(paths, int(rows.num_tokens().max())),
    )


def _read_rows(path: Path) -> row_lists.Rows:
    """Document tokens and row offsets of one file."""
    with path.open("rb") as file:
        header = read_header(file)
        if header is None or not header[1].hasobject or len(header[0]) > 1:
            raise DataError(f"{path}: not a packed .npy: it holds no one-dimensional array of objects")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                array = plain_pickle.load(data, file.tell())
            except plain_pickle.PickleRefused as error:
                raise DataError(f"{path}: refused: {error}") from error
            if not isinstance(array, plain_pickle.Array) or not isinstance(array.data, plain_pickle.Items):
                raise DataError(f"{path}: its pickle holds no array of objects")
            if array.shape != header[0]:
                raise DataError(f"{path}: corrupt: shape {header[0]} in the header, {array.shape} in the pickle")
            return _rows_of(array.data, data, path)


def _rows_of(elements: plain_pickle.Items, data: mmap.mmap, path: Path) -> row_lists.Rows:
    if elements.length != len(elements.parts):
        raise DataError(f"{path}: row 0: is a number; rows are dicts with {', '.join(bridge_rows.KEYS)}")
    starts: list[NDArray[np.int64]] = []
    lengths, documents = [], 0
    for number, row in enumerate(elements.parts):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number}: is no dict; rows are dicts with {', '.join(bridge_rows.KEYS)}")
        values = []
        for key in bridge_rows.KEYS:
            if key not in row:
                raise DataError(f"{path}: row {number}: {key} is missing; it has {', '.join(map(repr, row))}"[:300])
            values.append(row[key])
        tokens, mask = (_length(v, path, number, k) for v, k in ((values[0], "input_ids"), (values[2], "loss_mask")))
        if tokens != mask:
            raise DataError(f"{path}: row {number}: {tokens} input_ids, but {mask} values of loss_mask")
        documents += _length(values[1], path, number, "seq_start_id")
        if documents > len(data):
            raise DataError(f"{path}: row {number}: more documents than the file has bytes; refused as hostile")
        try:
            starts.append(plain_pickle.integers_of(values[1], data))
        except plain_pickle.PickleRefused as error:
            raise DataError(f"{path}: row {number}: seq_start_id {error}") from error
        lengths.append(tokens)
    offsets = np.cumsum([0, *(len(s) for s in starts)], dtype=np.int64)
    joined = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    return bridge_rows.document_tokens(joined, offsets, np.array(lengths, dtype=np.int64), str(path)), offsets


def _length(value: Any, path: Path, row: int, key: str) -> int:
    try:
        return plain_pickle.length_of(value)
    except plain_pickle.PickleRefused as error:
        raise DataError(f"{path}: row {row}: {key} {error}") from error


FORMAT = Format(
    name="bridge-npy",
    summary="the whole pickle, as data: seq_start_id and the lengths of input_ids and loss_mask",
    suffixes=(".npy",),
    recognises=recognises,
    read=read,
)
