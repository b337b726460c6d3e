"""A small sample dataset in every format, to try the commands on. Its tokens are noise, not text."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.read.arrow import make_lists
from thdprof.systems.bridge import write_metadata

SEED = 1234
"""Seed of all random numbers."""
PACK_TOKENS = 2048
"""Tokens of a packed row."""
NUM_ROWS = 2000
"""Packed rows of the Megatron-Bridge file."""
ROWS_A_GROUP = 500
"""Rows of a parquet row group, as Megatron-Bridge writes them."""
VOCABULARY = 251
"""Number of distinct tokens: few, so that the files compress well. Token 0 only ends documents."""
PERCENTILES = ((0.5, 12), (0.9, 43), (0.96, 64), (0.99, 106), (1.0, 358))
"""Shares of rows and the documents that so many rows do not exceed: the example of Megatron-LM's pull request 3869."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFiles:
    """The files that `write_demo` wrote."""

    megatron: Path
    """Index of a Megatron IndexedDataset, the `.idx` file; its `.bin` file is beside it."""
    bridge: Path
    """Packed parquet of Megatron-Bridge."""
    bridge_metadata: Path
    """Metadata of the Megatron-Bridge file, a JSON list."""
    trl: Path
    """Parquet that TRL packed with `bfd`."""
    lengths: Path
    """JSON lines, each with the length of one document in tokens."""


def write_demo(directory: Path, *, force: bool = False) -> DemoFiles:
    """Write the sample dataset under `directory`; its bytes are equal every time.

    Raises:
        DataError: `directory` is a file, or cannot be written.
        UsageError: `directory` is not empty and `force` is false.
    """
    files = DemoFiles(
        megatron=directory / "megatron" / "documents.idx",
        bridge=directory / "bridge" / f"training_{PACK_TOKENS}.idx.parquet",
        bridge_metadata=directory / "bridge" / f"{PACK_TOKENS}_metadata.jsonl",
        trl=directory / "trl" / "packed.parquet",
        lengths=directory / "lengths" / "documents.jsonl",
    )
    try:
        if directory.exists() and not directory.is_dir():
            raise DataError(f"{directory}: is a file; give the name of a directory")
        if not force and directory.exists() and any(directory.iterdir()):
            raise UsageError(f"{directory}: is not empty; give --force to write into it, or another name")
        for part in (files.megatron, files.bridge, files.trl, files.lengths):
            part.parent.mkdir(parents=True, exist_ok=True)
        _write_megatron(files.megatron)
        _write_bridge(files.bridge, files.bridge_metadata)
        _write_trl(files.trl)
        lengths = _heavy_tailed(_random(3), 20_000, longest=4096)
        lines = "".join(f'{{"length": {length}}}\n' for length in lengths.tolist())
        files.lengths.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error
    return files


def _random(stream: int) -> np.random.Generator:
    """The generator of one file: each file has its own, so that a change of one leaves the others' bytes alone."""
    return np.random.default_rng((SEED, stream))


def documents_per_row() -> NDArray[np.int64]:
    """Documents of every row as training sees them, a tail included: ascending, int64, shape [NUM_ROWS].

    Row i has the inverse of the distribution function at (i + 1) / NUM_ROWS, whose logarithm is linear between
    PERCENTILES, so that nearest-rank percentiles equal PERCENTILES exactly.
    """
    shares = np.array([0.0, *(share for share, _ in PERCENTILES)])
    logarithms = np.log([1.0, *(count for _, count in PERCENTILES)])
    at = np.arange(1, NUM_ROWS + 1) / NUM_ROWS
    return np.rint(np.exp(np.interp(at, shares, logarithms))).astype(np.int64)


def _heavy_tailed(random: np.random.Generator, count: int, longest: int) -> NDArray[np.int32]:
    lengths = np.rint(random.lognormal(mean=5.3, sigma=1.3, size=count))
    return np.clip(lengths, 8, longest).astype(np.int32)


def _split_rows(random: np.random.Generator, totals: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Random lengths of documents, at least 1, that fill rows of `totals` tokens, int64, shape [documents]."""
    row = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    weights = random.lognormal(sigma=1.0, size=len(row))
    before = np.cumsum(weights)
    row_weight = np.add.reduceat(weights, starts)
    share = (before - np.repeat(before[starts] - weights[starts], counts)) / row_weight[row]
    # The cuts divide the tokens that remain once every document has one.
    cuts = np.floor(np.clip(share, 0, 1) * (totals - counts)[row]).astype(np.int64)
    cuts[starts + counts - 1] = totals - counts
    lengths = np.diff(cuts, prepend=0)
    lengths[starts] = cuts[starts]
    return lengths + 1


def _tokens(random: np.random.Generator, document_tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    tokens = random.integers(1, VOCABULARY, size=int(document_tokens.sum()), dtype=np.int64)
    tokens[np.cumsum(document_tokens) - 1] = 0
    return tokens


def _write_megatron(index: Path) -> None:
    random = _random(0)
    lengths = _heavy_tailed(random, 5000, longest=20_000)
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2
    with index.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    _tokens(random, lengths).astype("<u2").tofile(index.with_suffix(".bin"))


def _write_bridge(parquet: Path, metadata: Path) -> None:
    import pyarrow as pa

    random = _random(1)
    documents = documents_per_row()
    # One row in nine is shorter than the pack, which gives it a tail as its last document. Never a row on a
    # percentile, so that the stored documents meet PERCENTILES too.
    fixed = [count for _, count in PERCENTILES]
    short = (np.arange(NUM_ROWS) % 9 == 4) & (documents > 2) & ~np.isin(documents, fixed)
    totals = np.full(NUM_ROWS, PACK_TOKENS, dtype=np.int64)
    # Not a multiple of 16, to which Bridge rounds a row up: the row has its tail under any setting.
    totals[short] -= 1 + 16 * random.integers(0, 12, size=int(short.sum()))
    stored = documents - short
    order = random.permutation(NUM_ROWS)
    totals, stored = totals[order], stored[order]
    trained = _split_rows(random, totals, stored)
    lengths = trained + 1  # a document of L stored tokens trains L - 1
    row_tokens = totals + stored
    seq_start_id = np.cumsum(lengths) - lengths - np.repeat(np.cumsum(row_tokens) - row_tokens, stored)
    tokens = _tokens(random, lengths)
    table = pa.table(
        {
            "input_ids": make_lists(tokens, row_tokens),
            "loss_mask": make_lists((tokens != 0).astype(np.int8), row_tokens),
            "seq_start_id": make_lists(seq_start_id, stored),
        }
    )
    _write_parquet(table, parquet)
    write_metadata(metadata, trained, stored, pack_tokens=PACK_TOKENS)


def _write_trl(parquet: Path) -> None:
    import pyarrow as pa

    random = _random(2)
    rows = 1000
    totals = np.full(rows, PACK_TOKENS, dtype=np.int64)
    totals[::7] -= random.integers(1, 200, size=len(totals[::7]))
    counts = np.clip(np.rint(random.lognormal(mean=2.0, sigma=0.7, size=rows)), 1, 200).astype(np.int64)
    lengths = _split_rows(random, totals, counts)
    table = pa.table(
        {
            "input_ids": make_lists(_tokens(random, lengths).astype(np.int32), totals),
            "seq_lengths": make_lists(lengths, counts),
        }
    )
    _write_parquet(table, parquet)


def _write_parquet(table: object, path: Path) -> None:
    import pyarrow.parquet as pq

    with path.open("wb") as file:  # pyarrow can open only paths that are UTF-8
        pq.write_table(table, file, row_group_size=ROWS_A_GROUP)
