"""Megatron's IndexedDataset: only `<prefix>.idx` is read. Tokens of the `.bin` are read where packs of it are written.

Layout, little-endian (megatron/core/datasets/indexed_dataset.py): magic (9 bytes), u64 version, u8 dtype code,
u64 sequences N, u64 document indices D, then int32 length[N], int64 pointer[N], int64 document_index[D] and, for
multimodal data, int8 mode[N].
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.base import Dataset, Format, Reading, Shard, TokenStream, check_lengths
from thdprof.analyze.sources.remote import begins_with
from thdprof.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Types of tokens by their codes."""
TOKENS_AT_ONCE = 1 << 22
"""Most tokens that are read at a time, but for a longer sequence."""


def recognises(path: Path) -> bool:
    """Whether the file begins with the IndexedDataset magic."""
    return begins_with(path, MAGIC)


def _scan(path: Path) -> Shard:
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
        if code not in DTYPES:
            raise DataError(f"{path}: token dtype code {code}; known codes are 1 to 8")
        needed = HEADER.size + 12 * sequences + 8 * documents
        if size not in (needed, needed + sequences):
            raise DataError(
                f"{path}: {size} bytes, but {sequences} sequences and {documents} document indices need {needed}"
                f"{'' if size > needed else ': the file is truncated or its counts are wrong'}"
            )
        if sequences == 0:
            raise DataError(f"{path}: holds no sequences; write it again with data")
        lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4")
    return Shard((check_lengths(lengths, lambda at: f"{path}: sequence {at}"),))


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    pairs = zip(paths, shards, strict=True)
    streams = [TokenStream(path=str(path), sequence_tokens=shard.arrays[0]) for path, shard in pairs]
    return Dataset.from_content(name, paths, streams, shards=shards)


def read_tokens(path: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Tokens of some sequences at a time, in their order, and their offsets in these, shape [sequences + 1].

    Raises:
        DataError: the `.bin` beside the index `path` is missing, or of another size than the index tells.
    """
    lengths, tokens = _scan(path).arrays[0].astype(np.int64), path.with_suffix(".bin")
    with path.open("rb") as file:
        dtype = np.dtype(DTYPES[HEADER.unpack(file.read(HEADER.size))[2]])
    ends = np.concatenate(([0], np.cumsum(lengths)))
    if not tokens.is_file() or tokens.stat().st_size != ends[-1] * dtype.itemsize:
        raise DataError(f"{tokens}: is missing, or has not the {ends[-1]:,} tokens of {path}")
    first = 0
    with tokens.open("rb") as file:
        while first < len(lengths):
            stop = max(first + 1, int(np.searchsorted(ends, ends[first] + TOKENS_AT_ONCE, side="right")) - 1)
            values = np.frombuffer(file.read(int(ends[stop] - ends[first]) * dtype.itemsize), dtype=dtype)
            yield values.astype(np.int64), ends[first : stop + 1] - ends[first]
            first = stop


FORMAT = Format(
    name="megatron",
    summary="int32 sequence lengths of the `.idx` (the `.bin` need not exist)",
    suffixes=(".idx",),
    recognises=recognises,
    scan=_scan,
    join=_join,
)
