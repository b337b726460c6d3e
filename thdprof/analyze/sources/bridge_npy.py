"""Megatron-Bridge's legacy packed `.npy`: a pickled array of dicts, which is read without executing code in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thdprof.analyze.sources import bridge_rows
from thdprof.analyze.sources.base import Dataset, Format, fingerprint
from thdprof.analyze.sources.readers import plain_pickle, row_lists
from thdprof.analyze.sources.readers.npy_header import read_header
from thdprof.errors import DataError


def recognises(path: Path) -> bool:
    """Whether the file is a `.npy` of objects with at most one dimension."""
    with path.open("rb") as file:
        header = read_header(file)
    return header is not None and header[1].hasobject and len(header[0]) <= 1


def read(paths: Sequence[Path]) -> Dataset:
    """The rows of `paths`, one file after the other.

    Raises:
        DataError: a file is no such `.npy`, holds anything but plain data, or has a row that training could not read.
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
    with path.open("rb", buffering=0) as file:  # the child process reads on where this one stops
        header = read_header(file)
        if header is None or not header[1].hasobject or len(header[0]) > 1:
            raise DataError(f"{path}: not a packed .npy: it holds no one-dimensional array of objects")
        rows = plain_pickle.read_rows(file, header[0], path)
    offsets = np.concatenate(([0], np.cumsum(rows.num_documents)))
    return bridge_rows.document_tokens(rows.starts, offsets, rows.num_tokens, str(path)), offsets


FORMAT = Format(
    name="bridge-npy",
    summary="the whole pickle, as data: seq_start_id and the lengths of input_ids and loss_mask",
    sign=".npy of a one-dimensional array of objects",
    suffixes=(".npy",),
    recognises=recognises,
    read=read,
)
