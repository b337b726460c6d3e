"""A run's profile: counts of its micro-batches by shape, expected step times under single caps, its file, and joins.

The file, `thdprof.profile/1`, is parquet: small, exact, mergeable. It holds counts and no micro-batches, so a report
on a long run needs neither the dataset nor much memory.
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

The fallback rates of a single cap follow exactly from the counts, because a step falls back where its largest
micro-batch does. The expected step time does not follow from them. The file's metadata hold it for a grid of caps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from thdprof import __version__
from thdprof.analyze.buckets.cost_table import CostTable, Milliseconds, StoredPart
from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.predictions import Capture, Memory, Range, Times, Verdict, Worth
from thdprof.dispatch import Bucket
from thdprof.errors import DataError, UsageError
from thdprof.files import json_text, replacing
from thdprof.plan import Count, FallbackRate, Training, validate
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training import TrainingSettings, definitions_of
from thdprof.words import html_table, make_printable, shorten, write_count

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from thdprof.analyze.analysis import Analysis

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
_LADDER = tuple(sorted({b << k for b in (2, 3) for k in range(24)} | {1}))
"""Caps 1, 2, 3, 4, 6, 8, ...: every profile has those in its range on its grid, so that merged profiles share caps."""
LONGEST_PART = 100
"""Most characters that the name of a part may have."""
_MOST_CELLS = 1 << 26
"""Most cells of a joint histogram that is counted by index; the values of a larger one are sorted."""

_OF_THE_DATA = ("train_samples", "weights")
"""Training settings that may differ between parts: they say how much data a run takes, not how its steps are formed."""
_IN_METADATA = ("training", "costs", "parts", "analysed_on", "predicted")
"""Attributes of a profile that its file has in the metadata."""


class CapTime(StoredPart):
    """The expected step time under one cap."""

    max_seqs: Count
    """The cap, in documents."""
    step_ms: Milliseconds
    """Mean time of a step of the cost table's model under this cap."""
    relative_step_time: Range | None = None
    """Lowest and highest mean step time under this cap, divided by the mean step time with all micro-batches run
    eagerly; null where the times are not of the user's own model."""


class PartOfRun(StoredPart):
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


class Predicted(StoredPart):
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


class Metadata(StoredPart):
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
    """Day of the analysis, as YYYY-MM-DD; null in a joined profile."""
    predicted: Predicted | None = None
    """What was predicted for the user's own model; null in a joined profile, since predictions are of one run."""


