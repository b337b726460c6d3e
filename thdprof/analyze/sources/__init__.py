"""Dataset formats: finds the files of a dataset, recognises their format by content, reads documents per row.

A new format is one module with a `FORMAT`, listed here.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thdprof.analyze.sources.base import Dataset, Format
from thdprof.errors import DataError, UsageError

_PLACES = {
    "megatron": "indexed.FORMAT",
    "bridge": "bridge.PARQUET",
    "bridge-npy": "bridge.NPY",
    "trl": "trl.FORMAT",
    "lengths": "lengths.FORMAT",
    "megatron-sft": "megatron_sft.FORMAT",
}
FORMATS = tuple(_PLACES)
"""Names of the formats, in the order in which a file is tried."""


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        UsageError: no such format.
    """
    if name not in _PLACES:
        raise UsageError(f"--format {name}: not a known format; known are auto, {', '.join(FORMATS)}")
    module, constant = _PLACES[name].split(".")
    format_: Format = getattr(import_module(f"thdprof.analyze.sources.{module}"), constant)
    return format_


def read_dataset(
    locations: Sequence[str], *, format: str = "auto", settings: Mapping[str, Any] = MappingProxyType({})
) -> Dataset:
    """Read the dataset at `locations`: files, globs, directories, or Megatron prefixes, which lack the `.idx`.

    `settings` are those of the run by their names in `thdprof.training.TrainingOptions`. Text is counted by its
    `tokenizer_model` and `sft_tokenizer_prompt_format`; nothing else is read from them.

    Raises:
        DataError: a location does not exist or cannot be read, the format is not recognised, or the content is not
            valid in its format.
        UsageError: no such format, no location, or text without a tokenizer.
    """
    if not locations or "" in locations:
        raise UsageError("no dataset named; give a file, a glob, a directory or a Megatron prefix; --help tells more")
    try:
        found = [_files(location, format) for location in locations]
        paths = [path for _, files in found for path in files]
        name = format if format != "auto" else found[0][0] if len(found) == 1 else None
        chosen = _detect(paths) if name is None else get_format(name)
        dataset = chosen.read_text(paths, settings) if chosen.read_text else chosen.read(paths)
    except OSError as error:
        raise DataError(f"{error.filename or locations[0]}: cannot be read: {error.strerror or error}") from error
    if dataset.num_tokens() == 0:
        raise DataError(f"{dataset.uris[0]}: has no tokens: every length in the dataset is 0")
    return dataset


def format_of(locations: Sequence[str]) -> str | None:
    """Name of the format that all files of `locations` have; None where it is not recognised or they have several."""
    try:
        return _detect([path for location in locations for path in _files(location, "auto")[1]]).name
    except (DataError, OSError):
        return None


def _files(location: str, format: str) -> tuple[str | None, list[Path]]:
    """The data files that `location` stands for, sorted where it stands for several, and their format where known."""
    path = Path(location)
    if path.is_file():
        return None, [_index_of(path)]
    index = Path(f"{location}.idx")
    if index.is_file():
        return None, [index]
    if path.is_dir():
        return _files_of_directory(_split_of(path), format)
    matches = sorted(Path(p) for p in glob.glob(location) if Path(p).is_file())
    if matches:
        return None, list(dict.fromkeys(map(_index_of, matches)))
    if path.exists():
        raise DataError(f"{location}: not a regular file; write what it gives to a file first")
    raise DataError(f"{location}: no such file, directory, glob or Megatron prefix")


def _index_of(path: Path) -> Path:
    """The `.idx` beside a Megatron dataset's `.bin`; any other file itself."""
    index = path.with_suffix(".idx")
    return index if path.suffix == ".bin" and index.is_file() else path


def _split_of(directory: Path) -> Path:
    """The directory of the only split of a Hugging Face `DatasetDict`; any other directory itself."""
    try:
        named = json.loads((directory / "dataset_dict.json").read_bytes())["splits"]
        splits = [directory / name for name in named if (directory / name).is_dir()]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return directory
    if len(splits) > 1:
        names = ", ".join(split.name for split in splits)
        raise DataError(f"{directory}: a DatasetDict with the splits {names}; give the path of one, as {splits[0]}")
    return splits[0] if splits else directory


def _files_of_directory(directory: Path, format: str) -> tuple[str, list[Path]]:
    """The files in `directory` of format `format`; with `auto`, those of the only format that there is. Its name first.

    The OSError of a file that cannot be read is passed on, because the file may belong to the dataset.
    """
    names = FORMATS if format == "auto" else (format,)
    by_format: dict[str, list[Path]] = {}
    claimed: set[Path] = set()
    for name in names:
        candidate = get_format(name)
        files = [
            p
            for p in sorted(directory.iterdir())
            if p.is_file()
            and p not in claimed
            and p.name.lower().endswith(candidate.suffixes)
            and candidate.recognises(p)
        ]
        claimed.update(files)
        if files:
            by_format[name] = files
    if not by_format:
        from thdprof.analyze.sources import unrecognised

        raise unrecognised.directory_error(directory, [get_format(name) for name in names], auto=format == "auto")
    for name in list(by_format):
        if len(by_format) > 1 and all(map(get_format(name).yields, by_format[name])):
            del by_format[name]
    if len(by_format) > 1:
        kinds = ", ".join(f"{len(files)} of {name}" for name, files in by_format.items())
        raise DataError(f"{directory}: holds several formats ({kinds}); choose one with --format")
    return next(iter(by_format.items()))


def _detect(paths: Sequence[Path]) -> Format:
    """The first format that recognises the first path, and then every other one."""
    first = paths[0]
    if first.stat().st_size == 0:
        raise DataError(f"{first}: is empty")
    for name in FORMATS:
        candidate = get_format(name)
        if candidate.recognises(first):
            for path in paths[1:]:
                if not candidate.recognises(path):
                    raise DataError(f"{path}: is not of format {name}, as {first} is; analyse them apart")
            return candidate
    from thdprof.analyze.sources import unrecognised

    raise unrecognised.file_error(first, [get_format(name) for name in FORMATS])
