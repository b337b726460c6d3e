"""The profile file: what a run's micro-batches look like, small, exact and mergeable. Parquet, `thdprof.profile/1`.

It holds counts, not micro-batches, so a run of any length fits in a report without reading the dataset again. Rows:

| column | meaning |
|---|---|
| `part` | which data: the name of a dataset or of a shard |
| `kind` | what is counted, one of `KINDS` |
| `segment` | in which 64th of its run, from 0 (runs of fewer than 64 steps leave some out); -1: the whole run |
| `n_seqs` | documents |
| `max_seqlen` | tokens of the longest document; -1 where it is not told apart |
| `cp_size` | context-parallel size of the micro-batch under the dynamic kind; 0: the run's own |
| `count` | how many there are |

The expected step time does not follow from counts, and is stored at a grid of caps, in the metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.errors import DataError
from thdprof.plan import Training

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA: Literal["thdprof.profile/1"] = "thdprof.profile/1"
KINDS = ("microbatch", "rank_step_max", "step_max", "segment_microbatch", "segment_step_max")
"""Micro-batches by both measures; (rank, step) pairs and steps by the largest of each measure among their
micro-batches; and micro-batches and steps of every segment, by documents alone."""
SEGMENTS = 64
"""Parts of equal length into which a run is cut: step s of n lies in segment 64 * s // n, both counted from 0. A run of
n < 64 steps has one step in each of n segments, and leaves the others out."""
COLUMNS = {
    "part": "category",
    "kind": "category",
    "segment": "int16",
    "n_seqs": "int32",
    "max_seqlen": "int32",
    "cp_size": "int32",
    "count": "int64",
}
_KEY = b"thdprof.profile"

Count = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CapTime(_Part):
    """The expected step time under one cap."""

    max_seqs: Count
    """Documents."""
    step_ms: Milliseconds
    """Mean step of the cost table's model."""


class PartOfRun(_Part):
    """One dataset or shard, or several of one name."""

    name: str
    format: str
    uris: list[str]
    fingerprints: list[str] = Field(min_length=1)
    """Digests of the data that were counted, one a dataset."""
    exact: bool
    """Whether the micro-batches equal training's."""
    microbatches: Count
    steps: Count
    eager_step_ms: Milliseconds
    """Mean step, all eagerly."""
    caps: list[CapTime] = Field(min_length=1)
    """The mean step under single caps, ascending: from one that holds the least micro-batches, so that all run eagerly
    under less, to one that holds all."""
    warnings: list[str]
    """What `analyze` had to say about it."""


class Metadata(_Part):
    """All but the counts."""

    schema_: Literal["thdprof.profile/1"] = Field(default=SCHEMA, alias="schema")
    written_by: str
    training: Training
    costs: CostTable
    parts: list[PartOfRun] = Field(min_length=1)


def write_profile_file(path: Path, cells: pd.DataFrame, metadata: Metadata, *, force: bool) -> None:
    """Write a profile whole or not at all; `cells` has the columns of `COLUMNS`.

    Raises:
        DataError: the file exists and `force` is false, or it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from thdprof.files import json_text, replacing

    if not force and os.path.lexists(path):
        raise DataError(f"{path}: exists; give --force to replace it, or another name")
    text = json_text(metadata.model_dump(mode="json", by_alias=True), indent=None)
    columns = {
        name: pa.array(cells[name].astype(str)).dictionary_encode()
        if kind == "category"
        else pa.array(cells[name].to_numpy(), type=kind)
        for name, kind in COLUMNS.items()
    }
    content = pa.table(columns).replace_schema_metadata({_KEY: text})
    with replacing(path) as temporary, temporary.open("wb") as file:
        pq.write_table(content, file, compression="zstd")


def read_profile_file(path: Path) -> tuple[pd.DataFrame, Metadata]:
    """The counts of a profile, in the columns of `COLUMNS`, and what belongs to them.

    Raises:
        DataError: it cannot be read, is no profile, or of another version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:  # any name, also one that is not UTF-8
            content = pq.read_table(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a profile: {' '.join(str(error).split())}") from error
    text = (content.schema.metadata or {}).get(_KEY)
    if text is None:
        raise DataError(f"{path}: not a profile: analyze --profile writes one")
    told = _metadata(text, where=str(path))
    cells = _cells(content, where=str(path))
    _check_rows(cells, {part.name for part in told.parts}, where=str(path))
    _check_sums(cells, told.parts, where=str(path))
    return cells, told


def _metadata(text: bytes, *, where: str) -> Metadata:
    try:
        loaded = json.loads(text)
        schema = loaded.get("schema") if isinstance(loaded, dict) else None
        if schema != SCHEMA:
            raise DataError(f"{where}: schema is {schema!r}; this thdprof reads {SCHEMA!r}: analyse again")
        return Metadata.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in first["loc"])
        raise DataError(f"{where}: {field}: {first['msg']} (got {first.get('input')!r:.80})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: its metadata is not JSON: {error}") from error


