"""Data that a Python program holds already: lists and arrays of document lengths, and tables with their columns.

A table is written to an Arrow file for the time of reading it, so that it is read as `analyze` reads such a file.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources import read_dataset
from thdprof.errors import ThdprofError, UsageError
from thdprof.read.arrow import is_list
from thdprof.read.dataset import Content, Dataset, PackedRows, UnpackedDocuments
from thdprof.read.engines import CACHE
from thdprof.read.json_lines import KEYS, TOKENS, USUAL_KEYS
from thdprof.systems.trl import COLUMN
from thdprof.systems.trl_text import text_columns
from thdprof.words import list_some

Documents = Sequence[int] | NDArray[np.integer[Any]]
"""Lengths of documents in tokens: whole numbers of 0 to 2**31 - 1, shape [documents]."""
Lengths = Documents | Sequence[Documents]
"""Lengths of documents that are not packed yet; or rows, each with the lengths of the documents packed in it."""

FORMAT = "lengths"
"""The format's name: these lengths are analysed as those of a file of format `lengths`."""
URI = "<lengths>"
"""Stands for a file's name in results."""
TABLE = "<table>"
"""Stands for the name of a table's file."""
_ROWS = 10_000
"""Rows of a `datasets.Dataset` that are read at once."""
_LARGE = ("attention_mask", "labels", "position_ids", "token_type_ids", "completion_mask", "assistant_masks")
"""Columns as large as the tokens, which no format reads."""
_MOST_NAMES = 12
"""Columns that a message names."""
_MOST = np.iinfo(np.int32).max


def lengths_dataset(lengths: Lengths) -> Dataset:
    """The dataset that `lengths` are: documents for a packer, or packed rows where they are lists of lengths.

    Raises:
        UsageError: nothing is there, a row is empty, rows and lengths are mixed, or a length is no whole number of 0 to
            2**31 - 1; the message names the index and the value.
    """
    if isinstance(lengths, np.ndarray) and lengths.ndim != 1:
        raise UsageError(
            f"lengths: the array has {lengths.ndim} dimensions; give one of one dimension, or a list of such arrays"
        )
    if len(lengths) == 0:
        raise UsageError("lengths: the list is empty; give the length of at least one document")
    content: Content
    if _is_list(lengths[0]):
        content = _rows(lengths)
    else:
        content = UnpackedDocuments(document_tokens=_check_integers(lengths, "lengths"))
    dataset = Dataset.from_content(FORMAT, [URI], content)
    if dataset.num_tokens() == 0:
        raise UsageError("lengths: have no tokens: every length is 0")
    return dataset


def _rows(lengths: Sequence[Any] | NDArray[Any]) -> PackedRows:
    rows = []
    for index, row in enumerate(lengths):
        where = f"lengths[{index}]"
        if not _is_list(row):
            raise UsageError(f"{where}: {row!r:.40} is no list, as lengths[0] is; give lengths or rows, not both")
        if isinstance(row, np.ndarray) and row.ndim != 1:
            raise UsageError(f"{where}: the array has {row.ndim} dimensions; a row has one")
        if len(row) == 0:
            raise UsageError(f"{where}: its list is empty; a row needs a document")
        rows.append(_check_integers(row, where))
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return PackedRows.from_sizes(np.concatenate(rows), sizes)


def _check_integers(lengths: Any, where: str) -> NDArray[np.int32]:
    if not isinstance(lengths, np.ndarray):
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, lengths))):
            index = next(i for i, v in enumerate(lengths) if isinstance(v, bool) or not isinstance(v, int | np.integer))
            kind = "a list, as lengths[0] is not" if _is_list(lengths[index]) else "no whole number"
            raise UsageError(f"{where}[{index}]: {lengths[index]!r:.40} is {kind}; give lengths in tokens")
        try:
            lengths = np.array(lengths, dtype=np.int64)
        except OverflowError:
            lengths = np.array(lengths, dtype=object)
    elif lengths.dtype.kind not in "iu":
        first = f"; {where}[0] is {lengths[0]}" if lengths.size else ""
        raise UsageError(f"{where}: an array of {lengths.dtype} holds no whole numbers{first}; give lengths in tokens")
    wrong = np.flatnonzero((lengths < 0) | (lengths > _MOST))
    if wrong.size:
        raise UsageError(f"{where}[{wrong[0]}]: length {lengths[wrong[0]]} is not between 0 and 2**31 - 1")
    return np.asarray(lengths, dtype=np.int32)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


# --- tables and their columns -----------------------------------------------------------------------------------------


