"""Plain document lengths: JSON lines, parquet, Arrow, CSV or `.npy`.

- JSON lines, also compressed by gzip or zstd: every line an integer, a list of integers, or an object with a key of
  lengths. A list that is the only line holds documents.
- parquet, Arrow and CSV: a column of integers or lists of integers. With the columns of the index that `thdprof pack`
  writes, `length` holds packed rows, one after the other.
- `.npy`: integers of one dimension.

Integers are documents that a packer has yet to pack; lists are packed rows. A length may be zero. The key or column
is the run's `length_column`, else the first of `KEYS`. Where there is none of them, each list `TOKENS` is a document.
Only its length is read, in parquet and Arrow without the tokens themselves.

Lengths may also be drawn from a named distribution, which `draw_lengths` describes.

Systems that leave such columns beside other ones claim them (`thdprof.systems.claim_columns`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.read import arrow, json_lines, npy
from thdprof.read import dataset as base
from thdprof.read.dataset import (
    DRAWS,
    Content,
    Dataset,
    Format,
    Reading,
    Shard,
    UnpackedDocuments,
    check_lengths,
)
from thdprof.read.json_lines import KEYS, PACKED, TOKENS, USUAL_KEYS, Keys
from thdprof.read.parquet import holds_columns, open_columns, schema_of
from thdprof.read.remote import begins_with
from thdprof.systems import claim_columns
from thdprof.systems.nemo_rl import VALIDATION_LOG
from thdprof.systems.trl import USUAL_PACKER
from thdprof.words import list_choices, write_count

_STEP = re.compile(r"(?P<log>|.*step[-_]?)(?P<step>[0-9]{1,18})\.jsonl(?:\.gz|\.zst)?")
"""Name of a file that a log writes for each step, such as NeMo-RL's `train_data_step10.jsonl` or verl's `10.jsonl`."""

_INDEX = ("pack", "position", "length")
"""Columns that tell an index of packs: in the order of training, a row for each document."""


def _recognises(path: Path, keys: Keys) -> bool:
    """Whether the file holds lengths, or lists of tokens, and nothing that another format could mean."""
    with path.open("rb") as file:
        if file.read(len(npy.MAGIC)) == npy.MAGIC:
            file.seek(0)
            header = npy.read_header(file)
            return header is not None and len(header[0]) == 1 and header[1].kind in "iu"
    if holds_columns(path):  # TRL's packed data alone are written as Arrow with seq_lengths
        packed = ["seq_lengths"] if arrow.is_arrow(path) and keys == USUAL_KEYS else []
        return _column_of(schema_of(path), keys) not in (None, *packed)
    if _is_csv(path):
        return _find_csv_column(path, keys) is not None
    return json_lines.begins_with_lengths(path, keys)


def _holds_tokens(path: Path, keys: Keys) -> bool:
    if holds_columns(path):
        return _column_of(schema_of(path), keys) == TOKENS
    return not _is_csv(path) and json_lines.begins_with_tokens(path, keys)


def _scan(path: Path, keys: Keys) -> Shard:
    if holds_columns(path):
        return _scan_column(path, keys)
    if _is_csv(path):
        return Shard((_documents(_read_csv(path, keys), str(path)),))
    if begins_with(path, npy.MAGIC):
        return Shard((_read_npy(path),))
    read = json_lines.read_lines(path, keys)
    if isinstance(read, tuple):
        return Shard(read, {"one_list": len(read[1]) == 2 and json_lines.begins_with_list(path)})
    return Shard((read,), {"tokens": json_lines.begins_with_tokens(path, keys)})


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    """The dataset of all files, those of a log in the order of its steps."""
    content: Content
    is_log, order = _order_of_steps(paths)
    paths, shards = [paths[at] for at in order], [shards[at] for at in order]
    sizes = [len(shard.arrays) for shard in shards]
    if len({*sizes}) > 1:
        raise DataError(
            f"{paths[sizes.index(1)]}: holds single lengths where another file holds lists; analyse them apart"
        )
    if sizes[0] == 2 and not all(shard.facts.get("one_list") for shard in shards):
        content = base.join_rows(shards, "concatenate")
    else:
        content = UnpackedDocuments(document_tokens=np.concatenate([shard.arrays[0] for shard in shards]))
    notes: list[str] = []
    if any(shard.facts.get("tokens") for shard in shards):
        note = f"each list {TOKENS} is counted as one document; if they are packed, give the lengths of their documents"
        notes.append(note)
    counts = [len(shard.arrays[0]) for shard in shards]
    if is_log and min(counts) < max(counts):
        notes.append(
            f"files of this log hold {min(counts):,} to {max(counts):,} documents, and steps are made of "
            "--global-batch-size of them, so that a step may mix those of two files"
        )
    packers = {shard.facts.get("packer") for shard in shards}
    return Dataset.from_content(
        name,
        paths,
        content,
        shards=shards,
        notes=tuple(notes),
        usual_packer=packers.pop() if len(packers) == 1 and isinstance(content, UnpackedDocuments) else None,
    )


def _order_of_steps(paths: Sequence[Path]) -> tuple[bool, list[int]]:
    """Whether the files are a log's, and their places in the order of its steps; those of other files as they are."""
    matches = [_STEP.fullmatch(path.name) for path in paths]
    steps = [(match["log"], int(match["step"])) for match in matches if match]
    if len(steps) < len(paths) or len({(path.parent, log) for path, (log, _) in zip(paths, steps, strict=True)}) > 1:
        return False, list(range(len(paths)))
    return True, sorted(range(len(paths)), key=lambda at: steps[at])


