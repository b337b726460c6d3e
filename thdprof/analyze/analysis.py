"""The main job: a dataset and training settings -> prediction and recommendation, as one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.analyze.buckets.cost_table import CostTable, built_in_costs, load_costs
from thdprof.analyze.buckets.offload_memory import OffloadPrediction, freed_bytes, most_slots, predict_offload
from thdprof.analyze.buckets.recommend import Limits, Recommendation, longest_captured, recommend
from thdprof.analyze.buckets.statistics import PERCENTILES, Histogram, Profile
from thdprof.analyze.caveats import caveats
from thdprof.analyze.schedule.build import Schedule, Tick, build_schedule
from thdprof.analyze.schedule.memo import FORGETFUL, Memo
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.pipeline_slots import slots
from thdprof.analyze.settings.resolve import Assumption, resolve_settings
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.base import Dataset, PackedRows, UnpackedDocuments
from thdprof.training import STEP_PACKERS, Attention, Kind, Loader, TrainingSettings

if TYPE_CHECKING:
    from thdprof.offload.plan import Choice

_DEFAULT_LOADERS: dict[str, Loader] = {"megatron": "single", "bridge": "batch", "bridge-npy": "batch"}


Progress = Callable[[str, float, int], None]
"""Told the stage, the share of the whole work that is done, and the documents it is about (0: not known yet)."""
_READ_SHARE, _REPLAYED_SHARE = 0.1, 0.85
"""Of the time, what is over after reading and after replaying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """The dataset that was read."""

    format: str
    uris: tuple[str, ...]
    fingerprint: str
    rows: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Nearest-rank percentiles over micro-batches."""

    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    p99_9: int
    max: int

    @classmethod
    def of(cls, histogram: Histogram) -> Percentiles:
        """The percentiles of `histogram`."""
        return cls(mean=histogram.mean, **{n: histogram.percentile(p) for n, p in PERCENTILES.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSize:
    """The micro-batches of one context-parallel size, each counted once, however many ranks share it."""

    cp_size: int
    share: float
    """Of micro-batches."""
    n_seqs: Percentiles
    max_seqlen: Percentiles
    n_tokens: int
    """Tokens that a graph of this size needs, over all its ranks."""
    n_tokens_max: int
    """Tokens of the largest micro-batch, over all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything that `thdprof analyze` reports and writes."""

    dataset: DatasetSummary
    settings: TrainingSettings
    assumptions: tuple[Assumption, ...]
    """Settings that nobody gave."""
    microbatches: MicrobatchTable
    profile: Profile
    n_seqs: Percentiles
    """Documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens_max: int
    """Tokens of the largest micro-batch."""
    share_of_full_size: float
    """Share of micro-batches that have n_tokens_max tokens (`cp_sizes`: the n_tokens of their size)."""
    cp_sizes: tuple[CpSize, ...]
    """Under dynamic context parallelism, ascending; else empty."""
    costs: CostTable
    slots: list[list[int]]
    """Micro-batches in flight for every pipeline rank and model chunk."""
    recommendation: Recommendation
    offload: OffloadPrediction | None
    """Activations that wait on the host and the memory that this frees, which the recommendation counted on; None where
    all stay on the device, or nothing is captured."""
    longest: dict[int | None, int]
    """Tokens of the longest document that a single cap is captured for, by context-parallel size; None: the run's."""
    packing_efficiency: float | None
    packing_efficiency_without_cap: float | None
    warnings: tuple[str, ...]
    """What the user should know before trusting the numbers."""

    @property
    def steps(self) -> int:
        """Optimizer steps analysed."""
        return self.microbatches.num_steps

    @property
    def drawn(self) -> bool:
        """Whether the order of rows is not known, so that micro-batches were drawn."""
        return not self.microbatches.exact and self.settings.packer != "dynamic_cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The schedule of a dataset, and the settings that made it."""

    settings: TrainingSettings
    assumptions: tuple[Assumption, ...]
    """Settings that nobody gave."""
    schedule: Schedule
    notes: tuple[str, ...]
    """Settings that were given in vain."""