@dataclass(repr=False, eq=False)
class RunProfile:
    """Counts of a run's micro-batches, pairs of rank and step, and steps; and expected step times under single caps."""

    cells: pd.DataFrame
    """The counts, in the columns of `COLUMNS`."""
    _: KW_ONLY
    training: TrainingSettings
    """Training settings, which all parts share."""
    costs: CostTable
    """The table from which the step times were computed."""
    parts: list[PartOfRun]
    """The datasets or shards that were counted."""
    analysed_on: str | None = None
    """Day of the analysis, as YYYY-MM-DD; None where it is not known, or profiles were joined."""
    predicted: Predicted | None = None
    """What the analysis predicted for the user's own model; None where it is not known, or profiles were joined."""
    _histograms: dict[tuple[str, str, str | None], Histogram] = field(default_factory=dict, init=False)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches that were counted."""
        return sum(part.microbatches for part in self.parts)

    @property
    def steps(self) -> int:
        """Number of steps that were counted."""
        return sum(part.steps for part in self.parts)

    @property
    def num_runs(self) -> int:
        """Number of runs that were counted, each from its first step to its last."""
        return sum(len(part.fingerprints) for part in self.parts)

    @property
    def exact(self) -> bool:
        """Whether the micro-batches of all parts equal those of training."""
        return all(part.exact for part in self.parts)

    def rows(self, kind: str, *, part: str | None = None) -> pd.DataFrame:
        """The counts of units of `kind`, of one part or (None) of all."""
        chosen = self.cells["kind"] == kind
        if part is not None:
            chosen &= self.cells["part"] == part
        return self.cells[chosen]

    def histogram(
        self, kind: str = "microbatch", measure: Literal["n_seqs", "max_seqlen"] = "n_seqs", *, part: str | None = None
    ) -> Histogram:
        """How often each value of `measure` occurs among the units of `kind`, of one part or (None) of all."""
        key = (kind, measure, part)
        if key not in self._histograms:
            self._histograms[key] = histogram_of(self.rows(kind, part=part), measure)
        return self._histograms[key]

    def segments(self, part: str) -> NDArray[np.int64]:
        """Segments of the run in which `part` has steps, ascending, shape [n]: all, or one a step of a short run."""
        numbers: NDArray[np.int64] = np.unique(self.rows("segment_step_max", part=part)["segment"]).astype(np.int64)
        return numbers

    def fallback_rate(self, cap: int, *, part: str | None = None) -> FallbackRate:
        """The three fallback rates, exact, if micro-batches of more than `cap` documents run eagerly."""
        joint = "joint_" if self.training.shared_capture_ranks > 1 else ""
        kinds = (f"{joint}microbatch", f"{joint}rank_step_max", "step_max")
        micro, pair, step = (share_over(self.histogram(kind, part=part), cap) for kind in kinds)
        return FallbackRate(microbatch=micro, rank_step=pair, step=step)

    @property
    def eager_step_ms(self) -> float:
        """Mean time of a step of all parts, in milliseconds, if all micro-batches run eagerly."""
        return sum(part.eager_step_ms * part.steps for part in self.parts) / self.steps

    def caps(self) -> list[CapTime]:
        """Mean time of a step of all parts under each cap for which every part has a time, ascending."""
        return combine_caps(self.parts, self.costs, self.training)

    def relative_step_times(self, caps: Sequence[int]) -> list[Range] | None:
        """The range of the mean step time under each of `caps`, divided by that of an eager step.

        Between the caps of the profile's grid it is linear. None where times are not of the user's own model, or where
        they were modelled for several runs that were joined: ranges of runs do not add up.
        """
        if self.num_runs == 1 and all(c.relative_step_time is not None for c in self.parts[0].caps):
            grid = self.parts[0].caps
            ends = np.array([c.relative_step_time for c in grid], dtype=np.float64)
        elif self.costs.origin == "measured":
            grid = self.caps()
            ends = np.repeat([[c.step_ms / self.eager_step_ms] for c in grid], 2, axis=1)
        else:
            return None
        known, top = [c.max_seqs for c in grid], grid[-1].max_seqs
        found = []
        for cap in caps:
            if cap < known[0]:
                found.append((1.0, 1.0))
                continue
            low, high = (float(np.interp(cap, known, ends[:, end])) for end in (0, 1))
            larger = 1.0  # replay time of a graph beyond the grid, divided by that of the grid's last
            if cap > top:
                longest = self.training.seq_length
                larger = self.costs.replay_ms(cap, longest) / self.costs.replay_ms(top, longest)
            found.append((low * larger, high * larger))
        return found

    def curve(self) -> pd.DataFrame:
        """A row for each cap: `max_seqs`, `coverage`, three fallback rates, `step_ms`, `relative_step_time`.

        Both times are None where they are not of the user's own model.
        """
        import pandas as pd

        rows = []
        for cap in self.caps():
            rate = self.fallback_rate(cap.max_seqs)
            row = {"max_seqs": cap.max_seqs, "coverage": 1 - rate.microbatch}
            row.update({f"fallback_rate_{level}": share for level, share in rate})
            step_ms = None if self.costs.origin == "none" else cap.step_ms
            relative = None if step_ms is None else step_ms / self.eager_step_ms
            rows.append({**row, "step_ms": step_ms, "relative_step_time": relative})
        return pd.DataFrame(rows)

    def percentiles(self) -> pd.DataFrame:
        """Mean and nearest-rank percentiles of both measures, with a row for each part and measure."""
        import pandas as pd

        rows = []
        for part in self.parts:
            for measure in ("n_seqs", "max_seqlen"):
                counted = self.histogram("microbatch", measure, part=part.name).percentiles()
                rows.append({"part": part.name, "measure": measure, **counted.model_dump()})
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        how = "replayed exactly" if self.exact else "not all replayed exactly"
        many = write_count(self.microbatches, "micro-batch", "micro-batches")
        return f"Profile of {many} in {write_count(self.steps, 'step')}, {how}"

    def _repr_html_(self) -> str:
        frame = self.percentiles()
        return html_table(repr(self), list(frame.columns), frame.itertuples(index=False))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the profile to `path`, whole or not at all.

        Raises:
            DataError: the file exists and `force` is false, or it cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not force and os.path.lexists(path):
            raise DataError(f"{path}: exists; give --force to replace it, or another name")
        metadata = Metadata(written_by=__version__, **{name: getattr(self, name) for name in _IN_METADATA})
        text = json_text(metadata.model_dump(mode="json", by_alias=True), indent=None)
        columns = {
            name: pa.array(self.cells[name].astype(str)).dictionary_encode()
            if kind == "category"
            else pa.array(self.cells[name].to_numpy(), type=kind)
            for name, kind in COLUMNS.items()
        }
        content = pa.table(columns).replace_schema_metadata({_KEY: text})
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            pq.write_table(content, file, compression="zstd")


def make_profile(analysis: Analysis, *, part: str | None = None) -> RunProfile:
    """Make the profile of an analysis.

    Args:
        part: name of the data in the profile; None: the dataset's file, or the directory that its files share.

    Raises:
        UsageError: `part` cannot be a name, as `check_part` says.
    """
    import pandas as pd

    table = analysis.microbatches
    check_part(part)
    name = shorten(_name_data(analysis.dataset.uris), LONGEST_PART) if part is None else part
    frame = pd.concat([*_whole_run(table), *_segments(table)], ignore_index=True)
    frame.insert(0, "part", name)
    caps = _grid(analysis)
    eager_ms, *times = one_cap_step_ms(analysis, analysis.costs, [0, *caps])  # a cap of 0: all run eagerly
    ranges: list[Range | None] = [None] * len(caps)
    if not analysis.times.origin == analysis.costs.origin == "none":
        ends = [one_cap_step_ms(analysis, costs, [0, *caps]) for costs in analysis.costs.ends()]
        relative = np.array([step_ms[1:] / step_ms[0] for step_ms in ends])
        ranges = [*zip(relative.min(axis=0).tolist(), relative.max(axis=0).tolist(), strict=True)]
    if (model := analysis.model) is not None:
        experts = f", {write_count(model.num_experts, 'expert')}" if model.num_experts else ""
        described = f"{write_count(model.num_layers, 'layer')} of hidden size {model.hidden_size:,}{experts}"
    part_of_run = PartOfRun(
        name=name,
        format=analysis.dataset.format,
        uris=analysis.dataset.uris,
        fingerprints=[analysis.dataset.fingerprint],
        exact=table.exact,
        microbatches=len(table),
        steps=table.num_steps,
        eager_step_ms=float(eager_ms),
        caps=[
            CapTime(max_seqs=n, step_ms=float(ms), relative_step_time=relative)
            for n, ms, relative in zip(caps, times, ranges, strict=True)
        ],
        warnings=list(analysis.warnings),
    )
    fields = ("gpu", "times", "verdict", "worth", "memory", "capture")
    return RunProfile(
        frame.astype(COLUMNS),
        training=analysis.settings,
        costs=analysis.costs,
        parts=[part_of_run],
        analysed_on=datetime.now(tz=UTC).date().isoformat(),
        predicted=Predicted(
            model=None if model is None else described, **{name: getattr(analysis, name) for name in fields}
        ),
    )


def one_cap_step_ms(analysis: Analysis, costs: CostTable, caps: list[int]) -> NDArray[np.float64]:
    """Mean step time under each of `caps`, ascending, alone by `costs`, in milliseconds, shape [caps]."""
    settings, longest, n_tokens = analysis.settings, analysis.longest, analysis.graph_tokens
    step_costs = StepCosts(
        analysis.microbatches,
        costs,
        caps,
        sorted({*longest.values()}),
        settings.pipeline_parallel_size,
        n_tokens=n_tokens,
        cp_size=settings.context_parallel_size,
        goes_ahead=settings.host_goes_ahead,
    )
    return step_costs.step_ms([tuple(Bucket(n, longest[size], n_tokens, size) for size in longest) for n in caps])


def check_part(part: str | None) -> None:
    """Refuse a part's name that tables and figures cannot show. None is accepted: no name was given.

    Raises:
        UsageError: the name is no text, is empty or too long, or holds characters that cannot be shown.
    """
    if part is None:
        return
    if not isinstance(part, str):
        raise UsageError(f"--part: a name is text, not {type(part).__name__} ({part!r:.40})")
    if not part.strip():
        raise UsageError("--part: the name is empty; leave it out for that of the file or directory")
    if len(part) > LONGEST_PART:
        raise UsageError(f"--part {part[:20]}…: {len(part)} characters; a name has at most {LONGEST_PART}")
    if not part.isprintable():
        raise UsageError(f"--part {part!a}: holds line breaks or characters that cannot be shown; leave them out")


def _name_data(uris: list[str]) -> str:
    if len(uris) == 1:
        return Path(uris[0]).name
    try:
        return Path(os.path.commonpath(uris)).name or "data"
    except ValueError:  # relative paths beside absolute ones
        return "data"


def _grid(analysis: Analysis) -> list[int]:
    """Caps for which the expected step time is stored: candidates, percentiles, smallest and largest, and `_LADDER`."""
    histogram = analysis.profile.n_seqs
    least, most = max(1, int(np.flatnonzero(histogram.counts)[0])), histogram.percentile(100.0)
    named = {c.max_seqs for c in analysis.recommendation.candidates}
    named |= {histogram.percentile(p) for p in PERCENTILES.values()}
    return sorted(n for n in {least, most, *named, *_LADDER} if n == most or least <= n <= max(most, *named))


def _whole_run(table: MicrobatchTable) -> list[pd.DataFrame]:
    """Counts of micro-batches, of pairs of rank and step, and of steps, by documents and longest document."""
    n_seqs, max_seqlen = (_largest_by_rank(table, values) for values in (table.n_seqs, table.max_seqlen))
    if table.groups is None:
        counts = [_count("microbatch", table.n_seqs, table.max_seqlen)]
    else:
        by_size = {int(size): table.groups.cp_size == size for size in np.unique(table.groups.cp_size)}
        counts = [_count("microbatch", table.n_seqs[at], table.max_seqlen[at], n) for n, at in by_size.items()]
    counts.append(_count("rank_step_max", n_seqs.reshape(-1), max_seqlen.reshape(-1)))
    counts.append(_count("step_max", n_seqs.max(axis=1), max_seqlen.max(axis=1)))
    if table.shared_capture_ranks > 1:
        of_group = table.joint(table.n_seqs), table.joint(table.max_seqlen)
        counts.append(_count("joint_microbatch", *of_group))
        n_seqs, max_seqlen = (_largest_by_rank(table, values).reshape(-1) for values in of_group)
        counts.append(_count("joint_rank_step_max", n_seqs, max_seqlen))
    return counts


def _count(kind: str, n_seqs: NDArray[np.integer], max_seqlen: NDArray[np.integer], cp_size: int = 0) -> pd.DataFrame:
    import pandas as pd

    width = int(max_seqlen.max()) + 1
    keys = n_seqs.astype(np.int64) * width + max_seqlen
    if (int(n_seqs.max()) + 1) * width <= _MOST_CELLS:
        every = np.bincount(keys)
        present = np.flatnonzero(every)
        counts = every[present]
    else:
        present, counts = np.unique(keys, return_counts=True)
    columns = {"n_seqs": present // width, "max_seqlen": present % width, "cp_size": cp_size, "count": counts}
    return pd.DataFrame({"kind": kind, "segment": -1, **columns})


def _segments(table: MicrobatchTable) -> list[pd.DataFrame]:
    """Counts of micro-batches and of steps in every segment of the run, by documents."""
    of_step = np.arange(table.num_steps, dtype=np.int64) * SEGMENTS // table.num_steps
    if table.groups is not None:
        of_microbatch = of_step[table.groups.step]
    else:
        of_microbatch = np.repeat(of_step, table.num_microbatches.astype(np.int64) * table.data_parallel_size)
    largest = _largest_by_rank(table, table.n_seqs).max(axis=1)
    counts = [
        _count("segment_microbatch", of_microbatch, table.n_seqs),
        _count("segment_step_max", of_step, largest),
    ]
    for frame in counts:
        frame["segment"], frame["n_seqs"], frame["max_seqlen"] = frame["n_seqs"], frame["max_seqlen"], -1
    return counts


def _largest_by_rank(table: MicrobatchTable, values: NDArray[np.int32]) -> NDArray[np.int32]:
    """The largest of `values`, shape [micro-batches], that each rank has in a step, shape [steps, ranks]; 0 if none."""
    if (groups := table.groups) is None:
        return table.per_rank_step(values, np.maximum).astype(np.int32, copy=False)
    largest = np.zeros((table.num_steps, table.data_parallel_size), dtype=np.int32)
    for offset in range(int(groups.cp_size.max())):
        shared = groups.cp_size > offset
        np.maximum.at(largest, (groups.step[shared], groups.first_rank[shared] + offset), values[shared])
    return largest


def load_profile(path: Path | str) -> RunProfile:
    """Read a profile file.

    Raises:
        DataError: the file cannot be read, is no profile, or has another version.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with Path(path).open("rb") as file:  # any name, also one that is not UTF-8
            # One thread: the process may end right after a refusal, and must not end while others still read.
            content = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a profile: {' '.join(str(error).split())}") from error
    text, where = (content.schema.metadata or {}).get(_KEY), str(path)
    if text is None:
        raise DataError(f"{path}: not a profile: analyze --profile writes one")
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its metadata is not JSON: {error}") from error
    schema = loaded.get("schema") if isinstance(loaded, dict) else None
    if schema != SCHEMA:
        raise DataError(f"{path}: schema is {schema!r}; this thdprof reads {SCHEMA!r}: analyse again")
    metadata, cells = validate(Metadata, loaded, where=where), _cells(content, where=where)
    _check_rows(cells, {part.name for part in metadata.parts}, where=where)
    _check_sums(cells, metadata.parts, where=where)
    return RunProfile(cells, **{name: getattr(metadata, name) for name in _IN_METADATA})


