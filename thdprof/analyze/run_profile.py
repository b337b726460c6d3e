"""The profile file: what a run's micro-batches look like, small, exact and mergeable. Parquet, `thdprof.profile/1`.

It holds counts, not micro-batches, so a run of any length fits in a report without reading the dataset again. Rows:

| column | meaning |
|---|---|
| `part` | which data: the name of a dataset or of a shard |
| `kind` | what is counted, one of `KINDS` |
| `segment` | in which 64th of its run, from 0 (shorter runs leave some out); -1: the whole run |
| `n_seqs` | documents |
| `max_seqlen` | tokens of the longest document; -1 where it is not told apart |
| `cp_size` | context-parallel size of the micro-batch under the dynamic kind; 0: the run's own |
| `count` | how many there are |

The fallback rates of any one cap follow exactly: a step falls back where its largest micro-batch does. The expected
step time does not follow from counts, and is stored at a grid of caps, in the metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thdprof.analyze.cost import CostTable
from thdprof.analyze.profile import FallbackRate, Histogram
from thdprof.errors import DataError
from thdprof.plan import TrainingPart
from thdprof.words import counted

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA: Literal["thdprof.profile/1"] = "thdprof.profile/1"
KINDS = ("microbatch", "rank_step_max", "step_max", "segment_microbatch", "segment_step_max")
"""Micro-batches by both measures; (rank, step) pairs and steps by the largest of each measure among their
micro-batches; and micro-batches and steps of every segment, by documents alone."""
SEGMENTS = 64
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


class _Metadata(_Part):
    schema_: Literal["thdprof.profile/1"] = Field(default=SCHEMA, alias="schema")
    written_by: str
    training: TrainingPart
    costs: CostTable
    parts: list[PartOfRun] = Field(min_length=1)


class RunProfile:
    """Counts of a run's micro-batches, (rank, step) pairs and steps, and the expected step time under single caps."""

    def __init__(
        self, cells: pd.DataFrame, *, training: TrainingPart, costs: CostTable, parts: list[PartOfRun]
    ) -> None:
        self.cells = cells
        """The rows of the file, in the columns of `COLUMNS`."""
        self.training = training
        """Training settings, the same for all parts."""
        self.costs = costs
        """What the step times come from."""
        self.parts = parts
        self._histograms: dict[tuple[str, str, str | None], Histogram] = {}

    @property
    def microbatches(self) -> int:
        """Micro-batches counted."""
        return sum(part.microbatches for part in self.parts)

    @property
    def steps(self) -> int:
        """Steps counted."""
        return sum(part.steps for part in self.parts)

    @property
    def num_runs(self) -> int:
        """Runs counted, each from its own begin to its end."""
        return sum(len(part.fingerprints) for part in self.parts)

    @property
    def exact(self) -> bool:
        """Whether all micro-batches equal training's."""
        return all(part.exact for part in self.parts)

    def rows(self, kind: str, *, part: str | None = None) -> pd.DataFrame:
        """The cells of `kind`, of one part or of all."""
        chosen = self.cells["kind"] == kind
        if part is not None:
            chosen &= self.cells["part"] == part
        return self.cells[chosen]

    def histogram(
        self, kind: str = "microbatch", measure: Literal["n_seqs", "max_seqlen"] = "n_seqs", *, part: str | None = None
    ) -> Histogram:
        """How often each value of `measure` occurs, whatever the other."""
        key = (kind, measure, part)
        if key not in self._histograms:
            self._histograms[key] = histogram_of(self.rows(kind, part=part), measure)
        return self._histograms[key]

    def fallback_rate(self, cap: int, *, part: str | None = None) -> FallbackRate:
        """The three rates where micro-batches of more than `cap` documents run eagerly; exact."""
        micro, pair, step = (
            share_over(self.histogram(kind, part=part), cap) for kind in ("microbatch", "rank_step_max", "step_max")
        )
        return FallbackRate(microbatch=micro, rank_step=pair, step=step)

    @property
    def eager_step_ms(self) -> float:
        """Mean step of all parts, all eagerly."""
        return sum(part.eager_step_ms * part.steps for part in self.parts) / self.steps

    def caps(self) -> list[CapTime]:
        """The mean step of all parts under the caps that every part tells, ascending."""
        return combine_caps(self.parts, self.costs)

    def relative_step_time(self, cap: int) -> float:
        """Mean step under `cap`, divided by that of running all eagerly; linear between the caps of `caps`."""
        known = self.caps()
        if cap < known[0].max_seqs:
            return 1.0
        top = known[-1]
        if cap > top.max_seqs:
            longest = self.training.seq_length
            larger = self.costs.replay_ms(cap, longest) / self.costs.replay_ms(top.max_seqs, longest)
            return top.step_ms * larger / self.eager_step_ms
        step_ms = np.interp(cap, [c.max_seqs for c in known], [c.step_ms for c in known])
        return float(step_ms) / self.eager_step_ms

    def curve(self) -> pd.DataFrame:
        """What each cap would do: `max_seqs`, `coverage`, the three rates, `step_ms`, `relative_step_time`."""
        import pandas as pd

        rows = []
        for cap in self.caps():
            rate = self.fallback_rate(cap.max_seqs)
            rows.append(
                {
                    "max_seqs": cap.max_seqs,
                    "coverage": 1 - rate.microbatch,
                    "fallback_rate_microbatch": rate.microbatch,
                    "fallback_rate_rank_step": rate.rank_step,
                    "fallback_rate_step": rate.step,
                    "step_ms": cap.step_ms,
                    "relative_step_time": cap.step_ms / self.eager_step_ms,
                }
            )
        return pd.DataFrame(rows)

    def percentiles(self) -> pd.DataFrame:
        """Mean and nearest-rank percentiles of both measures, a row a part and measure."""
        import pandas as pd

        from thdprof.analyze.profile import PERCENTILES

        rows = []
        for part in self.parts:
            for measure in ("n_seqs", "max_seqlen"):
                counted = self.histogram("microbatch", measure, part=part.name)
                row: dict[str, Any] = {"part": part.name, "measure": measure, "mean": counted.mean}
                row.update({name: counted.percentile(percent) for name, percent in PERCENTILES.items()})
                rows.append(row)
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        """How much was counted."""
        how = "replayed exactly" if self.exact else "not all replayed exactly"
        many = counted(self.microbatches, "micro-batch", "micro-batches")
        return f"Profile of {many} in {counted(self.steps, 'step')}, {how}"

    def _repr_html_(self) -> str:
        from thdprof.notebook_html import table

        frame = self.percentiles()
        return table(repr(self), list(frame.columns), frame.itertuples(index=False))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the profile whole or not at all.

        Raises:
            DataError: the file exists and `force` is false, or it cannot be written.
        """
        import os

        import pyarrow as pa
        import pyarrow.parquet as pq

        from thdprof import __version__
        from thdprof.files import replacing

        path = Path(path)
        if not force and os.path.lexists(path):
            raise DataError(f"{path}: exists; give --force to replace it, or another name")
        told = _Metadata(written_by=__version__, training=self.training, costs=self.costs, parts=self.parts)
        text = json.dumps(told.model_dump(mode="json", by_alias=True))
        columns = {
            name: pa.array(self.cells[name].astype(str)).dictionary_encode()
            if kind == "category"
            else pa.array(self.cells[name].to_numpy(), type=kind)
            for name, kind in COLUMNS.items()
        }
        content = pa.table(columns).replace_schema_metadata({_KEY: text})
        with replacing(path) as temporary, temporary.open("wb") as file:
            pq.write_table(content, file, compression="zstd")


def load_profile(path: Path | str) -> RunProfile:
    """Read a profile file.

    Raises:
        DataError: it cannot be read, is no profile, or of another version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
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
    profile = RunProfile(cells, training=told.training, costs=told.costs, parts=told.parts)
    _check(profile, where=str(path))
    return profile


