"""Checks of rows and the search for the pack size, for both packed formats of Megatron-Bridge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError

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
        where: name of the file in messages.

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
