"""Dataset formats: finds the files of a dataset, recognises their format by content, reads documents per row.

A format is described by a module of `thdprof.systems`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thdprof.errors import DataError, UsageError
from thdprof.read import engines
from thdprof.read.dataset import Dataset, Format, Reading, Shard, Tick
from thdprof.read.npy import MAGIC
from thdprof.read.remote import (
    begins_with,
    find_matches,
    is_link_to_nothing,
    is_remote,
    locate,
    map_apart,
    stamp,
)
from thdprof.systems import find_format, find_packer
from thdprof.training import FORMATS, PACKERS, definitions
from thdprof.words import write_count

_INDEXES = {".bin": ".idx", ".ds": ".ds.index", ".npy": ".csv.gz"}
"""Endings of token files -> those of the files that hold their documents' lengths: Megatron, datatrove, OLMo-core."""
_DRAWN = re.compile(r"(?:[a-z]+:[a-z]+=|(?:lognormal|gamma|exponential|uniform):).*")
"""A distribution of lengths in place of files, as in lognormal:mean=900,sigma=1.1."""


def read_dataset(
    locations: Sequence[str],
    *,
    format: str = "auto",
    settings: Mapping[str, Any] = MappingProxyType({}),
    cache: Path | None = None,
    digest: str | None = None,
    engine: str = "local",
    tick: Tick | None = None,
) -> Dataset:
    """Read the dataset at `locations`: files, globs, directories, or Megatron prefixes, which lack the `.idx`.

    A distribution in their place, as `lengths.draw_lengths` describes, has lengths drawn.

    Args:
        format: name of the format, or "auto".
        settings: those of the run by their names in `thdprof.training.TrainingOptions`. Text is counted by some of
            them, and `length_column` names the lengths; nothing else is read from them.
        cache: directory that keeps what was read of text, of many files and of remote ones; None: beside the data, or
            of remote files the user's own cache. A file that did not change is not read again.
        digest: that of the one file, by which counts are found again; None: its path, size and time tell it.
        engine: where files are read: `local`, or `ray` with an address behind a colon.

    Raises:
        DataError: a location does not exist or cannot be read, the format is not recognised, or the content is not
            valid in its format.
        UsageError: no such format, no location, text without a tokenizer, conversations of which nobody says who
            trains on them, or a distribution that cannot be drawn from.
    """
    if not locations or "" in locations:
        raise UsageError("no dataset named; give a file, a glob, a directory or a Megatron prefix; --help tells more")
    engines.check_engine(engine)
    if drawn := next((text for text in locations if _DRAWN.fullmatch(text) and not Path(text).exists()), None):
        from thdprof.systems.lengths import draw_lengths

        if len(locations) > 1 or format not in ("auto", "lengths"):
            raise UsageError(f"{drawn}: its lengths are drawn: give it alone, and no --format but lengths")
        if engine != "local" or cache is not None or settings.get("length_column") is not None:
            raise UsageError(f"{drawn}: its lengths are drawn: leave out --engine, --cache and --length-column")
        return draw_lengths(drawn)
    reading = make_reading(settings, cache=cache, digest=digest, engine=engine, tick=tick)
    try:
        chosen, paths, notes = _find(locations, _candidates(format, reading))
        if format == "auto" and chosen.name == "megatron-sft" and reading.trainer is None:
            raise UsageError(
                f"{paths[0]}: conversations become other tokens in TRL than in Megatron-LM: give --training-args or "
                "--packer bfd for TRL, --megatron-args or --format megatron-sft for Megatron-LM"
            )
        dataset = engines.scan(chosen, paths, replace(reading, first=paths[0]), scan_files)
    except OSError as error:
        raise DataError(f"{error.filename or locations[0]}: cannot be read: {error.strerror or error}") from error
    if dataset.num_tokens() == 0:
        raise DataError(f"{dataset.uris[0]}: has no tokens: every length in the dataset is 0")
    return replace(dataset, notes=(*dataset.notes, *notes))


_READ_BY = ("tokenizer_model", "sft_tokenizer_prompt_format", "chat_template", "text_column", "eos_token",
            "completion_only_loss", "assistant_only_loss", "length_column")  # fmt: skip
"""Settings that decide on lengths."""