def _scan_column(path: Path, keys: Keys) -> Shard:
    """The shard of a file of columns. Its fact `packer` is that of those who train on such columns, if it is known."""
    with open_columns(path) as file:
        names = {*file.schema.names}
        name = _column_of(file.schema, keys)
        if name is None:
            raise DataError(
                f"{path}: no column of integers or lists of them is named {', '.join(keys)}; it has "
                f"{', '.join(file.schema.names)}"
            )
        where = f"{path}: column {name}"
        if name == TOKENS:
            lengths, packer = _documents(file.row_lengths(name), where), claim_columns(path, names, name, "tokens")
            return Shard((lengths,), {"packer": packer, "tokens": packer == USUAL_PACKER})
        column = file.read_column(name)
        if arrow.is_list(column.type):
            values, offsets = arrow.list_integers(column, where)
            of_one = bool((np.diff(offsets) == 1).all())
            if not of_one or (packer := claim_columns(path, names, name, "lists of one")) is None:
                return Shard(base.check_rows(values, offsets, where))
            return Shard((_documents(values, where),), {"packer": packer})
        lengths = _documents(arrow.integers(column, where), where)
        if name != _INDEX[-1] or any(_column_of(file.schema, (each,)) is None for each in _INDEX):
            return Shard((lengths,), {"packer": claim_columns(path, names, name, "integers")})
        pack = arrow.integers(file.read_column(_INDEX[0]), f"{path}: column {_INDEX[0]}")
        first = np.flatnonzero(np.diff(pack, prepend=-1))
        return Shard(base.check_rows(lengths, np.append(first, len(pack)), where))


def _column_of(schema: Any, keys: Keys) -> str | None:
    """The first of `keys` that is a column of integers or of lists of integers."""
    import pyarrow.types as types

    if schema is None:
        return None
    for name in keys:
        if schema.get_field_index(name) < 0 or (name == TOKENS and any(packed in schema.names for packed in PACKED)):
            continue
        kind = schema.field(name).type
        if types.is_integer(kind.value_type if arrow.is_list(kind) else kind) and (
            name != TOKENS or arrow.is_list(kind)
        ):
            return name
    return None


def _is_csv(path: Path) -> bool:
    """Whether the file's name ends in .csv, also before the ending of a compression."""
    return ".csv" in (path.suffix.lower(), path.with_suffix("").suffix.lower())


def _find_csv_column(path: Path, keys: Keys) -> str | None:
    """The first of `keys` that the first line has; None where it has none."""
    head = json_lines.sniff(path).decode("utf-8-sig", "replace").splitlines()
    columns = next(csv.reader(head[:1]), [])
    return next((key for key in keys if key in columns), None)


_CSV_BLOCK = 2**24
"""Bytes of a block, and of the longest row."""


def _read_csv(path: Path, keys: Keys) -> NDArray[np.integer]:
    from pyarrow import csv as reader

    name = _find_csv_column(path, keys)
    if name is None:
        raise DataError(f"{path}: no column is named {', '.join(keys)}")
    with arrow.arrow_errors(path), json_lines.open_unpacked(path) as file:
        table = reader.read_csv(
            file,
            read_options=reader.ReadOptions(block_size=_CSV_BLOCK),
            parse_options=reader.ParseOptions(newlines_in_values=True),  # else blocks are cut inside quotes
            convert_options=reader.ConvertOptions(include_columns=[name]),
        )
    if table.num_rows == 0:
        raise DataError(f"{path}: holds no lengths; write it again with data")
    return arrow.integers(table.column(name), f"{path}: column {name}")


def _read_npy(path: Path) -> NDArray[np.int32]:
    with path.open("rb") as file:
        header = npy.read_header(file)
        if header is None or len(header[0]) != 1 or header[1].kind not in "iu":
            raise DataError(f"{path}: is no .npy of integers of one dimension")
        (count,), dtype = header
        held = path.stat().st_size - file.tell()
        if held != count * dtype.itemsize:
            raise DataError(
                f"{path}: truncated or corrupt: {held} bytes of content, {count} lengths of {dtype.itemsize}"
            )
        return _documents(np.frombuffer(file.read(held), dtype=dtype), str(path))


