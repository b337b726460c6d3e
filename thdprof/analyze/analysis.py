"""The steps of an analysis: reads a dataset, replays its schedule, chooses buckets, predicts times and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thdprof.analyze.buckets.cost_table import CostTable, built_in_costs, load_costs
from thdprof.analyze.buckets.recommend import Recommendation, longest_captured, recommend
from thdprof.analyze.buckets.statistics import AnalyzedRun, Profile, make_run
from thdprof.analyze.caveats import caveats, on_layer_graphs, on_memory, on_the_model, on_the_order
from thdprof.analyze.predictions import (
    FOREIGN_TABLE,
    UNKNOWN_MODEL,
    Capture,
    Memory,
    Overlap,
    Predictions,
    Times,
    Verdict,
    Worth,
)
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.replay import DatasetSummary, replay
from thdprof.analyze.schedule.schedule import FORGETFUL, Memo
from thdprof.analyze.settings.request import Request
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.base import Dataset
from thdprof.plan import Percentiles
from thdprof.training import Model, TrainingSettings

if TYPE_CHECKING:
    from thdprof.analyze.buckets.saved_tensors import OffloadPrediction
    from thdprof.analyze.times.modelled_costs import ModelledTimes
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


def _show_nothing(stage: str, done: float, documents: int) -> None:
    pass


def check_gpu(request: Request) -> None:
    """Refuse a name of `--gpu` that no times can be modelled for, before any work.

    With a cost table it is not refused: the name is only compared with the GPU of the table.

    Raises:
        UsageError: no such GPU is known.
    """
    if request.gpu is not None and request.cost_table is None:
        from thdprof.analyze.times.gpus import find_gpu

        find_gpu(request.gpu)


def analyze(
    request: Request,
    *,
    offload: Choice | None = None,
    impl: Impl | None = None,
    progress: Progress = _show_nothing,
) -> Analysis:
    """Read a dataset, replay its schedule, recommend buckets.

    Args:
        request: the dataset, the run, and what the analysis is made by.
        offload: activations that are moved to the host; graphs can use the memory that the move frees.
        impl: the kind of graphs that was asked for: those of single layers recompute nothing; None: none was.
        progress: called with the stage, the share of the whole work that is done, and the number of documents.

    Raises:
        DataError: the dataset or the cost table cannot be read, or has contents that training would refuse.
        UsageError: the settings or limits contradict each other or the dataset.
    """
    measured = load_costs(request.cost_table) if request.cost_table is not None else None
    progress("reading", 0.0, 0)
    dataset = read_dataset(request.locations, format=request.format, settings=request.given)
    return analyze_read(dataset, request, measured=measured, offload=offload, impl=impl, progress=progress)


def analyze_read(
    dataset: Dataset,
    request: Request,
    *,
    measured: CostTable | None,
    offload: Choice | None = None,
    impl: Impl | None = None,
    progress: Progress = _show_nothing,
    memo: Memo = FORGETFUL,
) -> Analysis:
    """Replay the schedule of a dataset that was read, and recommend buckets.

    The arguments are those of `analyze`, but for `dataset`, `measured` (the table in the file `request.cost_table`)
    and `memo`, which keeps intermediate results for the next analysis of this dataset.

    Raises:
        DataError: the dataset has contents that training would refuse.
        UsageError: the settings or limits contradict each other or the dataset.
    """
    documents = dataset.num_documents()

    def tick(done: float) -> None:
        progress("replaying the schedule", _READ_SHARE + (_REPLAYED_SHARE - _READ_SHARE) * done, documents)

    replayed = replay(dataset, request.given, tick, memo)
    settings, schedule, table = replayed.settings, replayed.schedule, replayed.schedule.table
    progress("recommending", _REPLAYED_SHARE, documents)
    model, layer_graphs = request.model, impl == "transformer_engine"
    run = make_run(settings, table, model=model, layer_graphs=layer_graphs)
    costs, modelled, gpu_note, unknown = _find_costs(run, request, measured)
    gpu = request.gpu if modelled is None else modelled.gpu.name
    limits = request.limits
    if offload is not None and limits.graph_memory_bytes is not None:
        freed = _offloaded(run, costs, offload, None).device_bytes_freed
        limits = replace(limits, graph_memory_bytes=limits.graph_memory_bytes + freed)
    chosen = recommend(run, costs, independent=schedule.independent, limits=limits)
    moved = None
    if offload is not None and chosen.buckets:
        moved = _offloaded(run, costs, offload, chosen.graph_memory_bytes)
    predicted = Predictions(times=Times(origin="none", basis=unknown), verdict=Verdict(ruling=None, reason=unknown))
    if model is not None or measured is not None:
        from thdprof.analyze.times.answer import document_tokens, predict

        in_row = schedule.row_tokens or dataset.num_tokens() / max(1, dataset.num_rows())
        predicted = predict(
            run,
            costs,
            chosen,
            modelled=modelled,
            unknown=unknown,
            offload=moved,
            watched=impl != "local" and (offload is None or not (layer_graphs or settings.experts == "dropless")),
            tokens=document_tokens(
                table,
                settings,
                kind=replayed.kind,
                row_tokens=in_row,
                packing_efficiency=schedule.packing_efficiency,
            ),
            price=request.gpu_hour_price,
            gbps=request.data_parallel_gbps,
        )
    other_sizes = _other_sizes(table, settings)
    notes = (*gpu_note, *dataset.notes, *schedule.notes, *on_the_order(settings, table))
    profiles = {settings.context_parallel_size: run.profile}
    if table.groups is not None:
        profiles = Profile.by_cp_size(table, settings.context_parallel_size)
    return Analysis(
        dataset=DatasetSummary.of(dataset),
        settings=settings,
        assumptions=replayed.assumptions,
        microbatches=table,
        profile=run.profile,
        n_seqs=run.profile.n_seqs.percentiles(),
        max_seqlen=run.profile.max_seqlen.percentiles(),
        n_tokens_max=int(table.n_tokens.max()),
        share_of_full_size=(len(table) - other_sizes) / len(table),
        cp_sizes=cp_sizes(table, profiles, run.n_tokens),
        costs=costs,
        slots=[list(rank) for rank in run.slots],
        recommendation=chosen,
        offload=moved,
        longest=longest_captured(profiles, run.longest_possible),
        graph_tokens=run.n_tokens,
        model=model,
        model_source=request.model_source,
        gpu=gpu,
        times=predicted.times,
        verdict=predicted.verdict,
        worth=predicted.worth,
        memory=predicted.memory,
        capture=predicted.capture,
        overlap=predicted.overlap,
        pack_size_guessed=replayed.pack_size_guessed,
        packing_efficiency=schedule.packing_efficiency,
        packing_efficiency_without_cap=schedule.packing_efficiency_without_cap,
        notes=notes,
        warnings=(
            *replayed.notes,
            *notes,
            *schedule.warnings,
            *on_memory(predicted.memory, gpu),
            *on_layer_graphs(model, settings, layer_graphs=layer_graphs),
            *on_the_model(model, settings, predicted.times, gpu, graphs=bool(chosen.buckets)),
            *caveats(replayed.kind, settings, table, costs, other_sizes, chosen, limits=limits),
        ),
    )


def _find_costs(
    run: AnalyzedRun, request: Request, measured: CostTable | None
) -> tuple[CostTable, ModelledTimes | None, list[str], str]:
    """The cost table; the model of times that made it, if one did; a note on its GPU; and how to get times without."""
    if measured is not None:
        return measured, None, [], FOREIGN_TABLE
    unknown: str | None = UNKNOWN_MODEL
    if run.model is not None:
        from thdprof.analyze.times.modelled_costs import gpu_of, modelled_times, why_not

        unknown = why_not(run.settings, request.attention)
        if unknown is None:
            gpu, note = gpu_of(request.gpu)
            modelled = modelled_times(run, gpu)
            return modelled.table(), modelled, [] if note is None else [note], FOREIGN_TABLE
    return built_in_costs(request.attention, run.n_tokens), None, [], unknown or FOREIGN_TABLE


def _offloaded(run: AnalyzedRun, costs: CostTable, choice: Choice, graph_memory_bytes: int | None) -> OffloadPrediction:
    from thdprof.analyze.buckets.saved_tensors import predict_offload

    return predict_offload(
        costs, choice, n_tokens=run.n_tokens, num_slots=run.num_slots, graph_memory_bytes=graph_memory_bytes
    )


def _other_sizes(table: MicrobatchTable, settings: TrainingSettings) -> int:
    """Micro-batches that do not have the number of tokens that graphs are captured for."""
    if table.groups is not None:
        from thdprof.analyze.schedule.dynamic_cp import capacity

        return int((table.n_tokens != capacity(table, settings)).sum())
    if table.n_tokens.strides == (0,):
        return 0
    return int((table.n_tokens != table.n_tokens.max()).sum())
