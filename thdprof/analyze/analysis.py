"""The steps of an analysis: reads a dataset, replays its schedule, chooses buckets, predicts times and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable, built_in_costs, load_costs
from thdprof.analyze.buckets.recommend import Recommendation, longest_captured, recommend
from thdprof.analyze.buckets.saved_tensors import OffloadPrediction, freed_bytes, most_slots, predict_offload
from thdprof.analyze.buckets.statistics import Profile
from thdprof.analyze.caveats import caveats, on_layer_graphs, on_memory, on_the_model, on_the_order
from thdprof.analyze.predictions import Capture, Memory, Times, Verdict, Worth
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.replay import DatasetSummary, replay
from thdprof.analyze.schedule.schedule import FORGETFUL, Memo
from thdprof.analyze.settings.limits import Limits
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.base import Dataset
from thdprof.analyze.times.answer import Run, document_tokens, predict_capture, times_of, verdict_of, worth_of
from thdprof.analyze.times.gpus import known_gpu
from thdprof.analyze.times.memory import predict_memory
from thdprof.analyze.times.modelled_costs import FOREIGN_TABLE, ModelledTimes, gpu_of, modelled_times, why_not
from thdprof.analyze.times.overlap import Overlap, predict_overlap
from thdprof.dispatch import Bucket
from thdprof.plan import Percentiles
from thdprof.training import Attention, Model, TrainingSettings
from thdprof.training.pipeline_slots import slots

if TYPE_CHECKING:
    from thdprof.offload.plan import Choice
    from thdprof.plan import Impl


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSize:
    """The micro-batches of one context-parallel size, each counted once, however many ranks share it."""

    cp_size: int
    """Ranks that share a micro-batch of this size."""
    share: float
    """Share of micro-batches that have this size."""
    n_seqs: Percentiles
    """Documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens: int
    """Tokens that a graph of this size needs, over all its ranks."""
    n_tokens_max: int
    """Tokens of the largest micro-batch, over all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything that `thdprof analyze` reports and writes."""

    dataset: DatasetSummary
    """The dataset that was read."""
    settings: TrainingSettings
    """The run's settings, complete."""
    assumptions: tuple[Assumption, ...]
    """Settings that the user did not give, with the values that were assumed."""
    microbatches: MicrobatchTable
    """The micro-batches of the whole run."""
    profile: Profile
    """Histograms of the micro-batches."""
    n_seqs: Percentiles
    """Documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens_max: int
    """Tokens of the largest micro-batch."""
    share_of_full_size: float
    """Share of micro-batches that have n_tokens_max tokens (`cp_sizes`: the n_tokens of their size)."""
    cp_sizes: tuple[CpSize, ...]
    """The context-parallel sizes under dynamic context parallelism, ascending; else empty."""
    costs: CostTable
    """The cost table that the buckets were chosen by; times come from it where it is of the user's own model."""
    slots: list[list[int]]
    """Micro-batches in flight for every pipeline rank and model chunk."""
    recommendation: Recommendation
    """The buckets to capture, and the fallbacks and the step time under each single cap."""
    offload: OffloadPrediction | None
    """Activations that wait on the host and the memory that moving them frees, which the recommendation counted on;
    None where all activations stay on the device, or nothing is captured."""
    longest: dict[int, int]
    """Tokens of the longest document that a single cap is captured for, by context-parallel size."""
    graph_tokens: int
    """Tokens of a graph's micro-batches on one context-parallel rank, whatever the context-parallel size."""
    model: Model | None
    """The model that the run trains; None where it is not known."""
    model_source: str | None
    """Where the model was read; None where it is not known."""
    gpu: str | None
    """Name of the GPU that the times are of, such as h100; None where no times were modelled."""
    times: Times
    """Times of the median micro-batch and of a step, and where they come from."""
    verdict: Verdict
    """Whether graphs pay."""
    worth: Worth | None
    """What the plan is worth over the run; None without times."""
    memory: Memory | None
    """Predicted peak memory; None where the model or its memory is not known."""
    capture: Capture | None
    """What capturing the plan's graphs takes; None without times or graphs."""
    overlap: Overlap | None
    """What cutting model chunks into graphs of a few layers hides of data-parallel communication; None where the run
    overlaps none, or times are not known."""
    pack_size_guessed: bool
    """Whether the files do not tell the pack size, and `settings.seq_length` is the tokens of the fullest row."""
    packing_efficiency: float | None
    """Share of the packed rows' tokens that hold documents; None where thdprof did not pack."""
    packing_efficiency_without_cap: float | None
    """The packer's share without max_docs_per_pack; None without that cap."""
    notes: tuple[str, ...]
    """Sentences on decisions by the data: documents cut or left out, a size taken from the data, an order drawn."""
    warnings: tuple[str, ...]
    """Sentences that the user should know before trusting the numbers: settings without effect, the notes, and the
    conditions under which the figures hold."""

    @property
    def steps(self) -> int:
        """Optimizer steps analysed."""
        return self.microbatches.num_steps

    @property
    def drawn(self) -> bool:
        """Whether micro-batches were drawn, because the order in which training reads rows is not known."""
        return self.microbatches.drawn