def histogram_of(rows: pd.DataFrame, measure: str) -> Histogram:
    """The histogram of column `measure` of `rows`, in which every row counts as often as its `count` says."""
    counts = np.bincount(rows[measure].to_numpy(), weights=rows["count"].to_numpy())
    return Histogram(counts.astype(np.int64))


def shares_over(histogram: Histogram, values: ArrayLike) -> list[float]:
    """The shares of what `histogram` counts that are larger than each of `values`, whole numbers."""
    within = np.pad(np.cumsum(histogram.counts), (1, 0))[np.clip(np.add(values, 1), 0, len(histogram.counts))]
    shares: list[float] = ((histogram.total - within) / histogram.total).tolist()
    return shares


def share_over(histogram: Histogram, value: int) -> float:
    """The share of what `histogram` counts that is larger than `value`."""
    return shares_over(histogram, [value])[0]


def combine_caps(parts: list[PartOfRun], costs: CostTable, training: TrainingSettings) -> list[CapTime]:
    """Mean time of a step under each cap for which every part has a time; parts are weighted by their steps.

    A part has times for the caps on its grid, for those below it (all micro-batches run eagerly) and, where costs do
    not depend on max_seqlen, for those above it (all micro-batches replay a larger graph).
    """
    total, combined = sum(part.steps for part in parts), []
    for cap in sorted({c.max_seqs for part in parts for c in part.caps}):
        times = [_step_ms(part, cap, costs, training) for part in parts]
        known = [ms for ms in times if ms is not None]
        if len(known) == len(parts):
            mean = sum(ms * part.steps for ms, part in zip(known, parts, strict=True)) / total
            combined.append(CapTime(max_seqs=cap, step_ms=mean))
    return combined


