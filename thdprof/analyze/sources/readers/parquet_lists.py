"""Lengths of the lists in a parquet column, from its repetition levels where they can be read, without its values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.readers import arrow_columns, parquet_pages
from thdprof.analyze.sources.readers.parquet_file import ParquetFile
from thdprof.errors import DataError


def row_lengths(file: ParquetFile, name: str) -> NDArray[np.int64]:
    """Lengths of the lists in top-level column `name`, shape [rows].

    Raises:
        DataError: the column is corrupt, or holds a null.
    """
    leaf = file.leaf(name)
    column = file.arrow.schema.column(leaf)
    lengths, row = [np.empty(0, dtype=np.int64)], 0
    for chunk in file.chunks(leaf):
        try:
            if column.max_repetition_level != 1:
                raise parquet_pages.UnsupportedPage("nested lists")
            of_chunk = parquet_pages.list_lengths(
                chunk.content, codec=chunk.codec, max_definition=column.max_definition_level, rows=chunk.num_rows
            )
        except parquet_pages.CorruptPage as error:
            raise DataError(f"{file.path}: corrupt: row group {chunk.group}, column {name}: {error}") from error
        except parquet_pages.UnsupportedPage:
            of_chunk = _decoded_lengths(file, name, chunk.group, row)
        lengths.append(of_chunk)
        row += chunk.num_rows
    return np.concatenate(lengths)


def _decoded_lengths(file: ParquetFile, name: str, group: int, first_row: int) -> NDArray[np.int64]:
    """Lengths of the lists of one row group by decoding the column, for pages that `parquet_pages` does not read."""
    file.check_pages(file.leaf(name))
    with arrow_columns.arrow_errors(file.path):
        lists = file.arrow.read_row_group(group, columns=[name]).column(0)
    lengths, row, where = [], first_row, f"{file.path}: column {name}"
    for part in lists.chunks:
        lengths.append(arrow_columns.list_lengths(part, where, row))
        row += len(part)
    return np.concatenate(lengths)