def cp_sizes(table: MicrobatchTable, profiles: Mapping[int, Profile], graph_tokens: int) -> tuple[CpSize, ...]:
    """The micro-batches of each context-parallel size that has a profile."""
    return tuple(
        CpSize(
            cp_size=size,
            share=profile.n_seqs.total / len(table),
            n_seqs=profile.n_seqs.percentiles(),
            max_seqlen=profile.max_seqlen.percentiles(),
            n_tokens=size * graph_tokens,
            n_tokens_max=int(table.n_tokens[table.groups.cp_size == size].max()),
        )
        for size, profile in profiles.items()
        if table.groups is not None
    )


Progress = Callable[[str, float, int], None]
"""Called with the stage, the share of the whole work that is done, and the number of documents (0: not known yet)."""
_READ_SHARE, _REPLAYED_SHARE = 0.1, 0.85
"""Progress-bar estimates: reading ends at 10% of the total time, replaying the schedule at 85%."""


def analyze(
    locations: Sequence[str],
    given: Mapping[str, Any],
    *,
    format: str = "auto",
    cost_table: Path | None = None,
    attention: Attention = "transformer_engine",
    limits: Limits | None = None,
    offload: Choice | None = None,
    model: Model | None = None,
    model_source: str | None = None,
    gpu: str | None = None,
    gpu_hour_price: float | None = None,
    data_parallel_gbps: float | None = None,
    impl: Impl | None = None,
    progress: Progress = lambda stage, done, documents: None,
) -> Analysis:
    """Read a dataset, replay its schedule, recommend buckets.

    Args:
        locations: files, globs, directories or Megatron prefixes of the dataset.
        given: training settings by name (`thdprof.training.TrainingOptions`); None counts as not given.
        format: name of the dataset's format, or "auto".
        cost_table: measured costs; None: costs are modelled where the model is known, else the built-in ones of
            `attention` rank the choices.
        attention: attention backend of the model.
        limits: limits that the recommendation must keep to; None: the default limits.
        offload: activations that are moved to the host; graphs can use the memory that the move frees.
        model: the model that the run trains; None: not known.
        model_source: where the model was read; None: the caller made it.
        gpu: name of the GPU that times are of; None: this machine's, else the one that is assumed.
        gpu_hour_price: price of a GPU-hour; None: not given.
        data_parallel_gbps: GB/s of one GPU in collectives of its data-parallel group; None: by the GPU's data sheet.
        impl: the kind of graphs that was asked for: those of single layers recompute nothing; None: none was.
        progress: called with the stage, the share of the whole work that is done, and the number of documents.

    Raises:
        DataError: the dataset or the cost table cannot be read, or has contents that training would refuse.
        UsageError: the settings or limits contradict each other or the dataset.
    """
    measured = load_costs(cost_table) if cost_table is not None else None
    progress("reading", 0.0, 0)
    dataset = read_dataset(locations, format=format, settings=given)
    return analyze_read(
        dataset,
        given,
        measured=measured,
        attention=attention,
        limits=limits,
        offload=offload,
        model=model,
        model_source=model_source,
        gpu=gpu,
        gpu_hour_price=gpu_hour_price,
        data_parallel_gbps=data_parallel_gbps,
        impl=impl,
        progress=progress,
    )


