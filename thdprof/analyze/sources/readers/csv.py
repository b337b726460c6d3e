"""CSV files, of which one column of whole numbers is read."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.sources.readers import arrow, json_lines
from thdprof.errors import DataError


def is_csv(path: Path) -> bool:
    """Whether the file's name ends in .csv, also before the ending of a compression."""
    return ".csv" in (path.suffix.lower(), path.with_suffix("").suffix.lower())


def find_column(path: Path, names: Sequence[str]) -> str | None:
    """The first of `names` that the first line has; None where it has none."""
    head = json_lines.sniff(path).decode("utf-8-sig", "replace").splitlines()
    columns = next(csv.reader(head[:1]), [])
    return next((name for name in names if name in columns), None)


def read_integers(path: Path, names: Sequence[str]) -> NDArray[np.integer]:
    """The first of the columns `names` that the file has, shape [rows].

    Raises:
        DataError: the file has no such column, cannot be read, or holds something else than whole numbers there.
    """
    from pyarrow import csv as reader

    name = find_column(path, names)
    if name is None:
        raise DataError(f"{path}: no column is named {', '.join(names)}")
    with arrow.arrow_errors(path), json_lines.open_unpacked(path) as file:
        table = reader.read_csv(file, convert_options=reader.ConvertOptions(include_columns=[name]))
    return arrow.integers(table.column(name), f"{path}: column {name}")
