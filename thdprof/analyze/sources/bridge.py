"""Megatron-Bridge's packed rows: parquet, or the legacy `.npy`, a pickled array of dicts.

Of parquet, `seq_start_id` and the lengths of the lists `loss_mask` are read, and no token. A pickle is read without
executing code in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import base
from thdprof.analyze.sources.base import Dataset, Format, Reading, Shard, fingerprint
from thdprof.analyze.sources.readers import arrow, npy
from thdprof.analyze.sources.readers.npy import read_header
from thdprof.analyze.sources.readers.parquet import is_parquet, open_parquet, schema_of
from thdprof.errors import DataError
from thdprof.files import json_text

KEYS = ("input_ids", "seq_start_id", "loss_mask")
_NAMED_SIZE = re.compile(r"(?:training|validation)_(\d{1,10})(?:\.|$)")
_LARGEST_METADATA_BYTES = 2**20


def document_tokens(
    starts: NDArray[np.int64], offsets: NDArray[np.int64], row_lengths: NDArray[np.int64], where: str
) -> NDArray[np.int32]:
    """Number of tokens that training sees of every stored document, shape [documents].

    A document of L stored tokens trains L - 1: its input lacks the last token, its labels lack the first.

    Args:
        starts: first token of every document in its row, `seq_start_id`, shape [documents], row after row.
        offsets: row r has the documents offsets[r] to offsets[r + 1], shape [rows + 1].
        row_lengths: stored tokens of every row, shape [rows].

    Raises:
        DataError: an empty row, a row that does not start at 0, starts that do not ascend or lie beyond the row.
    """
    counts = np.diff(offsets)
    if len(counts) == 0:
        raise DataError(f"{where}: holds no rows; pack it again with data")
    _refuse(counts == 0, lambda row: f"{where}: row {row}: seq_start_id is empty; a row needs a document")
    first = starts[offsets[:-1]]
    _refuse(first != 0, lambda row: f"{where}: row {row}: seq_start_id begins with {first[row]}, not 0")
    stored = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=stored[:-1])
    last = offsets[1:] - 1
    beyond = (starts[last] >= row_lengths) | (starts[last] < 0)
    if (stored[:-1] < 1).any():  # true at every row's last document as well
        inside = stored < 1
        inside[last] = False
        _refuse(
            inside,
            lambda at: (
                f"{where}: row {_row(offsets, at)}: seq_start_id goes from {starts[at]} to {starts[at + 1]}; "
                "starts must ascend, for a document needs a token"
            ),
        )
    _refuse(
        beyond,
        lambda row: (
            f"{where}: row {row}: seq_start_id {starts[last[row]]} lies beyond its {row_lengths[row]} tokens; "
            "a document needs a token"
        ),
    )
    stored[last] = row_lengths - starts[last]
    if int(row_lengths.max()) > np.iinfo(np.int32).max:
        row = int(row_lengths.argmax())
        raise DataError(f"{where}: row {row}: {row_lengths[row]} tokens are more than 2**31 - 1")
    return (stored - 1).astype(np.int32)


def _row(offsets: NDArray[np.int64], document: int) -> int:
    return int(np.searchsorted(offsets, document, side="right")) - 1


def _refuse(bad: NDArray[np.bool_], message: Callable[[int], str]) -> None:
    if bad.any():
        raise DataError(message(int(bad.argmax())))


def pack_size(paths: Sequence[Path], longest_row: int) -> int | None:
    """The pack size in tokens, from the names of the files or the metadata beside them; None where they disagree.

    A size in the metadata that is less than `longest_row`, the tokens of the longest row, is ignored. One in a name
    yields to a single size in the metadata; without that it is taken, and the rows are refused as in training.
    """
    candidates: set[int | None] = set()
    for path in paths:
        sizes = {size for size in _metadata_sizes(path.parent) if size >= longest_row}
        named = _NAMED_SIZE.match(path.name)
        if named and int(named[1]) >= longest_row:
            candidates.add(int(named[1]))
        elif len(sizes) == 1:
            candidates.update(sizes)
        else:
            candidates.add(int(named[1]) if named else None)
    return candidates.pop() if len(candidates) == 1 else None


def write_metadata(path: Path, tokens: NDArray[np.integer], counts: NDArray[np.integer], *, pack_tokens: int) -> None:
    """Write Megatron-Bridge's metadata of packs: `tokens` that their documents train, and documents of every pack."""
    totals = np.add.reduceat(tokens, np.cumsum(counts) - counts, dtype=np.int64)
    metadata = {
        "dataset_max_seqlen": int(tokens.max()),
        "max_samples_per_bin": int(counts.max()),
        "packing_factor": round(float(counts.mean()), 2),
        "packing_efficiency": round(float(totals.mean()) / pack_tokens * 100, 2),
        "pack_size": pack_tokens,
        "min_packed_seqlen": int(totals.min()),
    }
    path.write_text(json_text([metadata], indent=None), encoding="utf-8")


