"""The steps of an analysis: reads a dataset, replays its schedule, chooses buckets, predicts times and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.analyze.analysis.result import Analysis, cp_sizes
from thdprof.analyze.buckets.candidates import longest_captured
from thdprof.analyze.buckets.cost_table import CostTable, built_in_costs, load_costs
from thdprof.analyze.buckets.offload_memory import freed_bytes, most_slots, predict_offload
from thdprof.analyze.buckets.recommend import recommend
from thdprof.analyze.buckets.statistics import Profile
from thdprof.analyze.caveats import caveats, on_layer_graphs, on_memory, on_the_model, on_the_order
from thdprof.analyze.schedule.memo import FORGETFUL, Memo
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.replay import DatasetSummary, replay
from thdprof.analyze.settings.limits import Limits
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.base import Dataset
from thdprof.analyze.times.answer import Run, times_of, verdict_of
from thdprof.analyze.times.capture import predict_capture
from thdprof.analyze.times.gpus import known_gpu
from thdprof.analyze.times.memory import predict_memory
from thdprof.analyze.times.modelled_costs import ModelledTimes
from thdprof.analyze.times.of_run import FOREIGN_TABLE, gpu_of, modelled_times, why_not
from thdprof.analyze.times.overlap import predict_overlap
from thdprof.analyze.times.results import Times
from thdprof.analyze.times.worth import document_tokens, worth_of
from thdprof.dispatch import Bucket
from thdprof.training import Attention, Model, TrainingSettings
from thdprof.training.pipeline_slots import slots

if TYPE_CHECKING:
    from thdprof.offload.plan import Choice
    from thdprof.plan import Impl

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