@contextmanager
def temporary_path(name: str) -> Iterator[Path]:
    """A path for a file or directory that lasts as long as the context; errors call it `name`."""
    with tempfile.TemporaryDirectory(prefix="thdprof-") as directory:
        path = Path(directory) / "data"
        try:
            yield path
        except ThdprofError as error:
            raise type(error)(str(error).replace(str(path), name)) from error


def table_dataset(data: object, *, format: str, settings: Mapping[str, Any], cache: Path | None) -> Dataset:
    """The dataset in a `datasets.Dataset`, a data frame, an Arrow table, or a column of one of them.

    It is read as a file of such columns. A column alone holds lengths where it has integers or lists of them, unless
    its name is that of tokens, and plain text where it has text. Without a `cache`, counts of text are kept beside the
    files of a `datasets.Dataset`.

    Raises:
        DataError: as for `read_dataset`.
        UsageError: as for `read_dataset`; or `data` is nothing of the kind, or has no rows.
    """
    with temporary_path(TABLE) as file:
        _write_table(data, file, settings)
        if cache is None and (files := getattr(data, "cache_files", None)):
            cache = Path(files[0]["filename"]).parent / CACHE
        with file.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        dataset = read_dataset([str(file)], format=format, settings=settings, cache=cache, digest=digest)
        return replace(dataset, uris=(TABLE,), notes=tuple(n.replace(str(file), TABLE) for n in dataset.notes))


def _write_table(data: object, file: Path, settings: Mapping[str, Any]) -> None:
    import pyarrow as pa

    try:
        parts, is_column = _read_tables(data)
        tables = (_select_columns(part, is_column, settings) for part in parts)
        first = next(tables, None)
        if first is None or first.num_rows == 0:
            raise UsageError(f"{TABLE}: has no rows; give data")
        lengths, text = settings.get("length_column"), settings.get("text_column") or "text"
        if not {lengths, *USUAL_KEYS} & {*first.column_names} and not text_columns(first.column_names, text):
            kinds = list_some((f"{field.name or 'a column'} ({field.type})" for field in first.schema), _MOST_NAMES)
            raise UsageError(
                f"{TABLE}: neither lengths nor text in {kinds}; give a column of lengths alone, or named by "
                f"length_column or {', '.join(KEYS)}; tokens named {TOKENS}; or text: messages, prompt and completion, "
                f"or {text}"
            )
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise UsageError(f"{TABLE}: cannot become an Arrow table: {' '.join(str(error).split())[:200]}") from error


def _read_tables(data: Any) -> tuple[Iterable[Any], bool]:
    """`data` as Arrow tables of one schema, and whether it is a column.

    Neither `datasets` nor pandas is imported: where the caller has not imported them, `data` is none of theirs.
    """
    import pyarrow as pa

    datasets, pandas = sys.modules.get("datasets"), sys.modules.get("pandas")
    if datasets is not None and isinstance(getattr(data, "source", None), datasets.Dataset):
        return _read_tables(data.source.select_columns([data.column_name]))[0], True
    if datasets is not None and isinstance(data, datasets.Dataset):
        names = [name for name in data.column_names if name not in _LARGE]
        return data.select_columns(names).with_format("arrow").iter(_ROWS), False
    if pandas is not None and isinstance(data, pandas.Series):
        return [pa.table({str(data.name): pa.array(data, from_pandas=True)})], True
    if isinstance(data, pa.Array | pa.ChunkedArray):
        return [pa.table({"": data})], True
    if hasattr(data, "__arrow_c_stream__"):
        return [pa.table(data)], False
    splits = f" with the splits {', '.join(data)} (give one)" if type(data).__name__ == "DatasetDict" else ""
    raise UsageError(
        f"an object of type {type(data).__name__}{splits} is no dataset; give files, a list or array of document "
        "lengths, a datasets.Dataset, a data frame, an Arrow table, or a column of one"
    )


def _select_columns(table: Any, is_column: bool, settings: Mapping[str, Any]) -> Any:
    """The columns that tell lengths: a column alone under the name that its type tells, and tokens as small numbers."""
    import pyarrow as pa

    if is_column and table.column_names[0] not in (TOKENS, COLUMN):
        kind = table.schema.types[0]
        if pa.types.is_integer(kind.value_type if is_list(kind) else kind):
            table = table.rename_columns([settings.get("length_column") or KEYS[0]])
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            table = table.rename_columns([settings.get("text_column") or "text"])
    if TOKENS not in table.column_names:
        return table
    if COLUMN in table.column_names:
        return table.drop_columns([TOKENS])
    at, tokens = table.schema.get_field_index(TOKENS), table.column(TOKENS)
    if is_list(tokens.type) and pa.types.is_integer(tokens.type.value_type):
        table = table.set_column(at, TOKENS, tokens.cast(pa.large_list(pa.int8()), safe=False))
    return table
