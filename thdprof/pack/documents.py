"""The documents of a dataset that go into new packs: where each stands, and the part of it that its trainer keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read import json_lines
from thdprof.read.dataset import Conversations, Dataset, PackedRows, UnpackedDocuments
from thdprof.read.parquet import column_names, holds_columns, read_batches
from thdprof.read.remote import locate
from thdprof.systems import find_packer
from thdprof.systems.base import Overlong
from thdprof.systems.megatron_gpt import train_share
from thdprof.training import TrainingSettings
from thdprof.words import write_count

_SOURCES = ("source", "dataset")
"""Columns that name the source of a row, tried in this order."""
_MOST_SOURCES = 64
"""Most names of sources; a column of more names rows."""

_HELD_OUT = re.compile(r"(test|val|valid|validation|dev|eval)([-_.]|$)", re.IGNORECASE)
"""Names of files that are usually not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents that are packed, in the order of the files. A document that training splits is several."""

    files: tuple[str, ...]
    """The files that hold them."""
    rows_of_file: NDArray[np.int64]
    """Rows of each file, also those that nothing is packed of, shape [files]."""
    number: NDArray[np.int64]
    """Number of the document in the dataset, from 0, shape [documents]."""
    file: NDArray[np.int32]
    """Index into `files`, shape [documents]."""
    row: NDArray[np.int64]
    """Row of the file, from 0, blank lines not counted, shape [documents]."""
    start: NDArray[np.int64]
    """Stored tokens of that row before the document, shape [documents]."""
    tokens: NDArray[np.int32]
    """Tokens that training sees of it, at least 1, shape [documents]."""
    stored_more: int
    """Tokens that each document stores besides: 1 for Megatron-Bridge's, else 0."""
    notes: tuple[str, ...]
    """Sentences on documents that were cut, split or left out, with their number."""


def collect_documents(
    dataset: Dataset, settings: TrainingSettings, *, seq_length: int, for_bridge: bool = False
) -> Documents:
    """The documents of the training split of `dataset`, none longer than `seq_length` tokens.

    Longer ones are treated as training treats them under `settings`: Megatron-Bridge leaves them out, TRL's bfd_split
    and wrapped and Megatron's GPTDataset split them, all others cut them. Documents without tokens are left out.
    `for_bridge` makes documents of Megatron-Bridge, which trains one token fewer than a document stores.

    Raises:
        DataError: no document is left.
    """
    content, notes, row_counts = dataset.content, _note_splits(dataset), dataset.rows_of_files()
    lengths, stored_more = dataset.document_tokens(), 0
    rule: Overlong = "cut"
    counts = np.ones(len(lengths), dtype=np.int64)
    match content:
        case PackedRows():
            counts, stored_more = np.diff(content.row_offsets), int(content.rule == "bridge")
        case UnpackedDocuments():
            packer = find_packer(settings.packer)
            rule = packer.treat_overlong(settings)
            if packer.row_is_document and content.trained_from is not None:
                lengths = np.where(content.trained_from <= seq_length, lengths, 0)
        case Conversations():
            counts = np.concatenate([np.diff(file.line_offsets) for file in content.files])
        case _:
            rule = "split"
    if for_bridge:
        rule = "leave out"
        if not stored_more:
            lengths, stored_more = np.maximum(lengths - 1, 0), 1
    file_of_row = np.repeat(np.arange(len(row_counts), dtype=np.int32), row_counts)
    row_in_file = np.concatenate([np.arange(count) for count in row_counts])
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(lengths.astype(np.int64) + stored_more) - lengths - stored_more
    first = np.concatenate(([0], np.cumsum(counts)[:-1])).clip(max=max(0, len(lengths) - 1))
    start = before - np.repeat(before[first], counts)
    kept = lengths > 0
    if not isinstance(content, PackedRows | UnpackedDocuments):
        trained = np.concatenate([np.arange(count) < train_share(settings.split, count).stop for count in row_counts])
        if not trained.all():
            notes.append(f"--split {settings.split}: only rows of the training split are packed")
        kept &= trained[row]
    if left_out := int((lengths == 0).sum()):
        notes.append(f"{write_count(left_out, 'document')} without a token to train on left out")
    pieces = np.where(kept, 1, 0)
    if num_long := int((kept & (lengths > seq_length)).sum()):
        long = f"{write_count(num_long, 'document')} longer than {seq_length:,} tokens"
        notes.append(f"{long} {rule.replace('leave', 'left')}{' to that' if rule == 'cut' else ''}")
        if rule == "leave out":
            pieces[lengths > seq_length] = 0
        elif rule == "split":
            pieces = np.where(kept, -(-lengths // seq_length), 0)
    if not pieces.any():
        raise DataError(f"{dataset.uris[0]}: no document is left to pack: {'; '.join(notes)}")
    at = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(at)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_length
    return Documents(
        files=dataset.uris,
        rows_of_file=np.array(row_counts, dtype=np.int64),
        number=at,
        file=file_of_row[row[at]],
        row=row_in_file[row[at]],
        start=start[at] + offset,
        tokens=np.minimum(lengths[at] - offset, seq_length).astype(np.int32),
        stored_more=stored_more,
        notes=tuple(notes),
    )


def _note_splits(dataset: Dataset) -> list[str]:
    """Sentences on the splits that are packed, where files or directories are named after splits."""
    paths = [locate(uri) for uri in dataset.uris]
    split = paths[0].parent
    if (split.parent / "dataset_dict.json").is_file():
        return [f"only the split {split.name} of {split.parent} is packed"]
    held_out = [path.name for path in paths if _HELD_OUT.match(path.name)]
    if not held_out or len(held_out) == len(paths):
        return []
    files = ", ".join(held_out[:3]) + (" and others" if len(held_out) > 3 else "")
    return [f"packed with the other files: {files}; if these are for validation, name the others alone"]


def read_sources(documents: Documents) -> tuple[list[str], NDArray[np.int64]] | None:
    """The names of the sources that a column `source` or `dataset` has, and the index of each document's.

    None where a file has no such column, or the column has one name or more than 64.

    Raises:
        DataError: a file cannot be read.
    """
    files = [locate(uri) for uri in documents.files]
    columns = [column_names(path) for path in files]
    column = next((name for name in _SOURCES if all(name in names for names in columns)), None)
    if column is None:
        return None
    names: dict[str, int] = {}
    rows = []
    for name in chain.from_iterable(_read_names(path, column) for path in files):
        rows.append(names.setdefault(name, len(names)))
        if len(names) > _MOST_SOURCES:
            return None
    if len(names) == 1:
        return None
    first = np.cumsum(documents.rows_of_file) - documents.rows_of_file
    return list(names), np.array(rows, dtype=np.int64)[first[documents.file] + documents.row]


def _read_names(path: Path, column: str) -> Iterator[str]:
    if holds_columns(path):
        for _, batch in read_batches(path, [column]):
            yield from map(str, batch.column(0).to_pylist())
        return
    for _, value in json_lines.read_values(path, expected=f"an object with {column}"):
        yield str(value.get(column) if isinstance(value, dict) else None)