def make_reading(given: Mapping[str, Any], *, tick: Tick | None = None, **values: Any) -> Reading:
    """How the run reads its files, by the settings `given`; None counts as not given.

    `values` are `cache`, `digest` and `engine`.

    Raises:
        UsageError: a value that cannot be.
    """
    if tick is not None:
        values["tick"] = tick
    for name in _READ_BY:
        if given.get(name) is not None:
            definitions()[name].check(given[name])
            values["prompt_format" if name == "sft_tokenizer_prompt_format" else name] = given[name]
    name = definitions()["packer"].canonical(given.get("packer"))
    packer = find_packer(name) if name in PACKERS else None
    if given.get("loader") == "trainer" or (given.get("loader") is None and packer is not None and packer.is_trl):
        values["trainer"] = "trl"
    elif given.get("loader") is not None or given.get("sft_tokenizer_prompt_format") is not None:
        values["trainer"] = "megatron"
    return Reading(packed=packer is None or not packer.row_is_document, **values)


def scan_files(name: str, reading: Reading, items: Sequence[engines.Item]) -> list[tuple[str, Shard | None]]:
    """The stamp and the shard of every file; None in place of a shard whose stamp is the one that is known.

    Raises:
        DataError, UsageError, OSError: as for `read_dataset`.
    """
    format_ = find_format(name, reading)
    if len(items) > 1 and format_.count_text is None and is_remote(str(items[0][0])):
        return map_apart(lambda item: scan_files(name, reading, [item])[0], items, threads=_AT_ONCE)
    stamps = [reading.digest or stamp(path) for path, _ in items]
    changed = [now != known for now, (_, known) in zip(stamps, items, strict=True)]
    paths = [path for path, _ in compress(items, changed)]
    shards: Iterator[Shard] = iter(())
    if format_.scan is not None:
        shards = map(format_.scan, paths)
    elif format_.count_text is not None and paths:
        shards = iter(format_.count_text(paths, reading))
    return [(now, next(shards) if is_new else None) for now, is_new in zip(stamps, changed, strict=True)]


_AT_ONCE = 8
"""Remote files that one process reads at a time: it waits for most of that time."""


def format_of(locations: Sequence[str]) -> str | None:
    """Name of the format that all files of `locations` have; None where it is not recognised or they have several."""
    try:
        return _find(locations, _candidates("auto", Reading()))[0].name
    except (DataError, OSError):
        return None


def _candidates(format: str, reading: Reading) -> list[Format]:
    """The formats that files may have, in the order in which they are tried."""
    if format == "auto" and reading.length_column is not None:
        format = "lengths"
    names = [format] if format != "auto" else list(FORMATS)
    if format == "auto" and reading.trainer == "trl":
        names.remove("megatron-sft")
    if format == "auto" and reading.tokenizer_model is not None:
        names.remove("lengths")  # a column of lengths may count something else than the run's own tokens
        names.append("lengths")
    return [find_format(name, reading) for name in names]


def _find(locations: Sequence[str], candidates: Sequence[Format]) -> tuple[Format, list[Path], list[str]]:
    """The format of all files at `locations`, the files, and notes on them."""
    notes: list[str] = []
    found = [_files(location, candidates) for location in locations]
    paths = [path for _, files in found for path in files]
    given = [str(p) if is_remote(str(p)) else os.path.abspath(p) for p in paths] if len(locations) > 1 else []
    if len({*given}) < len(given):
        twice = paths[given.index(Counter(given).most_common(1)[0][0])]
        notes.append(f"{twice} is given more than once, and counted as often")
    if len(candidates) == 1:
        return candidates[0], paths, notes
    [*formats] = (format_ for format_, _ in found)
    return (formats[0] if len(found) == 1 else None) or _detect(paths, candidates), paths, notes


def _files(location: str, candidates: Sequence[Format]) -> tuple[Format | None, list[Path]]:
    """The data files that `location` stands for, sorted where it stands for several, and their format where known."""
    path = locate(location)
    if path.is_file():
        return None, [_index_of(path)]
    index = path.parent / f"{path.name}.idx"
    if index.is_file():
        return None, [index]
    if path.is_dir():
        return _files_of_directory(_split_of(path), candidates)
    matches = find_matches(location)
    if matches:
        return None, list(dict.fromkeys(map(_index_of, matches)))
    if path.exists():
        raise DataError(f"{location}: not a regular file; write what it gives to a file first")
    raise DataError(f"{location}: no such file, directory, glob or Megatron prefix")


