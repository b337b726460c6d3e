"""Megatron's IndexedDataset: only `<prefix>.idx` is read, never the `.bin`.

Layout, little-endian (megatron/core/datasets/indexed_dataset.py): magic (9 bytes), u64 version, u8 dtype code,
u64 sequences N, u64 document indices D, then int32 length[N], int64 pointer[N], int64 document_index[D] and, for
multimodal data, int8 mode[N].
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thdprof.analyze.sources.base import Dataset, Format, TokenStream, check_lengths
from thdprof.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = range(1, 9)


def recognises(path: Path) -> bool:
    """Whether the file begins with the IndexedDataset magic."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_stream(path: Path) -> TokenStream:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise DataError(f"{path}: not a Megatron IndexedDataset index: it begins with {head[:9]!r}, not {MAGIC!r}")
        if len(head) < HEADER.size:
            raise DataError(f"{path}: truncated: {size} bytes, the header alone has {HEADER.size}")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{path}: IndexedDataset version {version}; version 1 is the only one known")
        if code not in DTYPE_CODES:
            raise DataError(f"{path}: token dtype code {code}; known codes are 1 to 8")
        needed = HEADER.size + 12 * sequences + 8 * documents
        if size not in (needed, needed + sequences):
            raise DataError(
                f"{path}: {size} bytes, but {sequences} sequences and {documents} document indices need {needed}"
                f"{'' if size > needed else ': the file is truncated or its counts are wrong'}"
            )
        if sequences == 0:
            raise DataError(f"{path}: holds no sequences; write it again with data")
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
    return TokenStream(path=str(path), sequence_tokens=check_lengths(lengths, str(path), "sequence"))


def read(paths: Sequence[Path]) -> Dataset:
    """Read one token stream from each of `paths`, in their order; several streams are a blend."""
    return Dataset.from_content(FORMAT.name, paths, [_read_stream(path) for path in paths])


FORMAT = Format(
    name="megatron",
    summary="int32 sequence lengths of the `.idx` (the `.bin` need not exist)",
    suffixes=(".idx",),
    recognises=recognises,
    read=read,
)
