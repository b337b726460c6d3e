"""Errors for data of no known format: a description of the data, and the sign of each format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from thdprof.analyze.sources.base import Format
from thdprof.analyze.sources.readers import json_lines, npy
from thdprof.analyze.sources.readers.parquet import holds_columns, is_parquet, schema_of
from thdprof.errors import DataError
from thdprof.words import list_some

_MOST_NAMES = 12
"""Columns or files that a message names."""
_MOST_BYTES = 40
"""Bytes of a file's beginning that a message shows."""
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
"""Beginnings of compressed files that no reader unpacks, with the name of the compression."""


def file_error(path: Path, formats: Sequence[Format]) -> DataError:
    """The error for a file that none of `formats` recognises."""
    return DataError(f"{path}: format not recognised: {_describe(path)}. Known formats: {_signs(formats)}")


def directory_error(directory: Path, formats: Sequence[Format], *, auto: bool) -> DataError:
    """The error for a directory of which no file is of `formats`: all of them with `auto`, else the one asked for."""
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    directories = sorted(path.name for path in directory.iterdir() if path.is_dir())
    advice = "name the files, or say --format" if auto else "name the files, or another directory"
    if files:
        content = f"but the files {_list_names(files)}; {advice}"
    elif directories:
        content = f"but the directories {_list_names(directories)}; give one of them"
    else:
        content = f"and no other file; {advice}"
    which = "a known format" if auto else f"format {formats[0].name}"
    return DataError(f"{directory}: holds no file of {which}, {content}. Looked for: {_signs(formats, suffixes=True)}")


def _signs(formats: Sequence[Format], *, suffixes: bool = False) -> str:
    return "; ".join(
        f"{f.name} ({f.sign}{', named ' + ' '.join('*' + s for s in f.suffixes) if suffixes else ''})" for f in formats
    )


def _describe(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_MOST_BYTES)
        file.seek(0)
        header = npy.read_header(file)
    if path.suffix == ".bin":
        return (
            f"a .bin holds tokens, and there is no {path.with_suffix('.idx').name} beside it, which holds the lengths "
            "of a Megatron dataset"
        )
    if holds_columns(path):
        kind, schema = "parquet" if is_parquet(path) else "Arrow", schema_of(path)
        if schema is None:
            return f"it begins as {kind} files do, and cannot be read"
        return f"it is {kind} with the columns {_list_names(f'{f.name} ({f.type})' for f in schema)}"
    if header is not None:
        return f"it is .npy of {header[1]} and shape {header[0]}"
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            return f"it is compressed by {name}: unpack it first"
    for magic, name in ((json_lines.GZIP_MAGIC, "gzip"), (json_lines.ZSTD_MAGIC, "zstd")):
        if head.startswith(magic):
            return f"its {name} begins with {json_lines.sniff(path)[:_MOST_BYTES]!r}"
    return f"it begins with {head!r}"


def _list_names(names: Iterable[str]) -> str:
    return list_some((name if name.isprintable() else ascii(name) for name in names), _MOST_NAMES)