def _step_ms(part: PartOfRun, cap: int, costs: CostTable, training: TrainingSettings) -> float | None:
    """Mean milliseconds of a step of one part under `cap`; None where the part has no time for it."""
    known = {c.max_seqs: c.step_ms for c in part.caps}
    if cap in known:
        return known[cap]
    if cap < part.caps[0].max_seqs:
        return part.eager_step_ms
    top = part.caps[-1]
    if cap < top.max_seqs or costs.needs_max_seqlen:
        return None
    before, after = costs.replay_ms(top.max_seqs, 1), costs.replay_ms(cap, 1)
    outside_ms, optimizer_ms = costs.outside_ms or 0.0, costs.optimizer_ms or 0.0
    # under dynamic context parallelism the number of replays is not known: groups wait for each other between them
    if not training.has_dynamic_cp and (outside_ms or optimizer_ms or costs.ms_per_squared_token):
        of_a_rank = part.microbatches / (part.steps * training.data_parallel_size)
        return top.step_ms + (of_a_rank + training.pipeline_parallel_size - 1) * (after - before)
    return (top.step_ms - optimizer_ms) * ((after + outside_ms) / (before + outside_ms)) + optimizer_ms


def merge_profiles(profiles: Sequence[RunProfile], *, names: Sequence[str]) -> RunProfile:
    """Join profiles into one that has the parts of all; the counts of parts that share a name are added up.

    `names` are those of the profiles in error messages.

    Raises:
        UsageError: fewer than two profiles are given.
        DataError: two profiles have different settings or cost tables, or count the same data.
    """
    import pandas as pd

    if len(profiles) < 2:
        raise UsageError("merge: give at least two profiles")
    first = profiles[0]
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        _check_joinable(first, profile, names[0], name)
    by_name: dict[str, list[PartOfRun]] = {}
    seen: dict[str, str] = {}
    for profile, name in zip(profiles, names, strict=True):
        for part in profile.parts:
            for fingerprint in part.fingerprints:
                if fingerprint in seen:
                    where = "given twice" if seen[fingerprint] == name else f"in {seen[fingerprint]}"
                    raise DataError(f"{name}: part {part.name}: the same data is {where}; leave one out")
                seen[fingerprint] = name
            by_name.setdefault(part.name, []).append(part)
    keys = [name for name in COLUMNS if name != "count"]
    together = pd.concat([p.cells for p in profiles], ignore_index=True)
    cells = together.groupby(keys, sort=False, as_index=False, observed=True).agg({"count": "sum"})
    differing = {n for n in _OF_THE_DATA for p in profiles if getattr(p.training, n) != getattr(first.training, n)}
    unknown: dict[str, Any] = dict.fromkeys(differing)
    training = replace(first.training, **unknown)
    parts = [same[0] if len(same) == 1 else _add(same, first.costs, training) for same in by_name.values()]
    return RunProfile(cells.astype(COLUMNS), training=training, costs=first.costs, parts=parts)