def _cells(content: pa.Table, *, where: str) -> pd.DataFrame:
    """The columns as `COLUMNS` has them; nothing is rounded, cut or made up."""
    import pyarrow as pa

    names = content.schema.names
    if names != list(COLUMNS):
        raise DataError(f"{where}: columns are {', '.join(names)}, not {', '.join(COLUMNS)}")
    for name, kind in COLUMNS.items():
        column, wanted = content[name], "text" if kind == "category" else kind
        stored = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        text = pa.types.is_string(stored) or pa.types.is_large_string(stored)
        if not (text if kind == "category" else pa.types.is_integer(stored)):
            raise DataError(f"{where}: column {name} holds {stored}, not {wanted}")
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(f"{where}: row {row} (from 0): {name} is missing")
    try:
        frame = content.to_pandas()
        for name, kind in COLUMNS.items():
            if kind != "category":
                limits = np.iinfo(kind)
                outside = (frame[name] < limits.min) | (frame[name] > limits.max)
                _refuse(outside, frame[name], f"must fit {kind}", where=where)
        typed: pd.DataFrame = frame.astype(COLUMNS)
        return typed
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{where}: a column is of a wrong type: {error}") from error


def _refuse(wrong: pd.Series[bool], column: pd.Series[Any], rule: str, *, where: str) -> None:
    """Refuse a column of which rows are `wrong`, naming the first."""
    if wrong.any():
        row = int(np.argmax(wrong.to_numpy()))
        raise DataError(f"{where}: row {row} (from 0): {column.name}: {column.iloc[row]!s:.80}; {rule}")


def _check_rows(cells: pd.DataFrame, parts: set[str], *, where: str) -> None:
    """Refuse rows that no profile has."""
    segments = cells["kind"].astype(str).str.startswith("segment_")
    rules = (
        ("part", ~cells["part"].isin(parts), "must be one of the parts that the metadata name"),
        ("kind", ~cells["kind"].isin(KINDS), f"must be one of {', '.join(KINDS)}"),
        ("segment", segments & ~cells["segment"].between(0, SEGMENTS - 1), f"must be 0 to {SEGMENTS - 1}"),
        ("segment", ~segments & (cells["segment"] != -1), "must be -1 for counts of the whole run"),
        ("n_seqs", cells["n_seqs"] < 0, "must not be negative"),
        ("max_seqlen", segments & (cells["max_seqlen"] != -1), "must be -1 for counts of segments"),
        ("max_seqlen", ~segments & (cells["max_seqlen"] < 0), "must not be negative"),
        ("cp_size", cells["cp_size"] < 0, "must not be negative"),
        ("count", cells["count"] < 1, "every count must be at least 1"),
    )
    for name, wrong, rule in rules:
        _refuse(wrong, cells[name], rule, where=where)


def _check_sums(cells: pd.DataFrame, parts: Sequence[PartOfRun], *, where: str) -> None:
    """Refuse counts that do not add up to what the metadata tell."""
    known = [part.name for part in parts]
    if len(set(known)) < len(known):
        raise DataError(f"{where}: parts: two have one name")
    for part in parts:
        of_part = cells[cells["part"] == part.name]
        for kind, wanted in (
            ("microbatch", part.microbatches),
            ("step_max", part.steps),
            ("segment_microbatch", part.microbatches),
            ("segment_step_max", part.steps),
        ):
            found = int(of_part.loc[of_part["kind"] == kind, "count"].sum())
            if found != wanted:
                raise DataError(f"{where}: part {part.name}: {kind} counts add up to {found}, not {wanted}")
        in_segments = [
            set(of_part.loc[of_part["kind"] == kind, "segment"]) for kind in ("segment_microbatch", "segment_step_max")
        ]
        if in_segments[0] != in_segments[1]:
            segment = min(in_segments[0] ^ in_segments[1])
            raise DataError(f"{where}: part {part.name}: segment {segment} has either micro-batches or steps, not both")
        caps = [cap.max_seqs for cap in part.caps]
        if sorted(set(caps)) != caps:
            raise DataError(f"{where}: part {part.name}: caps are not ascending")
        if not (of_part["kind"] == "rank_step_max").any():
            raise DataError(f"{where}: part {part.name}: has no rank_step_max counts")