def replay(
    dataset: Dataset, given: Mapping[str, Any], tick: Tick = lambda done: None, memo: Memo = FORGETFUL
) -> Replay:
    """The micro-batches that training forms of `dataset` under the settings `given`, by name.

    Raises:
        DataError: what the dataset holds.
        UsageError: settings that cannot be.
    """
    settings, assumptions, vain = resolve_settings(
        given,
        pack_tokens=_pack_tokens(dataset),
        dataset_format=dataset.format,
        default_loader=_default_loader(dataset, given),
        num_datasets=len(dataset.uris),
        kind=_kind(dataset),
    )
    tick(0.0)
    schedule = build_schedule(dataset, settings, tick, memo)
    return Replay(settings=settings, assumptions=assumptions, schedule=schedule, notes=vain)


def analyze(
    locations: Sequence[str],
    given: Mapping[str, Any],
    *,
    format: str = "auto",
    cost_table: Path | None = None,
    attention: Attention = "transformer_engine",
    limits: Limits | None = None,
    offload: Choice | None = None,
    progress: Progress = lambda stage, done, documents: None,
) -> Analysis:
    """Read a dataset, replay its schedule, recommend buckets.

    Args:
        locations: files, globs, directories or Megatron prefixes of the dataset.
        given: training settings by name (`thdprof.training.TrainingOptions`); None counts as not given.
        format: name of the dataset's format, or "auto".
        cost_table: measured costs; None takes the built-in ones of `attention`.
        attention: attention backend whose built-in costs are taken.
        limits: what the recommendation must keep to.
        offload: activations that are moved to the host; the memory that this frees is there for graphs.
        progress: called with the stage, the share of the whole work that is done, and the documents it is about.

    Raises:
        DataError: the dataset, the cost table, or what they hold.
        UsageError: settings that cannot be.
    """
    measured = load_costs(cost_table) if cost_table is not None else None
    progress("reading", 0.0, 0)
    dataset = read_dataset(locations, format=format)
    return analyze_read(
        dataset, given, measured=measured, attention=attention, limits=limits, offload=offload, progress=progress
    )