def analyze_read(
    dataset: Dataset,
    given: Mapping[str, Any],
    *,
    measured: CostTable | None,
    attention: Attention = "transformer_engine",
    limits: Limits | None = None,
    offload: Choice | None = None,
    model: Model | None = None,
    model_source: str | None = None,
    gpu: str | None = None,
    gpu_hour_price: float | None = None,
    data_parallel_gbps: float | None = None,
    impl: Impl | None = None,
    progress: Progress = lambda stage, done, documents: None,
    memo: Memo = FORGETFUL,
) -> Analysis:
    """Replay the schedule of a dataset that was read, and recommend buckets.

    The arguments are those of `analyze`, but for `dataset`, `measured` (the cost table; None: as without `cost_table`)
    and `memo`, which keeps intermediate results for the next analysis of this dataset.

    Raises:
        DataError: the dataset has contents that training would refuse.
        UsageError: the settings or limits contradict each other or the dataset.
    """
    documents = dataset.num_documents()

    def tick(done: float) -> None:
        progress("replaying the schedule", _READ_SHARE + (_REPLAYED_SHARE - _READ_SHARE) * done, documents)

    replayed = replay(dataset, given, tick, memo)
    settings, schedule, table = replayed.settings, replayed.schedule, replayed.schedule.table
    progress("recommending", _REPLAYED_SHARE, documents)
    profile = Profile.of(table)
    n_tokens_max = int(table.n_tokens.max())
    graph_tokens = settings.max_seqlen_per_dp_cp_rank or max(1, n_tokens_max // settings.context_parallel_size)
    no_model = None if measured else why_not(model, settings, attention)
    modelled, gpu_note, layer_graphs = None, None, impl == "transformer_engine"
    if measured is None and no_model is None and model is not None:
        named, gpu_note = gpu_of(gpu)
        modelled = modelled_times(model, named, settings, table, profile, graph_tokens, layer_graphs=layer_graphs)
        gpu = named.name
    costs = measured or (modelled.table() if modelled else built_in_costs(attention, graph_tokens))
    in_flight = slots(
        pipeline_size=settings.pipeline_parallel_size,
        num_chunks=settings.virtual_pipeline_size or 1,
        num_microbatches=_microbatches_at_once(table, settings),
        group=settings.microbatch_group_size,
    )
    num_slots = most_slots(in_flight)
    limits = limits or Limits()
    if offload is not None and limits.graph_memory_bytes is not None:
        freed = freed_bytes(costs, offload, n_tokens=graph_tokens, num_slots=num_slots)
        limits = replace(limits, graph_memory_bytes=limits.graph_memory_bytes + freed)
    longest_possible = _longest_possible(table, settings, graph_tokens)
    recommendation = recommend(
        table,
        profile,
        costs,
        longest_possible=longest_possible,
        pipeline_size=settings.pipeline_parallel_size,
        num_slots=num_slots,
        n_tokens_per_rank=graph_tokens,
        independent=schedule.independent,
        limits=limits,
        cp_size=settings.context_parallel_size,
    )
    prediction = None
    if offload is not None and recommendation.buckets:
        memory = recommendation.graph_memory_bytes
        prediction = predict_offload(
            costs, offload, n_tokens=graph_tokens, num_slots=num_slots, graph_memory_bytes=memory
        )
    predicted_memory = predict_memory(
        model,
        settings,
        table,
        buckets=recommendation.buckets,
        slots=in_flight,
        costs=costs,
        n_tokens=graph_tokens,
        layer_graphs=layer_graphs,
        freed_bytes=0 if prediction is None else prediction.device_bytes_freed,
        watched=impl != "local" and (offload is None or not (layer_graphs or settings.experts == "dropless")),
    )
    quickest = min(recommendation.candidates, key=lambda c: (c.relative_step_time, c.max_seqs)).max_seqs
    run = Run(
        table=table,
        settings=settings,
        buckets=recommendation.buckets
        or tuple(Bucket(quickest, longest, graph_tokens, size) for size, longest in longest_possible.items()),
        n_tokens=graph_tokens,
        typical=profile.n_seqs.percentile(50.0),
        longest=max(longest_possible.values()),
    )
    times = (
        Times(origin="none", basis=no_model or FOREIGN_TABLE)
        if costs.origin == "none"
        else times_of(run, costs, basis=f"{costs.name} on {costs.hardware}{_hosts(modelled)}")
    )
    tokens = document_tokens(
        table,
        settings,
        kind=replayed.kind,
        row_tokens=schedule.row_tokens or dataset.num_tokens() / max(1, dataset.num_rows()),
        packing_efficiency=schedule.packing_efficiency,
    )
    other_sizes = _other_sizes(table, settings)
    notes = (*([gpu_note] if gpu_note else []), *dataset.notes, *schedule.notes, *on_the_order(settings, table))
    by_size = Profile.by_cp_size(table, settings.context_parallel_size) if table.groups is not None else {}
    return Analysis(
        dataset=DatasetSummary.of(dataset),
        settings=settings,
        assumptions=replayed.assumptions,
        microbatches=table,
        profile=profile,
        n_seqs=profile.n_seqs.percentiles(),
        max_seqlen=profile.max_seqlen.percentiles(),
        n_tokens_max=n_tokens_max,
        share_of_full_size=(len(table) - other_sizes) / len(table),
        cp_sizes=cp_sizes(table, by_size, graph_tokens),
        costs=costs,
        slots=in_flight,
        recommendation=recommendation,
        offload=prediction,
        longest=longest_captured(by_size or {settings.context_parallel_size: profile}, longest_possible),
        graph_tokens=graph_tokens,
        model=model,
        model_source=model_source,
        gpu=gpu,
        times=times,
        verdict=verdict_of(times, modelled),
        worth=worth_of(
            times if recommendation.buckets else replace(times, step_ms=times.eager_step_ms),
            settings,
            model,
            table,
            price=gpu_hour_price,
            tokens=tokens,
        ),
        memory=predicted_memory,
        capture=predict_capture(num_buckets=len(recommendation.buckets), slots=in_flight, costs=costs),
        overlap=predict_overlap(
            model,
            settings,
            known_gpu(costs.hardware),
            replay_ms=times.decoder_replay_ms,
            step_ms=recommendation.step_ms if times.origin != "none" else None,
            num_microbatches=int(table.num_microbatches.max()),
            gbps=data_parallel_gbps,
        )
        if recommendation.buckets
        else None,
        pack_size_guessed=replayed.pack_size_guessed,
        packing_efficiency=schedule.packing_efficiency,
        packing_efficiency_without_cap=schedule.packing_efficiency_without_cap,
        notes=notes,
        warnings=(
            *replayed.notes,
            *notes,
            *schedule.warnings,
            *on_memory(predicted_memory, gpu),
            *on_layer_graphs(model, settings, layer_graphs=layer_graphs),
            *on_the_model(model, settings, times, gpu, graphs=bool(recommendation.buckets)),
            *caveats(replayed.kind, settings, table, costs, other_sizes, recommendation, limits=limits),
        ),
    )


def _microbatches_at_once(table: MicrobatchTable, settings: TrainingSettings) -> int:
    """Micro-batches of the fullest step; of rounds that Megatron cannot cut as a virtual pipeline wants them, as many
    as the pipeline would want.
    """
    most = int(table.num_microbatches.max())
    if table.groups is None:
        return most
    return -(-most // settings.microbatch_group) * settings.microbatch_group


def _hosts(modelled: ModelledTimes | None) -> str:
    """The hosts that the range of modelled times is of; nothing where times were measured."""
    return "" if modelled is None else f", launched by {modelled.host.basis}"


def _longest_possible(table: MicrobatchTable, settings: TrainingSettings, graph_tokens: int) -> dict[int, int]:
    """Tokens of the longest document that a micro-batch of each context-parallel size can hold."""
    if table.groups is None:
        return {settings.context_parallel_size: settings.seq_length}
    longest = settings.seq_length if settings.tail_policy == "none" else int(table.n_tokens.max())
    return {int(size): min(longest, int(size) * graph_tokens) for size in np.unique(table.groups.cp_size)}


def _other_sizes(table: MicrobatchTable, settings: TrainingSettings) -> int:
    """Micro-batches that do not have the number of tokens that graphs are captured for."""
    if table.groups is not None:
        from thdprof.analyze.schedule.dynamic_cp import capacity

        return int((table.n_tokens != capacity(table, settings)).sum())
    if table.n_tokens.strides == (0,):
        return 0
    return int((table.n_tokens != table.n_tokens.max()).sum())