def _metadata(text: bytes, *, where: str) -> _Metadata:
    try:
        loaded = json.loads(text)
        schema = loaded.get("schema") if isinstance(loaded, dict) else None
        if schema != SCHEMA:
            raise DataError(f"{where}: schema is {schema!r}; this thdprof reads {SCHEMA!r}: analyse again")
        return _Metadata.model_validate(loaded)
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


def _check(profile: RunProfile, *, where: str) -> None:
    """Refuse counts that do not add up to what the metadata tell."""
    known = [part.name for part in profile.parts]
    if len(set(known)) < len(known):
        raise DataError(f"{where}: parts: two have one name")
    for part in profile.parts:
        for kind, wanted in (
            ("microbatch", part.microbatches),
            ("step_max", part.steps),
            ("segment_microbatch", part.microbatches),
            ("segment_step_max", part.steps),
        ):
            found = int(profile.rows(kind, part=part.name)["count"].sum())
            if found != wanted:
                raise DataError(f"{where}: part {part.name}: {kind} counts add up to {found}, not {wanted}")
        caps = [cap.max_seqs for cap in part.caps]
        if sorted(set(caps)) != caps:
            raise DataError(f"{where}: part {part.name}: caps are not ascending")
        if not len(profile.rows("rank_step_max", part=part.name)):
            raise DataError(f"{where}: part {part.name}: has no rank_step_max counts")


def histogram_of(rows: pd.DataFrame, measure: str) -> Histogram:
    """The histogram of `measure` over cells, each with its count."""
    counts = np.bincount(rows[measure].to_numpy(), weights=rows["count"].to_numpy())
    return Histogram(counts.astype(np.int64))


def share_over(histogram: Histogram, value: int) -> float:
    """Share of values that are over `value`."""
    return float(histogram.counts[max(0, value + 1) :].sum() / histogram.total)


def combine_caps(parts: list[PartOfRun], costs: CostTable) -> list[CapTime]:
    """The caps whose mean step every part tells, weighted by steps.

    A part tells the caps on its grid, those below them (all run eagerly), and, where costs do not depend on
    max_seqlen, those above (all replay a larger graph).
    """
    known = [_Known(part, costs) for part in parts]
    total = sum(part.steps for part in parts)
    combined = []
    for cap in sorted({c.max_seqs for part in parts for c in part.caps}):
        times = [k.at(cap) for k in known]
        told = [t for t in times if t is not None]
        if len(told) == len(times):
            mean = sum(t * part.steps for t, part in zip(told, parts, strict=True)) / total
            combined.append(CapTime(max_seqs=cap, step_ms=mean))
    return combined


class _Known:
    """The step times of one part."""

    def __init__(self, part: PartOfRun, costs: CostTable) -> None:
        self._part, self._costs = part, costs
        self._by_cap = {c.max_seqs: c.step_ms for c in part.caps}

    def at(self, cap: int) -> float | None:
        """Milliseconds under `cap`; None where the part does not tell."""
        first, last = self._part.caps[0].max_seqs, self._part.caps[-1].max_seqs
        if cap in self._by_cap:
            return self._by_cap[cap]
        if cap < first:
            return self._part.eager_step_ms
        if cap > last and not self._costs.needs_max_seqlen:
            return self._by_cap[last] * self._costs.replay_ms(cap, 1) / self._costs.replay_ms(last, 1)
        return None