def analyze_read(
    dataset: Dataset,
    given: Mapping[str, Any],
    *,
    measured: CostTable | None,
    attention: Attention = "transformer_engine",
    limits: Limits | None = None,
    offload: Choice | None = None,
    progress: Progress = lambda stage, done, documents: None,
    memo: Memo = FORGETFUL,
) -> Analysis:
    """What `analyze` does once the dataset is read; `memo` keeps work for the next analysis of the same dataset.

    Raises:
        DataError: what the dataset holds.
        UsageError: settings that cannot be.
    """
    documents = dataset.num_documents()

    def tick(done: float) -> None:
        progress("replaying the schedule", _READ_SHARE + (_REPLAYED_SHARE - _READ_SHARE) * done, documents)

    replayed = replay(dataset, given, tick, memo)
    settings, schedule = replayed.settings, replayed.schedule
    table = schedule.table
    progress("recommending", _REPLAYED_SHARE, documents)
    profile = Profile.of(table)
    in_flight = slots(
        pipeline_size=settings.pipeline_parallel_size,
        num_chunks=settings.virtual_pipeline_size or 1,
        num_microbatches=int(table.num_microbatches.max()),
        group=settings.microbatch_group_size,
    )
    n_tokens_max = int(table.n_tokens.max())
    cp_sizes = _cp_sizes(table, settings)
    per_rank = settings.max_seqlen_per_dp_cp_rank or max(1, n_tokens_max // settings.context_parallel_size)
    costs = measured or built_in_costs(attention, per_rank)
    longest_possible = settings.seq_length if not cp_sizes or settings.tail_policy == "none" else n_tokens_max
    num_slots = most_slots(in_flight)
    limits = limits or Limits()
    limited = limits.graph_memory_bytes is not None or limits.max_fallback_rate is not None
    if offload is not None and limits.graph_memory_bytes is not None:
        freed = freed_bytes(costs, offload, n_tokens=per_rank, num_slots=num_slots)
        limits = replace(limits, graph_memory_bytes=limits.graph_memory_bytes + freed)
    recommendation = recommend(
        table,
        profile,
        costs,
        longest_possible=longest_possible,
        pipeline_size=settings.pipeline_parallel_size,
        num_slots=num_slots,
        n_tokens_per_rank=per_rank,
        independent=schedule.independent,
        limits=limits,
    )
    moved = None
    if offload is not None and recommendation.buckets:
        memory = recommendation.graph_memory_bytes
        moved = predict_offload(costs, offload, n_tokens=per_rank, num_slots=num_slots, graph_memory_bytes=memory)
    full_size = _share_of_full_size(table, settings)
    return Analysis(
        dataset=summary_of(dataset),
        settings=settings,
        assumptions=replayed.assumptions,
        microbatches=table,
        profile=profile,
        n_seqs=Percentiles.of(profile.n_seqs),
        max_seqlen=Percentiles.of(profile.max_seqlen),
        n_tokens_max=n_tokens_max,
        share_of_full_size=full_size,
        cp_sizes=cp_sizes,
        costs=costs,
        slots=in_flight,
        recommendation=recommendation,
        offload=moved,
        longest=longest_captured(
            {None: profile} if table.groups is None else Profile.by_cp_size(table), longest_possible, per_rank
        ),
        packing_efficiency=schedule.packing_efficiency,
        packing_efficiency_without_cap=schedule.packing_efficiency_without_cap,
        warnings=(
            *replayed.notes,
            *dataset.notes,
            *schedule.notes,
            *caveats(_kind(dataset), settings, schedule.table, costs, full_size, recommendation, limited=limited),
        ),
    )


def _cp_sizes(table: MicrobatchTable, settings: TrainingSettings) -> tuple[CpSize, ...]:
    if table.groups is None:
        return ()
    found = []
    for size, profile in Profile.by_cp_size(table).items():
        assert size is not None
        found.append(
            CpSize(
                cp_size=size,
                share=profile.n_seqs.total / len(table),
                n_seqs=Percentiles.of(profile.n_seqs),
                max_seqlen=Percentiles.of(profile.max_seqlen),
                n_tokens=size * (settings.max_seqlen_per_dp_cp_rank or 0),
                n_tokens_max=int(table.n_tokens[table.groups.cp_size == size].max()),
            )
        )
    return tuple(found)


def _share_of_full_size(table: MicrobatchTable, settings: TrainingSettings) -> float:
    """Share of micro-batches that have the tokens that a graph is captured for."""
    if table.groups is not None:
        from thdprof.analyze.schedule.dynamic_cp import capacity

        return float((table.n_tokens == capacity(table, settings)).mean())
    return float((table.n_tokens == table.n_tokens.max()).mean()) if table.n_tokens.strides != (0,) else 1.0


def _default_loader(dataset: Dataset, given: Mapping[str, Any]) -> Loader | None:
    """The sampler that the format's own training code uses by default; None where the order is not known."""
    if isinstance(dataset.content, UnpackedDocuments) and given.get("packer") in STEP_PACKERS:
        return "single"
    return _DEFAULT_LOADERS.get(dataset.format)


def _kind(dataset: Dataset) -> Kind:
    match dataset.content:
        case PackedRows(rule="bridge"):
            return "bridge"
        case PackedRows(rule="trl"):
            return "trl"
        case PackedRows():
            return "packs"
        case UnpackedDocuments():
            return "documents"
        case _:
            return "streams"


def _pack_tokens(dataset: Dataset) -> int | None:
    """The dataset's pack size: as its files tell it, else its fullest row."""
    if dataset.pack_tokens is None and isinstance(dataset.content, PackedRows):
        return max(1, int(dataset.content.num_tokens().max()))
    return dataset.pack_tokens


def summary_of(dataset: Dataset) -> DatasetSummary:
    """What is reported of `dataset`."""
    return DatasetSummary(
        format=dataset.format,
        uris=dataset.uris,
        fingerprint=dataset.fingerprint,
        rows=dataset.num_rows(),
        documents=dataset.num_documents(),
        tokens=dataset.num_tokens(),
    )
