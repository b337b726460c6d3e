"""The profile file `thdprof.profile/1`: counts of a run's micro-batches by shape, as parquet; small, exact, mergeable.

The file holds counts and no micro-batches, so a report on a long run needs neither the dataset nor much memory.
Columns:

| column | meaning |
|---|---|
| `part` | name of the dataset or shard that the micro-batches come from |
| `kind` | unit that is counted, one of `KINDS` |
| `segment` | 64th of the run that holds the units, from 0 (runs of fewer than 64 steps leave some out); -1: all of it |
| `n_seqs` | documents of the unit's fullest micro-batch |
| `max_seqlen` | tokens of the unit's longest document; -1 where units are counted by `n_seqs` alone |
| `cp_size` | context-parallel size of the micro-batch under the dynamic kind; 0: the run's own |
| `count` | number of units with these values |

The expected step time does not follow from counts. The file's metadata hold it for a grid of caps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.predictions import Capture, Memory, Range, Times, Verdict, Worth
from thdprof.errors import DataError
from thdprof.plan import Training
from thdprof.plan.file import validate

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA: Literal["thdprof.profile/1"] = "thdprof.profile/1"
KINDS = (
    "microbatch",
    "rank_step_max",
    "step_max",
    "segment_microbatch",
    "segment_step_max",
    "joint_microbatch",
    "joint_rank_step_max",
)
"""Units that are counted. Micro-batches are counted by documents and longest document; pairs of rank and step, and
steps, by the largest of each measure among their micro-batches; those of a segment by documents alone. Where ranks
decide together (`shared_capture_ranks`), there are joint kinds as well: every micro-batch counts by the largest of each
measure among those that are decided on with it."""
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
    """The cap, in documents."""
    step_ms: Milliseconds
    """Mean time of a step of the cost table's model under this cap."""
    relative_step_time: Range | None = None
    """Lowest and highest mean step time under this cap, divided by the mean step time with all micro-batches run
    eagerly; null where the times are not of the user's own model."""


class PartOfRun(_Part):
    """One dataset or shard, or several that were given the same name."""

    name: str
    """The name in column `part`."""
    format: str
    """Name of the dataset's format; that of the first dataset where there are several."""
    uris: list[str]
    """Files of the dataset, in order."""
    fingerprints: list[str] = Field(min_length=1)
    """Digest of the data of each dataset that was counted."""
    exact: bool
    """Whether the micro-batches equal those of training, not just their distribution."""
    microbatches: Count
    """Number of micro-batches that were counted."""
    steps: Count
    """Number of steps that were counted."""
    eager_step_ms: Milliseconds
    """Mean time of a step whose micro-batches all run eagerly."""
    caps: list[CapTime] = Field(min_length=1)
    """Mean time of a step under single caps, ascending. The first cap holds only the smallest micro-batches: all run
    eagerly under a smaller one. The last cap holds all micro-batches."""
    warnings: list[str]
    """Warnings of `analyze` about the part."""


class Predicted(_Part):
    """What the analysis predicted for the user's own model, under the plan that it recommends."""

    model: str | None = None
    """The model in a line; null where it is not known."""
    gpu: str | None = None
    """Name of the GPU that the times are of; null where no times were modelled."""
    times: Times
    """Times and where they come from."""
    verdict: Verdict
    """Whether graphs pay."""
    worth: Worth | None = None
    """What the plan is worth over the run; null without times."""
    memory: Memory | None = None
    """Peak memory; null where the model or its memory is not known."""
    capture: Capture | None = None
    """What capturing takes; null without times or graphs."""


class Metadata(_Part):
    """Everything in a profile but the counts, stored as JSON in the metadata of the parquet file."""

    schema_: Literal["thdprof.profile/1"] = Field(default=SCHEMA, alias="schema")
    """Name and version of the file's layout."""
    written_by: str
    """Version of thdprof that wrote the file."""
    training: Training
    """Training settings of all parts."""
    costs: CostTable
    """The table from which the step times were computed."""
    parts: list[PartOfRun] = Field(min_length=1)
    """The datasets or shards that were counted."""
    analysed_on: str | None = None
    """Day of the analysis, as YYYY-MM-DD; null in a joined profile and in files of earlier versions."""
    predicted: Predicted | None = None
    """What was predicted for the user's own model; null in a joined profile, since predictions are of one run, and in
    files of earlier versions."""


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
    """Read the counts of a profile, in the columns of `COLUMNS`, and its metadata.

    Raises:
        DataError: the file cannot be read, is no profile, or has another version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:  # any name, also one that is not UTF-8
            # One thread: the process may end right after a refusal, and must not end while others still read.
            content = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a profile: {' '.join(str(error).split())}") from error
    text = (content.schema.metadata or {}).get(_KEY)
    if text is None:
        raise DataError(f"{path}: not a profile: analyze --profile writes one")
    metadata = _metadata(text, where=str(path))
    cells = _cells(content, where=str(path))
    _check_rows(cells, {part.name for part in metadata.parts}, where=str(path))
    _check_sums(cells, metadata.parts, where=str(path))
    return cells, metadata


def _metadata(text: bytes, *, where: str) -> Metadata:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: its metadata is not JSON: {error}") from error
    schema = loaded.get("schema") if isinstance(loaded, dict) else None
    if schema != SCHEMA:
        raise DataError(f"{where}: schema is {schema!r}; this thdprof reads {SCHEMA!r}: analyse again")
    return validate(Metadata, loaded, where=where)


def _cells(content: pa.Table, *, where: str) -> pd.DataFrame:
    """The columns with the types of `COLUMNS`; values that a type cannot hold are refused, not rounded or cut."""
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
    """Refuse a column if rows of it are `wrong`, and name the first such row."""
    if wrong.any():
        row = int(np.argmax(wrong.to_numpy()))
        raise DataError(f"{where}: row {row} (from 0): {column.name}: {column.iloc[row]!s:.80}; {rule}")


def _check_rows(cells: pd.DataFrame, parts: set[str], *, where: str) -> None:
    """Refuse rows with values that no profile holds."""
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
    """Refuse counts that do not add up to the numbers in the metadata."""
    known = [part.name for part in parts]
    if len(set(known)) < len(known):
        raise DataError(f"{where}: parts: two have one name")
    for part in parts:
        of_part = {kind: cells[(cells["part"] == part.name) & (cells["kind"] == kind)] for kind in KINDS}
        wanted = {"microbatch": part.microbatches, "step_max": part.steps}
        wanted.update(segment_microbatch=part.microbatches, segment_step_max=part.steps)
        for kind, number in wanted.items():
            if (total := int(of_part[kind]["count"].sum())) != number:
                raise DataError(f"{where}: part {part.name}: {kind} counts add up to {total}, not {number}")
        alone = {*of_part["segment_microbatch"]["segment"]} ^ {*of_part["segment_step_max"]["segment"]}
        if alone:
            segment = min(alone)
            raise DataError(f"{where}: part {part.name}: segment {segment} has either micro-batches or steps, not both")
        caps = [cap.max_seqs for cap in part.caps]
        if sorted(set(caps)) != caps:
            raise DataError(f"{where}: part {part.name}: caps are not ascending")
        if of_part["rank_step_max"].empty:
            raise DataError(f"{where}: part {part.name}: has no rank_step_max counts")
