"""A run's profile: counts of its micro-batches by shape, expected step times under single caps, its file, and joins.

The file, `thdprof.profile/1`, is parquet: small, exact, mergeable. It holds counts and no micro-batches, so a report
on a long run needs neither the dataset nor much memory.
Columns:

| column | meaning |
|---|---|
| `part` | name of the dataset or shard that the micro-batches come from |
| `kind` | unit that is counted |
| `segment` | 64th of the run that holds the units, from 0 (runs of fewer than 64 steps leave some out); -1: all of it |
| `n_seqs` | documents of the unit's fullest micro-batch |
| `max_seqlen` | tokens of the unit's longest document; -1 where units are counted by `n_seqs` alone |
| `cp_size` | context-parallel size of the micro-batch under the dynamic kind; 0: the run's own |
| `count` | number of units with these values |

The kind `microbatch` counts micro-batches. `rank_step_max` counts pairs of rank and step, and `step_max` steps, by the
largest of each measure among their micro-batches. `segment_microbatch` and `segment_step_max` count those of a segment
by documents alone. Where ranks decide together (`shared_capture_ranks`), `joint_microbatch` and `joint_rank_step_max`
count every micro-batch by the largest of each measure among those that are decided on with it.

The fallback rates of a single cap follow exactly from the counts, because a step falls back where its largest
micro-batch does. The expected step time does not follow from them. The file's metadata hold it for a grid of caps, with
the other fields of `RunProfile`, as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from thdprof import __version__
from thdprof.analyze.buckets.cost_table import CostTable, Milliseconds, StoredPart
from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram
from thdprof.analyze.buckets.step_costs import costs_of_run
from thdprof.analyze.predictions import Predictions, Range
from thdprof.dispatch import Bucket
from thdprof.errors import DataError, UsageError
from thdprof.files import json_text, replacing
from thdprof.plan import Count, FallbackRate, Plan, Training, validate
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training import TrainingSettings, definitions_of
from thdprof.words import html_table, make_printable, shorten, write_count

if TYPE_CHECKING:
    import pyarrow as pa
    from pandas import DataFrame

    from thdprof.analyze.analysis import Analysis
else:
    DataFrame = Any  # pydantic reads the type of a field, and pandas is imported where a frame is made

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
"""The columns of the counts, with their types."""
LONGEST_PART = 100
"""Most characters that the name of a part may have."""
Measure = Literal["n_seqs", "max_seqlen"]
"""What micro-batches are counted by."""
_MEASURES: tuple[Measure, ...] = ("n_seqs", "max_seqlen")
_KEY = b"thdprof.profile"
_LADDER = tuple(sorted({b << k for b in (2, 3) for k in range(24)} | {1}))
"""Caps 1, 2, 3, 4, 6, 8, ...: every profile has those in its range on its grid, so that merged profiles share caps."""
_OF_THE_DATA = ("train_samples", "weights")
"""Training settings that may differ between parts: they say how much data a run takes, not how its steps are formed."""


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
    caps: dict[Count, Milliseconds] = Field(min_length=1)
    """Mean time of a step under single caps, in documents, ascending. The first cap holds only the smallest
    micro-batches: all run eagerly under a smaller one. The last cap holds all micro-batches."""
    relative_step_times: dict[Count, Range] | None
    """Lowest and highest mean step time under the same caps, divided by that of an eager step; null where the times are
    not of the user's own model, or several datasets were added up."""
    warnings: list[str]
    """Warnings of `analyze` about the part."""


