"""Files of columns, parquet or Arrow, of which one column is read."""

from __future__ import annotations

from collections.abc import Iterator
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