def _metadata_sizes(directory: Path) -> set[int]:
    """Every pack_size in the metadata files of Bridge in `directory`. They are JSON lists, although named .jsonl."""
    sizes: set[int] = set()
    try:
        beside = sorted(directory.iterdir())
    except OSError:  # a directory whose files may be opened, but not listed
        return sizes
    for path in beside:
        if path.suffix not in (".json", ".jsonl"):
            continue
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST_METADATA_BYTES:
                continue
            entries = json.loads(path.read_bytes())
        except (ValueError, RecursionError, OSError):
            continue
        if isinstance(entries, list):
            named = [entry.get("pack_size") for entry in entries if isinstance(entry, dict)]
            sizes.update(size for size in named if type(size) is int and size > 0)
    return sizes


def _is_packed_parquet(path: Path) -> bool:
    schema = schema_of(path) if is_parquet(path) else None
    return schema is not None and set(KEYS) <= set(schema.names)


def _scan_parquet(path: Path) -> Shard:
    with open_parquet(path) as file:
        for name in KEYS:
            arrow.require_column(file.schema, name, path)
        kind = file.schema.field("loss_mask").type
        if not arrow.is_list(kind):
            raise DataError(f"{path}: column loss_mask: is {kind}, not lists of numbers")
        starts, offsets = arrow.list_integers(file.read_column("seq_start_id"), f"{path}: column seq_start_id")
        tokens = document_tokens(starts, offsets, file.row_lengths("loss_mask"), str(path))
        digest = fingerprint([str(path.stat().st_size).encode(), file.footer])
        return Shard((tokens, offsets), {"digest": digest})


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    rows = base.join_rows(shards, "bridge")
    size = pack_size(paths, int(rows.num_tokens().max()))
    digests = [shard.facts["digest"] for shard in shards if "digest" in shard.facts]  # of parquet
    digest = fingerprint(map(str.encode, digests)) if len(digests) > 1 else next(iter(digests), None)
    return Dataset.from_content(name, paths, rows, shards=shards, digest=digest, pack_tokens=size)


PARQUET = Format(
    name="bridge",
    summary="seq_start_id and the list lengths of loss_mask; no token is read",
    suffixes=(".parquet", ".pq"),
    recognises=_is_packed_parquet,
    scan=_scan_parquet,
    join=_join,
)


def _is_packed_npy(path: Path) -> bool:
    with path.open("rb") as file:
        header = read_header(file)
    return header is not None and header[1].hasobject and len(header[0]) <= 1


def _scan_npy(path: Path) -> Shard:
    with path.open("rb", buffering=0) as file:  # the child process reads on where this one stops
        header = read_header(file)
        if header is None or not header[1].hasobject or len(header[0]) > 1:
            raise DataError(f"{path}: not a packed .npy: it holds no one-dimensional array of objects")
        starts, num_documents, num_tokens = npy.read_rows(file, header[0], path)
    offsets = np.concatenate(([0], np.cumsum(num_documents)))
    return Shard((document_tokens(starts, offsets, num_tokens, str(path)), offsets))


NPY = Format(
    name="bridge-npy",
    summary="the whole pickle, as data: seq_start_id and the lengths of input_ids and loss_mask",
    suffixes=(".npy",),
    recognises=_is_packed_npy,
    scan=_scan_npy,
    join=_join,
)
