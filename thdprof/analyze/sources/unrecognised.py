"""Errors for data of no known format: a description of the data, and what it could be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from thdprof.errors import DataError
from thdprof.read import json_lines, npy
from thdprof.read.dataset import Format
from thdprof.read.parquet import holds_columns, is_parquet, schema_of
from thdprof.words import list_some

_MOST_NAMES = 8
"""Columns or files that a message names."""
_MOST_BYTES = 40
"""Bytes of a file's beginning that a message shows."""
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
"""Beginnings of compressed files that no reader unpacks, with the name of the compression."""
_COULD_BE = (
    "give --length-column if one holds lengths; text is messages, prompt and completion, or text (--tokenizer); "
    "docs/formats.md has all formats"
)
"""What a file's columns may be."""
_WEBDATASET = (
    "a webdataset, whose lengths only the run's own encoder tells: write them in pack_selected_samples, a line "
    "[tokens, ...] for each pack, to a .jsonl file, and give that (docs/formats.md#energon)"
)
"""What to do about data for Megatron-Energon."""


def file_error(path: Path, formats: Sequence[Format]) -> DataError:
    """The error for a file that none of `formats` recognises: what it holds, and what that could be."""
    if path.suffix == ".tar":
        return DataError(f"{path}: {_WEBDATASET}")
    known = f"known are {', '.join(f.name for f in formats)} (docs/formats.md)"
    columns = _columns(path)
    if columns is None:
        return DataError(f"{path}: format not recognised: {_describe(path)}; {known}")
    return DataError(f"{path}: format not recognised: it is {columns}; {_COULD_BE}")


def directory_error(directory: Path, formats: Sequence[Format], *, auto: bool) -> DataError:
    """The error for a directory of which no file is of `formats`: all of them with `auto`, else the one asked for."""
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    if (directory / ".nv-meta").is_dir() or any(name.endswith(".tar") for name in files):
        return DataError(f"{directory}: {_WEBDATASET}")
    directories = sorted(path.name for path in directory.iterdir() if path.is_dir())
    advice = "name the files, or say --format" if auto else "name the files, or another directory"
    if files:
        content = f"but the files {_list_names(files)}; {advice}"
    elif directories:
        content = f"but the directories {_list_names(directories)}; give one of them"
    else:
        content = f"and no other file; {advice}"
    which = "a known format" if auto else f"format {formats[0].name}"
    suffixes = dict.fromkeys(f"*{suffix}" for one in formats for suffix in one.suffixes)
    return DataError(f"{directory}: holds no file of {which}, {content}; looked for {' '.join(suffixes)}")


def _columns(path: Path) -> str | None:
    """The kind of a file of columns, or of JSON lines of objects, with their names; None for another file."""
    named: list[str] | None
    if holds_columns(path):
        schema = schema_of(path)
        named = None if schema is None else [f"{f.name} ({str(f.type)[:30]})" for f in schema]
        kind = "parquet with the columns" if is_parquet(path) else "Arrow with the columns"
    elif path.name.lower().endswith((".csv", ".csv.gz")):
        kind, line = "CSV with the columns", json_lines.sniff(path).partition(b"\n")[0]
        named = line.decode(errors="replace").strip().split(",") if line else None
    else:
        kind, named = "JSON lines with the keys", [*(json_lines.first_object(path) or ())]
    return f"{kind} {_list_names(named)}" if named else None


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
        return f"it begins as {'parquet' if is_parquet(path) else 'Arrow'} files do, and cannot be read"
    if header is not None:
        return f"it is .npy of {header[1]} and shape {header[0]}"
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            return f"it is compressed by {name}: unpack it first"
    for magic, name in ((json_lines.GZIP_MAGIC, "gzip"), (json_lines.ZSTD_MAGIC, "zstd")):
        if head.startswith(magic):
            start = json_lines.sniff(path)[:_MOST_BYTES]
            return f"its {name} begins with {start!r}" + ("" if start else ": it is empty, truncated or corrupt")
    if head.startswith(b"#!"):
        return "it is a script, as --megatron-args takes"
    if b"".join(head.split()).startswith(b"[{"):
        return "it is one JSON array: write each of its objects on a line of its own"
    return f"it begins with {head!r}"


def _list_names(names: Iterable[str]) -> str:
    return list_some((name if name.isprintable() else ascii(name) for name in names), _MOST_NAMES)