def _index_of(path: Path) -> Path:
    """The file beside a token file that tells where its documents end; any other file itself."""
    beside = _INDEXES.get(path.suffix)
    index = path.with_suffix(beside) if beside else path
    if beside == ".csv.gz" and index.is_file() and begins_with(path, MAGIC):
        return path
    return index if index.is_file() else path


def _split_of(directory: Path) -> Path:
    """The directory of the split `train`, or the only one, of a Hugging Face `DatasetDict`; else `directory`."""
    try:
        named = json.loads((directory / "dataset_dict.json").read_bytes())["splits"]
        splits = [directory / name for name in named if (directory / name).is_dir()]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return directory
    if len(splits) > 1 and directory / "train" in splits:
        return directory / "train"
    if len(splits) > 1:
        names = ", ".join(split.name for split in splits)
        raise DataError(f"{directory}: a DatasetDict with the splits {names}; give the path of one, as {splits[0]}")
    return splits[0] if splits else directory


def _files_of_directory(directory: Path, candidates: Sequence[Format]) -> tuple[Format, list[Path]]:
    """The only one of `candidates` that files in `directory` have, and these files.

    The OSError of a file that cannot be read is passed on, because the file may belong to the dataset. So may one that
    no format recognises and that ends as they do.
    """
    listed = _files_of_state(directory) or sorted(path for path in directory.iterdir() if path.is_file())
    recognise = partial(_recognise, candidates=candidates)
    recognised = (
        map_apart(recognise, listed, threads=_AT_ONCE) if is_remote(str(directory)) else list(map(recognise, listed))
    )
    found = [
        (candidate, files)
        for number, candidate in enumerate(candidates)
        if (files := [path for path, of in zip(listed, recognised, strict=True) if of == number])
    ]
    if not found:
        from thdprof.analyze.sources import unrecognised

        named = [path for path in listed if path.name.lower().endswith(candidates[0].suffixes)]
        if len(candidates) == len(named) == 1:
            return candidates[0], named  # reading it says what it lacks
        raise unrecognised.directory_error(directory, candidates, auto=len(candidates) > 1)
    for candidate, files in list(found):
        if len(found) > 1 and all(map(candidate.yields, files)):
            found.remove((candidate, files))
    if len(found) > 1:
        kinds = ", ".join(f"{len(files)} of {candidate.name}" for candidate, files in found)
        raise DataError(f"{directory}: holds several formats ({kinds}); name the files of one of them")
    candidate, files = found[0]
    endings = {path.suffix for path in files} - {".json"}  # of which many a file is no data
    for path, number in zip(listed, recognised, strict=True):
        if number is None and path.suffix in endings and not (candidate.aside and candidate.aside.fullmatch(path.name)):
            raise DataError(
                f"{path}: is not of format {candidate.name}, as {write_count(len(files), 'file')} beside it: it may be "
                "damaged; write it again, or take it out of the directory"
            )
    others = [] if is_remote(str(directory)) else directory.iterdir()
    gone = [path for path in others if path.suffix in endings and is_link_to_nothing(path)]
    return candidate, sorted([*files, *gone])  # an attempt to read such a link says that its file is gone


def _files_of_state(directory: Path) -> list[Path]:
    """The files of a dataset that `save_to_disk` wrote, by its `state.json`; empty where there is none."""
    try:
        named = json.loads((directory / "state.json").read_bytes())["_data_files"]
        files = sorted(directory / each["filename"] for each in named)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return []
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: is missing, and state.json beside it names it: write the dataset again")
    return files


def _recognise(path: Path, candidates: Sequence[Format]) -> int | None:
    """The number of the first format that recognises a file by its ending and its content."""
    name = path.name.lower()
    tried = (i for i, one in enumerate(candidates) if name.endswith(one.suffixes) and one.recognises(path))
    return next(tried, None)


def _detect(paths: Sequence[Path], candidates: Sequence[Format]) -> Format:
    """The first format that recognises the first path, and then every other one."""
    first = paths[0]
    if first.stat().st_size == 0:
        raise DataError(f"{first}: is empty")
    for candidate in candidates:
        if candidate.recognises(first):
            for path in paths[1:]:
                if not candidate.recognises(path):
                    raise DataError(f"{path}: is not of format {candidate.name}, as {first} is; analyse them apart")
            return candidate
    from thdprof.analyze.sources import unrecognised

    raise unrecognised.file_error(first, candidates)