def same_settings(one: TrainingSettings, other: TrainingSettings) -> tuple[str, Any, Any] | None:
    """The first setting that would form steps in another way, with both values; None where all are equal."""
    for name in definitions_of(TrainingSettings):
        if name not in _OF_THE_DATA and getattr(one, name) != getattr(other, name):
            return name, getattr(one, name), getattr(other, name)
    return None


def _check_joinable(one: RunProfile, other: RunProfile, name: str, other_name: str) -> None:
    differs = same_settings(one.training, other.training)
    if differs is not None:
        setting, here, there = differs
        raise DataError(f"{other_name}: {setting} is {there}, but {here} in {name}: profile both with the same")
    for part in CostTable.model_fields:
        if getattr(one.costs, part) != getattr(other.costs, part):
            raise DataError(
                f"{other_name}: another cost table than that of {name} ({part} differs: {other.costs.name} on "
                f"{other.costs.hardware}, {one.costs.name} on {one.costs.hardware}): profile both with the same"
            )


def _add(parts: Sequence[PartOfRun], costs: CostTable, training: TrainingSettings) -> PartOfRun:
    caps = combine_caps(list(parts), costs, training)
    if not caps:
        raise DataError(f"part {parts[0].name}: its profiles have no cap in common; give each a --part name of its own")
    steps = sum(p.steps for p in parts)
    return PartOfRun(
        name=parts[0].name,
        format=parts[0].format,
        uris=[uri for p in parts for uri in p.uris],
        fingerprints=[f for p in parts for f in p.fingerprints],
        exact=all(p.exact for p in parts),
        microbatches=sum(p.microbatches for p in parts),
        steps=steps,
        eager_step_ms=sum(p.eager_step_ms * p.steps for p in parts) / steps,
        caps=caps,
        warnings=list(dict.fromkeys(w for p in parts for w in p.warnings)),
    )


def describe_merged(profile: RunProfile) -> str:
    """One line for each part: its micro-batches, steps, and percentiles of documents in a micro-batch."""
    lines = []
    for part in profile.parts:
        documents = profile.histogram(part=part.name)
        many = write_count(part.microbatches, "micro-batch", "micro-batches")
        data = f"{len(part.fingerprints)} datasets added up, " if len(part.fingerprints) > 1 else ""
        lines.append(
            f"{make_printable(part.name)}: {data}{many} in {write_count(part.steps, 'step')}, documents P50 "
            f"{documents.percentile(50.0):,}, P99 {documents.percentile(99.0):,}, max {documents.percentile(100.0):,}\n"
        )
    return "".join(lines)


def merged_to_json(profile: RunProfile) -> str:
    """The profile without its counts as JSON text, schema `thdprof.profile/1`."""
    value = {
        "schema": SCHEMA,
        "microbatches": profile.microbatches,
        "steps": profile.steps,
        "exact": profile.exact,
        "parts": [part.model_dump(mode="json", exclude={"caps", "warnings"}) for part in profile.parts],
        "candidates": profile.curve().to_dict("records"),
    }
    return json_text(value)


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
