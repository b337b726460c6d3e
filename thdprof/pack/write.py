"""Writes packs in the order of training, for trainers: each file whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.analysis import Progress
from thdprof.analyze.sources.base import Dataset, Reading
from thdprof.errors import DataError
from thdprof.files import replacing
from thdprof.pack.contents import LABELS, Contents, copy_contents
from thdprof.pack.documents import Documents
from thdprof.pack.repack import Packs, Repacking, Target

_TOKENS_A_GROUP = 1 << 22
"""Most tokens of a row group of the output, which is what is held in memory."""
_DOCUMENTS_A_GROUP = 1 << 20
Tick = Callable[[float], None]


def write_packs(
    result: Repacking,
    dataset: Dataset,
    *,
    target: Target,
    path: Path,
    progress: Progress = lambda stage, done, documents: None,
) -> None:
    """Write the new packs of `dataset` to `path`.

    Raises:
        UsageError: the dataset does not hold what the target needs.
        DataError: the dataset cannot be read, or the file cannot be written.
    """

    def tick(done: float) -> None:
        progress("writing", done, len(result.packs.order))

    if target == "index":
        write_index(result.packs, path, tick)
        return
    reading = Reading.from_settings(result.old.given, cache=result.old.cache)
    write_trl(result.packs, dataset, reading, path, tick)


def explain_reading(target: Target, path: Path) -> list[str]:
    """What the user does so that training reads the packs of `path` in their order."""
    if target == "index":
        return ["Read the packs in their order: a micro-batch for each rank in turn."]
    return [
        f'train on load_dataset("parquet", data_files="{path}", split="train") with',
        'SFTConfig(packing=False, padding_free=True, max_length=None, train_sampling_strategy="sequential", '
        "shuffle_dataset=False)",
    ]


def write_index(packs: Packs, path: Path, tick: Tick = lambda done: None) -> None:
    """Write one row for each document, in the order of training, as parquet.

    Columns: `pack` and `position` (the document's place in it), both int32 from 0; `file`, and `row` of it (int64);
    `start` (int64), the stored tokens of that row before the document; `length` (int32), the tokens kept.

    Raises:
        DataError: the file cannot be written.
    """
    import pyarrow as pa

    documents = packs.documents

    def batches() -> Iterator[Any]:
        for begin in range(0, len(packs.order), _DOCUMENTS_A_GROUP):
            part = np.arange(begin, min(begin + _DOCUMENTS_A_GROUP, len(packs.order)))
            of_pack = np.searchsorted(packs.offsets, part, side="right") - 1
            chosen = packs.order[part]
            files = pa.DictionaryArray.from_arrays(pa.array(documents.file[chosen]), pa.array(documents.files))
            yield pa.record_batch(
                {
                    "pack": of_pack.astype(np.int32),
                    "position": (part - packs.offsets[of_pack]).astype(np.int32),
                    "file": files,
                    "row": documents.row[chosen],
                    "start": documents.start[chosen],
                    "length": documents.tokens[chosen],
                }
            )
            tick((part[-1] + 1) / len(packs.order))

    _write_parquet(path, batches())


def write_trl(packs: Packs, dataset: Dataset, reading: Reading, path: Path, tick: Tick = lambda done: None) -> None:
    """Write rows of TRL as parquet: `input_ids`, `seq_lengths`, and labels or masks where TRL would not make them anew.

    The tokens are first copied into files beside `path`, which are removed at the end.

    Raises:
        UsageError: the dataset holds no tokens and no text.
        DataError: the dataset cannot be read, is another than when it was counted, or the file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
            contents = copy_contents(dataset, reading, Path(directory))
            starts = _find_documents(packs.documents, contents)
            _write_parquet(path, _trl_rows(packs, contents, starts, tick))
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


def _find_documents(documents: Documents, contents: Contents) -> NDArray[np.int64]:
    """The first token of every document in `contents`, shape [documents].

    Raises:
        DataError: the files have other rows than were counted.
    """
    row = (np.cumsum(documents.rows_of_file) - documents.rows_of_file)[documents.file] + documents.row
    if len(contents.row_starts) - 1 == documents.rows_of_file.sum():
        starts: NDArray[np.int64] = contents.row_starts[row] + documents.start
        missing = starts + documents.tokens > contents.row_starts[row + 1]
        if not missing.any():
            return starts
    raise DataError(
        f"{documents.files[0]}: has other rows than when it was counted: let it be as it is, and pack again"
    )


def _trl_rows(packs: Packs, contents: Contents, starts: NDArray[np.int64], tick: Tick) -> Iterator[Any]:
    import pyarrow as pa

    ends = np.concatenate(([0], np.cumsum(packs.tokens, dtype=np.int64)))[packs.offsets]
    first, last = 0, len(packs.offsets) - 1
    while first < last:
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] + _TOKENS_A_GROUP, side="right")) - 1)
        documents = slice(packs.offsets[first], packs.offsets[stop])
        at, lengths = starts[packs.order[documents]], packs.tokens[documents]
        row_ends = pa.array((ends[first : stop + 1] - ends[first]).astype(np.int32))
        columns = {name: contents.gather(name, at, lengths) for name in contents.columns}
        if contents.trained is not None:
            columns[LABELS] = contents.gather_labels(at, lengths)
        lists = {name: pa.ListArray.from_arrays(row_ends, pa.array(values)) for name, values in columns.items()}
        of_rows = pa.array((packs.offsets[first : stop + 1] - packs.offsets[first]).astype(np.int32))
        yield pa.record_batch({**lists, "seq_lengths": pa.ListArray.from_arrays(of_rows, pa.array(lengths))})
        tick(stop / last)
        first = stop


def _write_parquet(path: Path, batches: Iterator[Any]) -> None:
    import pyarrow.parquet as pq

    first = next(batches)
    with (
        replacing(path) as temporary,
        temporary.open("wb") as file,  # pyarrow itself opens no names that are not UTF-8
        pq.ParquetWriter(file, first.schema) as writer,
    ):
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