class RunProfile(StoredPart):
    """Counts of a run's micro-batches, pairs of rank and step, and steps; and expected step times under single caps."""

    cells: DataFrame = Field(exclude=True)
    """The counts, in the columns of `COLUMNS`."""
    schema_: Literal["thdprof.profile/1"] = Field(default="thdprof.profile/1", alias="schema")
    """Name and version of the file's layout."""
    written_by: str = __version__
    """Version of thdprof that made the profile."""
    training: Training
    """Training settings, which all parts share."""
    costs: CostTable
    """The table from which the step times were computed."""
    parts: list[PartOfRun] = Field(min_length=1)
    """The datasets or shards that were counted."""
    analysed_on: str | None = None
    """Day of the analysis, as YYYY-MM-DD; None where profiles were joined."""
    model: str | None = None
    """The user's own model in a line; None where it is not known, or profiles were joined."""
    predicted: Predictions | None = None
    """What was predicted for that model under the recommended plan; None where profiles were joined, since predictions
    are of one run."""
    _histograms: dict[tuple[str, str, str | None], Histogram] = PrivateAttr(default_factory=dict)

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

    def rows(self, kind: str, *, part: str | None = None) -> DataFrame:
        """The counts of units of `kind`, of one part or (None) of all."""
        chosen = self.cells["kind"] == kind
        if part is not None:
            chosen &= self.cells["part"] == part
        return self.cells[chosen]

    def histogram(self, kind: str = "microbatch", measure: Measure = "n_seqs", *, part: str | None = None) -> Histogram:
        """How often each value of `measure` occurs among the units of `kind`, of one part or (None) of all."""
        key = (kind, measure, part)
        if key not in self._histograms:
            self._histograms[key] = histogram_of(self.rows(kind, part=part), measure)
        return self._histograms[key]

    def fallback_rate(self, cap: int, *, part: str | None = None) -> FallbackRate:
        """The three fallback rates, exact, if micro-batches of more than `cap` documents run eagerly."""
        joint = "joint_" if self.training.shared_capture_ranks > 1 else ""
        kinds = (f"{joint}microbatch", f"{joint}rank_step_max", "step_max")
        micro, pair, step = (share_over(self.histogram(kind, part=part), cap) for kind in kinds)
        return FallbackRate(microbatch=micro, rank_step=pair, step=step)

    @property
    def eager_step_ms(self) -> float:
        """Mean time of a step of all parts, in milliseconds, if all micro-batches run eagerly."""
        return self._mean([part.eager_step_ms for part in self.parts])

    def _mean(self, step_ms: Sequence[float]) -> float:
        """The mean time of a step of all parts, which take `step_ms`, one for each."""
        return float(np.average(step_ms, weights=[part.steps for part in self.parts]))

    def caps(self) -> dict[int, float]:
        """Mean milliseconds of a step of all parts under each cap for which every part has a time, ascending.

        A part has times for the caps on its grid, for those below it (all micro-batches run eagerly) and, where costs
        do not depend on max_seqlen, for those above it (all micro-batches replay a larger graph).
        """
        combined = {}
        for cap in sorted({cap for part in self.parts for cap in part.caps}):
            times = [ms for part in self.parts if (ms := _step_ms(part, cap, self.costs, self.training)) is not None]
            if len(times) == len(self.parts):
                combined[cap] = self._mean(times)
        return combined

    def relative_step_times(self, caps: Sequence[int]) -> list[Range] | None:
        """The range of the mean step time under each of `caps`, divided by that of an eager step.

        Between the caps of the profile's grid it is linear. None where times are not of the user's own model, or where
        they were modelled for several runs that were joined: ranges of runs do not add up.
        """
        known = self.parts[0].relative_step_times if self.num_runs == 1 else None
        if known is None and self.costs.origin == "measured":
            known = {cap: (step_ms / self.eager_step_ms,) * 2 for cap, step_ms in self.caps().items()}
        if known is None:
            return None
        # beyond the grid a step takes longer by as much as the replay of one graph
        top, longest = max(known), self.training.seq_length
        replays_ms = np.array([self.costs.replay_ms(max(cap, top), longest) for cap in caps])
        larger = replays_ms / self.costs.replay_ms(top, longest)
        low, high = (larger * np.interp(caps, [*known], ends, left=1.0) for ends in zip(*known.values(), strict=True))
        return [*zip(low.tolist(), high.tolist(), strict=True)]

    def curve(self) -> DataFrame:
        """A row for each cap: `max_seqs`, `coverage`, three fallback rates, `step_ms`, `relative_step_time`.

        Both times are None where they are not of the user's own model.
        """
        import pandas as pd

        rows: list[dict[str, float | None]] = []
        for cap, step_ms in self.caps().items():
            rates = {f"fallback_rate_{level}": share for level, share in self.fallback_rate(cap)}
            times = (None, None) if self.costs.origin == "none" else (step_ms, step_ms / self.eager_step_ms)
            rows.append({"max_seqs": cap, "coverage": 1 - rates["fallback_rate_microbatch"], **rates})
            rows[-1].update(step_ms=times[0], relative_step_time=times[1])
        return pd.DataFrame(rows)

    def percentiles(self) -> DataFrame:
        """Mean and nearest-rank percentiles of both measures, with a row for each part and measure."""
        import pandas as pd

        return pd.DataFrame(
            {"part": p.name, "measure": name, **self.histogram(measure=name, part=p.name).percentiles().model_dump()}
            for p in self.parts
            for name in _MEASURES
        )

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
        text = json_text(self.model_dump(mode="json", by_alias=True), indent=None)
        content = pa.Table.from_pandas(self.cells, _arrow_schema(), preserve_index=False)
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            content = content.replace_schema_metadata({_KEY: text})
            pq.write_table(content, file, compression="zstd", write_page_checksum=True)


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
            parquet = pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
            content = parquet.read(use_threads=False)
        loaded = json.loads((content.schema.metadata or {})[_KEY])
    except OSError as error:  # of a damaged page, too
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a profile: {' '.join(str(error).split())}") from error
    except (KeyError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a profile: analyze --profile writes one") from error
    if not content.schema.equals(_arrow_schema()):
        raise DataError(f"{path}: has other columns than {', '.join(COLUMNS)}; analyse again")
    if isinstance(loaded, dict):
        loaded["cells"] = content.to_pandas().astype(COLUMNS)
    return validate(RunProfile, loaded, where=str(path))


def _arrow_schema() -> pa.Schema:
    """The columns of a profile file."""
    import pyarrow as pa

    types = {"category": pa.dictionary(pa.int32(), pa.string())}
    return pa.schema([pa.field(name, types.get(kind, kind), nullable=False) for name, kind in COLUMNS.items()])


def make_profile(analysis: Analysis, *, part: str | None = None) -> RunProfile:
    """Make the profile of an analysis.

    Args:
        part: name of the data in the profile; None: the dataset's file, or the directory that its files share.

    Raises:
        UsageError: `part` cannot be a name, as `check_part` says.
    """
    table, dataset = analysis.microbatches, analysis.dataset
    check_part(part)
    name = shorten(_name_data(dataset.uris), LONGEST_PART) if part is None else part
    caps = _grid(analysis)
    eager_ms, *times = one_cap_step_ms(analysis, analysis.costs, [0, *caps]).tolist()  # a cap of 0: all run eagerly
    ranges = None
    if not analysis.times.origin == analysis.costs.origin == "none":
        ends = [one_cap_step_ms(analysis, costs, [0, *caps]) for costs in analysis.costs.ends()]
        relative = np.array([step_ms[1:] / step_ms[0] for step_ms in ends])
        least, most = relative.min(axis=0).tolist(), relative.max(axis=0).tolist()
        ranges = dict(zip(caps, zip(least, most, strict=True), strict=True))
    described = None
    if (model := analysis.model) is not None:
        experts = f", {write_count(model.num_experts, 'expert')}" if model.num_experts else ""
        described = f"{write_count(model.num_layers, 'layer')} of hidden size {model.hidden_size:,}{experts}"
    return RunProfile(
        cells=_count_units(table).assign(part=name)[[*COLUMNS]].astype(COLUMNS),
        training=analysis.settings,
        costs=analysis.costs,
        parts=[
            PartOfRun(
                name=name,
                format=dataset.format,
                uris=dataset.uris,
                fingerprints=[dataset.fingerprint],
                exact=table.exact,
                microbatches=len(table),
                steps=table.num_steps,
                eager_step_ms=eager_ms,
                caps=dict(zip(caps, times, strict=True)),
                relative_step_times=ranges,
                warnings=list(analysis.warnings),
            )
        ],
        analysed_on=datetime.now(tz=UTC).date().isoformat(),
        model=described,
        predicted=Predictions(**{field.name: getattr(analysis, field.name) for field in fields(Predictions)}),
    )


def one_cap_step_ms(analysis: Analysis, costs: CostTable, caps: list[int]) -> NDArray[np.float64]:
    """Mean step time under each of `caps`, ascending, alone by `costs`, in milliseconds, shape [caps]."""
    longest, n_tokens = analysis.longest, analysis.graph_tokens
    step_costs = costs_of_run(analysis.run, costs, caps, sorted({*longest.values()}))
    return step_costs.step_ms([tuple(Bucket(n, longest[size], n_tokens, size) for size in longest) for n in caps])


def check_part(part: str | None) -> None:
    """Refuse a part's name that tables and figures cannot show. None is accepted: no name was given.

    Raises:
        UsageError: the name is no text, is empty or too long, or holds characters that cannot be shown.
    """
    if part is not None and not (
        isinstance(part, str) and part.strip() and len(part) <= LONGEST_PART and part.isprintable()
    ):
        raise UsageError(f"--part {part!a:.40}: a name has 1 to {LONGEST_PART} characters, without line breaks")


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


def _count_units(table: MicrobatchTable) -> DataFrame:
    """Counts of the units of every kind, in all columns but `part`."""
    import pandas as pd

    groups, segment = table.groups, np.arange(table.num_steps, dtype=np.int64) * SEGMENTS // table.num_steps
    if groups is None:
        of_microbatch = np.repeat(segment, table.num_microbatches.astype(np.int64) * table.data_parallel_size)
        sizes = {}
    else:
        of_microbatch, sizes = segment[groups.step], {"cp_size": groups.cp_size}
    measures = {name: getattr(table, name) for name in _MEASURES}
    by_rank = {name: _largest_by_rank(table, values) for name, values in measures.items()}
    by_step = {name: values.max(axis=1) for name, values in by_rank.items()}
    counts = [
        _count("microbatch", **sizes, **measures),
        _count("rank_step_max", **by_rank),
        _count("step_max", **by_step),
    ]
    if table.shared_capture_ranks > 1:
        joint = {name: table.joint(values) for name, values in measures.items()}
        counts.append(_count("joint_microbatch", **joint))
        by_rank = {name: _largest_by_rank(table, values) for name, values in joint.items()}
        counts.append(_count("joint_rank_step_max", **by_rank))
    counts.append(_count("segment_microbatch", segment=of_microbatch, n_seqs=table.n_seqs))
    counts.append(_count("segment_step_max", segment=segment, n_seqs=by_step["n_seqs"]))
    return pd.concat(counts, ignore_index=True)


def _count(kind: str, **units: NDArray[np.integer]) -> DataFrame:
    """How often each combination of values occurs among the units, ascending; `units` are columns of one shape."""
    import pandas as pd

    shape = [int(values.max()) + 1 for values in units.values()]
    keys, counts = np.unique(np.ravel_multi_index(tuple(units.values()), shape), return_counts=True)
    values = dict(zip(units, np.unravel_index(keys, shape), strict=True))
    return pd.DataFrame({"kind": kind, "segment": -1, "max_seqlen": -1, "cp_size": 0, **values, "count": counts})


def _largest_by_rank(table: MicrobatchTable, values: NDArray[np.int32]) -> NDArray[np.int32]:
    """The largest of `values`, shape [micro-batches], that each rank has in a step, shape [steps, ranks]; 0 if none."""
    if (groups := table.groups) is None:
        return table.per_rank_step(values, np.maximum).astype(np.int32, copy=False)
    largest = np.zeros((table.num_steps, table.data_parallel_size), dtype=np.int32)
    for offset in range(int(groups.cp_size.max())):
        shared = groups.cp_size > offset
        np.maximum.at(largest, (groups.step[shared], groups.first_rank[shared] + offset), values[shared])
    return largest


def histogram_of(rows: DataFrame, measure: str) -> Histogram:
    """The histogram of column `measure` of `rows`, in which every row counts as often as its `count` says."""
    counts = np.bincount(rows[measure].to_numpy(), weights=rows["count"].to_numpy())
    return Histogram(counts.astype(np.int64))


def share_over(histogram: Histogram, value: int) -> float:
    """The share of what `histogram` counts that is larger than `value`, which is at least 0."""
    return float(histogram.counts[value + 1 :].sum()) / histogram.total


def _step_ms(part: PartOfRun, cap: int, costs: CostTable, training: TrainingSettings) -> float | None:
    """Mean milliseconds of a step of one part under `cap`; None where the part has no time for it."""
    top = max(part.caps)
    if cap in part.caps or cap < min(part.caps):
        return part.caps.get(cap, part.eager_step_ms)
    if cap < top or costs.needs_max_seqlen:
        return None
    before_ms, after_ms = costs.replay_ms(top, 1), costs.replay_ms(cap, 1)
    replays = part.microbatches / (part.steps * training.data_parallel_size) + training.pipeline_parallel_size - 1
    if training.has_dynamic_cp:  # groups wait for each other between replays
        replays = (part.caps[top] - (costs.optimizer_ms or 0.0)) / (before_ms + (costs.outside_ms or 0.0))
    return part.caps[top] + replays * (after_ms - before_ms)


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
    by_name: dict[str, list[PartOfRun]] = {}
    seen: dict[str, str] = {}
    for profile, name in zip(profiles, names, strict=True):
        check_alike(first, profile, name=names[0], other_name=name, remedy="profile both with the same")
        for part in profile.parts:
            for fingerprint in part.fingerprints:
                if fingerprint in seen:
                    where = "given twice" if seen[fingerprint] == name else f"in {seen[fingerprint]}"
                    raise DataError(f"{name}: part {part.name}: the same data is {where}; leave one out")
                seen[fingerprint] = name
            by_name.setdefault(part.name, []).append(part)
    keys = [name for name in COLUMNS if name != "count"]
    cells = pd.concat([p.cells for p in profiles]).groupby(keys, sort=False, observed=True).sum().reset_index()
    differing = {n for n in _OF_THE_DATA for p in profiles if getattr(p.training, n) != getattr(first.training, n)}
    unknown: dict[str, Any] = dict.fromkeys(differing)
    training = replace(first.training, **unknown)
    every = [part for same in by_name.values() for part in same]
    merged = RunProfile(cells=cells.astype(COLUMNS), training=training, costs=first.costs, parts=every)
    added = [_add(merged.model_copy(update={"parts": same})) for same in by_name.values()]
    return merged.model_copy(update={"parts": added})


def check_alike(one: RunProfile | Plan, other: RunProfile, *, name: str, other_name: str, remedy: str) -> None:
    """Refuse a profile that was counted with other settings or costs than a profile or a plan, which `name` names.

    Raises:
        DataError: a setting that forms steps differs, or the costs do.
    """
    for setting in definitions_of(TrainingSettings):
        here, there = (getattr(of.training, setting) for of in (one, other))
        if here != there and setting not in _OF_THE_DATA:
            raise DataError(f"{other_name}: {setting} is {there}, but {here} in {name}: {remedy}")
    if any(getattr(one.costs, field) != getattr(other.costs, field) for field in type(one.costs).model_fields):
        raise DataError(
            f"{other_name}: costs are of {other.costs.name} on {other.costs.hardware}, those of {name} of "
            f"{one.costs.name} on {one.costs.hardware}: {remedy}"
        )


def _add(together: RunProfile) -> PartOfRun:
    """The parts of a profile, which share a name, as one."""
    first, *others = together.parts
    if not others:
        return first
    caps = together.caps()
    if not caps:
        raise DataError(f"part {first.name}: its profiles have no cap in common; give each a --part name of its own")
    added: dict[str, Any] = {
        name: getattr(together, name) for name in ("exact", "microbatches", "steps", "eager_step_ms")
    }
    for name in ("uris", "fingerprints", "warnings"):
        added[name] = [value for part in together.parts for value in getattr(part, name)]
    added |= {"caps": caps, "relative_step_times": None, "warnings": list(dict.fromkeys(added["warnings"]))}
    return first.model_copy(update=added)


def describe_merged(profile: RunProfile) -> str:
    """One line for each part: its micro-batches, steps, and percentiles of documents in a micro-batch."""
    lines = []
    for part in profile.parts:
        documents = profile.histogram(part=part.name).percentiles()
        many = write_count(part.microbatches, "micro-batch", "micro-batches")
        data = f"{len(part.fingerprints)} datasets added up, " if len(part.fingerprints) > 1 else ""
        lines.append(
            f"{make_printable(part.name)}: {data}{many} in {write_count(part.steps, 'step')}, documents P50 "
            f"{documents.p50:,}, P99 {documents.p99:,}, max {documents.max:,}\n"
        )
    return "".join(lines)


def merged_to_json(profile: RunProfile) -> str:
    """The profile without its counts as JSON text, schema `thdprof.profile/1`."""
    left_out = {"caps", "relative_step_times", "warnings"}
    value = {
        "schema": profile.schema_,
        "microbatches": profile.microbatches,
        "steps": profile.steps,
        "exact": profile.exact,
        "parts": [part.model_dump(mode="json", exclude=left_out) for part in profile.parts],
        "candidates": profile.curve().to_dict("records"),
    }
    return json_text(value)
