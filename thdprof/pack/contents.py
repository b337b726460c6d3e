"""The tokens of a dataset, copied into files that any document can be read from, in memory that does not grow with it.

Packs are written in the order of training, which takes documents from everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.read import arrow, json_lines
from thdprof.read.dataset import Dataset, Reading
from thdprof.read.json_lines import IGNORED, LABELS, TOKENS
from thdprof.read.parquet import column_names, holds_columns, read_batches
from thdprof.read.remote import locate
from thdprof.systems import megatron_gpt
from thdprof.systems.trl_text import write_tokens

LOSS_MASK = "loss_mask"
_BESIDE = {LABELS: np.int32, "completion_mask": np.int8, "assistant_masks": np.int8}
"""Columns of TRL's rows that have a value for each token."""
_LINES = 1000
"""Lines of JSON that are read at a time."""
_OF_BRIDGE = {LOSS_MASK: np.int8}
"""The column of Megatron-Bridge's rows that has one."""
Batch = dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Values of each column, and the offsets of its rows in them, shape [rows + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Numbers of one type in a file, one for each token of all rows."""

    path: Path
    """The file."""
    dtype: Any
    """Their type."""

    def read(self, starts: NDArray[np.int64], lengths: NDArray[np.integer]) -> NDArray[Any]:
        """The numbers of documents that begin at the tokens `starts`, one document after the other."""
        return np.frombuffer(b"".join(self.read_each(starts, lengths)), dtype=self.dtype)

    def read_each(self, starts: NDArray[np.int64], lengths: NDArray[np.integer]) -> list[bytes]:
        """The bytes of each of these documents."""
        size = np.dtype(self.dtype).itemsize
        with self.path.open("rb") as file:
            number = file.fileno()
            pairs = zip((lengths.astype(np.int64) * size).tolist(), (starts * size).tolist(), strict=True)
            return [os.pread(number, *pair) for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Values for each token of all rows, one row after the other, file after file."""

    columns: dict[str, Column]
    """`input_ids` and what stands beside them, by name."""
    row_starts: NDArray[np.int64]
    """First token of every row, and the number of tokens, shape [rows + 1]."""

    def read_loss_mask(self, starts: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.int8]:
        """Megatron-Bridge's mask of such documents: whether the token after each one is trained; 0 at their ends."""
        ends = np.cumsum(lengths) - 1
        if LOSS_MASK in self.columns:
            mask = self.columns[LOSS_MASK].read(starts, lengths).copy()
        else:
            trained = np.ones(ends[-1] + 1, dtype=np.bool_)
            for name in _BESIDE.keys() & self.columns.keys():
                trained &= self.columns[name].read(starts, lengths) != (IGNORED if name == LABELS else 0)
            mask = np.roll(trained, -1).astype(np.int8)
        mask[ends] = 0
        return mask


def copy_contents(dataset: Dataset, reading: Reading, directory: Path) -> Contents:
    """Copy the tokens of `dataset` into files of `directory`.

    Raises:
        UsageError: the dataset has no tokens that TRL reads.
        DataError: a file cannot be read, or is another than when it was counted.
    """
    if dataset.format == "trl-text":
        return _copy_text(dataset, reading, directory)
    beside = _OF_BRIDGE if dataset.format == "bridge" else _BESIDE
    return _copy_tokens([locate(uri) for uri in dataset.uris], beside, directory)


def _copy_text(dataset: Dataset, reading: Reading, directory: Path) -> Contents:
    lengths = directory / "lengths.npy"
    write_tokens([locate(uri) for uri in dataset.uris], reading, lengths)
    names = [name for name in (TOKENS, LABELS) if (directory / name).stat().st_size]
    return Contents(
        columns={name: Column(path=directory / name, dtype=np.int32) for name in names},
        row_starts=np.concatenate(([0], np.cumsum(np.load(lengths, allow_pickle=False)))),
    )


def _copy_tokens(paths: Sequence[Path], beside: dict[str, Any], directory: Path) -> Contents:
    """Copy rows of `input_ids`, with the columns of `beside` that they have."""
    names: list[str] | None = None
    lengths = [np.zeros(1, dtype=np.int64)]
    types = {TOKENS: np.int32, **beside}
    for path in paths:
        here = _columns_of(path, beside)
        if TOKENS not in here:
            raise UsageError(f"{path}: holds lengths and no {TOKENS}, so there is nothing to write: give --to index")
        if names is None:
            names = here
        if here != names:
            raise DataError(f"{path}: has the columns {', '.join(here)}, and {paths[0]} has {', '.join(names)}")
        for batch in _read_batches(path, names):
            offsets = batch[TOKENS][1]
            for name, (values, ends) in batch.items():
                if not np.array_equal(ends, offsets):
                    row = sum(map(len, lengths)) - 1 + int((np.diff(ends) != np.diff(offsets)).argmax())
                    raise DataError(f"{path}: row {row}: {name} has not one value for each of {TOKENS}")
                kept = values.astype(types[name])
                if not np.array_equal(kept, values):
                    raise DataError(f"{path}: {name} holds {values[kept != values][0]}, no {np.dtype(types[name])}")
                with (directory / name).open("ab") as file:
                    file.write(kept.data)  # tofile does not say why it fails
            lengths.append(np.diff(offsets))
    return Contents(
        columns={name: Column(path=directory / name, dtype=types[name]) for name in names or ()},
        row_starts=np.cumsum(np.concatenate(lengths)),
    )


def _columns_of(path: Path, beside: Collection[str]) -> list[str]:
    if megatron_gpt.recognises(path):
        return [TOKENS]
    held = column_names(path)
    return [name for name in (TOKENS, *beside) if name in held]


def _read_batches(path: Path, names: Sequence[str]) -> Iterator[Batch]:
    import pyarrow as pa

    if megatron_gpt.recognises(path):
        yield from ({TOKENS: some} for some in megatron_gpt.read_tokens(path))
        return
    if holds_columns(path):
        for _, batch in read_batches(path, names):
            columns = {name: pa.chunked_array([batch.column(name)]) for name in names}
            yield {name: arrow.list_integers(c, f"{path}: column {name}") for name, c in columns.items()}
        return
    for lines in batched(json_lines.read_values(path, expected=f"an object with {TOKENS}"), _LINES):
        try:
            rows = {
                name: pa.chunked_array([pa.array([v[name] for _, v in lines], pa.list_(pa.int64()))]) for name in names
            }
        except (KeyError, TypeError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"{path}: lines from {lines[0][0]} on: not lists of integers {', '.join(names)}: {error}"
            ) from error
        yield {name: arrow.list_integers(column, f"{path}: {name}") for name, column in rows.items()}
