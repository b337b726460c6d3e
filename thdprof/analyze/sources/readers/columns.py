"""Files of columns, parquet or Arrow, of which one column is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thdprof.analyze.sources.readers.arrow import ArrowFile, arrow_errors, arrow_schema, is_arrow
from thdprof.analyze.sources.readers.parquet import ParquetFile, is_parquet, open_parquet, parquet_schema


def holds_columns(path: Path) -> bool:
    """Whether the file begins as parquet or Arrow files do."""
    return is_parquet(path) or is_arrow(path)


def schema_of(path: Path) -> Any:
    """The `pyarrow.Schema` of a parquet or Arrow file; None if it is neither, or broken."""
    return parquet_schema(path) if is_parquet(path) else arrow_schema(path)


@contextmanager
def open_columns(path: Path) -> Iterator[ParquetFile | ArrowFile]:
    """Open a parquet or Arrow file; pyarrow's exceptions become a DataError.

    Raises:
        DataError: the file is neither, truncated or corrupt.
    """
    if is_parquet(path):
        with open_parquet(path) as file:
            yield file
        return
    with arrow_errors(path):
        yield ArrowFile(path)


_ROWS = 1000
"""Rows of a batch."""


def read_batches(path: Path, names: Collection[str]) -> Iterator[tuple[float, Any]]:
    """The columns of `path` that are among `names`, as record batches, each with the share of rows before its end.

    Raises:
        DataError: the file is truncated or corrupt.
    """
    with open_columns(path) as file, arrow_errors(path):
        wanted = [name for name in file.schema.names if name in names]
        done, total = 0, max(1, file.num_rows())
        for batch in file.batches(wanted, _ROWS):
            done += batch.num_rows
            yield done / total, batch