def _documents(lengths: NDArray[np.integer], where: str) -> NDArray[np.int32]:
    if len(lengths) == 0:
        raise DataError(f"{where}: holds no lengths; write it again with data")
    return check_lengths(lengths, lambda at: f"{where}: row {at}")


def make_format(reading: Reading) -> Format:
    """The format, with the run's own name of the column of lengths."""
    keys = USUAL_KEYS if reading.length_column is None else (reading.length_column,)
    return Format(
        name="lengths",
        summary=f"integers or lists of integers: JSON lines, parquet, Arrow or CSV ({', '.join(KEYS)}), .npy; or lists "
        f"{TOKENS}",
        suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".parquet", ".pq", ".arrow", ".npy"),
        recognises=partial(_recognises, keys=keys),
        scan=partial(_scan, keys=keys),
        join=_join,
        key=lambda paths, reading: reading.length_column,
        yields=partial(_holds_tokens, keys=keys),
        aside=VALIDATION_LOG,
    )


# --- lengths that are drawn -------------------------------------------------------------------------------------------

_MOST = 2**31 - 1
_COMMON: Mapping[str, tuple[int, int, int]] = {
    "min": (1, 1, _MOST),
    "max": (_MOST, 1, _MOST),
    "documents": (10_000, 1, 100_000_000),
    "draws": (DRAWS, 2, 1000),
    "seed": (1234, 0, 2**32 - 1),
}
"""Parameters that are whole numbers -> the default, the least and the largest."""
_DISTRIBUTIONS: Mapping[str, str] = {
    "lognormal": "mean=900,sigma=1.1",
    "gamma": "mean=900,shape=2",
    "exponential": "mean=900",
    "uniform": "min=64,max=4096",
}
"""Distribution -> an example of the parameters that have to be given."""


def draw_lengths(location: str) -> Dataset:
    """The documents of a location such as `lognormal:mean=900,sigma=1.1,max=8192`, several times drawn.

    The mean is that before lengths under `min` become `min`, and those over `max`, as of answers that are cut, `max`.
    `sigma` is the standard deviation of the logarithm, `shape` that of a gamma distribution.

    Raises:
        UsageError: no such distribution, or a parameter that cannot be.
    """
    name, _, text = location.partition(":")
    if name not in _DISTRIBUTIONS:
        raise UsageError(f"{location}: no distribution {name}: choose one of {list_choices(name, [*_DISTRIBUTIONS])}")
    needed = re.findall(r"[a-z]+", _DISTRIBUTIONS[name])
    known = [*dict.fromkeys((*needed, *_COMMON))]
    given: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, _, value = part.partition("=")
        if key not in known or key in given:
            what = "given twice" if key in given else f"no parameter of it; choose one of {list_choices(key, known)}"
            raise UsageError(f"{location}: {key} is {what}")
        given[key] = _read_parameter(location, key, value)
    if lacking := [key for key in needed if key not in given]:
        raise UsageError(f"{location}: lacks {' and '.join(lacking)}; give them as in {name}:{_DISTRIBUTIONS[name]}")
    values = {key: default for key, (default, _, _) in _COMMON.items()} | given
    if values["min"] > values["max"]:
        raise UsageError(f"{location}: min {values['min']} is more than max {values['max']}")
    made = [partial(_draw, name, values, number) for number in range(values["draws"])]
    documents = write_count(values["documents"], "document")
    note = f"lengths are drawn: {documents}, {len(made)} times; the micro-batches are those of the first draw"
    return Dataset.from_content("lengths", [location], made[0](), other_draws=tuple(made[1:]), notes=(note,))


def _read_parameter(location: str, key: str, text: str) -> float:
    is_whole, (_, least, most) = key in _COMMON, _COMMON.get(key, (0, 0, _MOST))
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        value = -1
    if not least <= value <= most or not (is_whole or value):
        what = f"a whole number from {least} to {most}" if is_whole else f"a number above 0, at most {most}"
        raise UsageError(f"{location}: {key} {text!r:.40} must be {what}")
    return value


def _draw(name: str, values: Mapping[str, Any], number: int) -> UnpackedDocuments:
    """The documents of draw `number`, from 0."""
    random, size = np.random.default_rng([values["seed"], number]), values["documents"]
    mean, sigma, shape = (values.get(key, 1.0) for key in ("mean", "sigma", "shape"))
    drawn: NDArray[Any] = {
        "uniform": lambda: random.integers(values["min"], values["max"], size, endpoint=True),
        "lognormal": lambda: random.lognormal(np.log(mean) - sigma**2 / 2, sigma, size),
    }.get(name, lambda: random.gamma(shape, mean / shape, size))()
    return UnpackedDocuments(document_tokens=np.clip(np.rint(drawn), values["min"], values["max"]).astype(np.int32))
