"""The steps of an analysis: reads a dataset, replays its schedule, chooses buckets, predicts times and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable, built_in_costs, load_costs
from thdprof.analyze.buckets.recommend import Recommendation, find_longest_captured, recommend
from thdprof.analyze.buckets.statistics import AnalyzedRun, Profile, fallback_rate, make_run
from thdprof.analyze.caveats import caveats, note_order
from thdprof.analyze.expert_room import ExpertRoom, choose_room
from thdprof.analyze.predictions import FOREIGN_TABLE, UNKNOWN_MODEL, Alternatives, Predictions, Times, Verdict
from thdprof.analyze.replay import Replay, build_schedule, replay, summarize_dataset
from thdprof.analyze.settings.limits import Limits
from thdprof.analyze.settings.request import Request
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.sources import read_dataset
from thdprof.dispatch import Shapes, decide_all
from thdprof.errors import DataError, UsageError
from thdprof.plan import DatasetPart, DrawnPart, PackerLimitPart, Part, Percentiles, Plan, SpreadPart
from thdprof.read.dataset import DRAWS, Dataset, UnpackedDocuments, show_nothing
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.schedule.schedule import FORGETFUL, Memo
from thdprof.systems import find_packer
from thdprof.training import Model, TrainingSettings
from thdprof.training.model import describe_field

if TYPE_CHECKING:
    from thdprof.analyze.predictions import OffloadPrediction
    from thdprof.analyze.times.modelled_costs import ModelledTimes


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
class Analysis(Predictions):
    """Everything that `thdprof analyze` reports and writes."""

    request: Request = field(repr=False)
    """What was analysed, and by which options."""
    run: AnalyzedRun = field(repr=False)
    """The run as its buckets were chosen for it."""
    dataset: DatasetPart
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
    router_reason: str | None
    """Why graphs hold layers up to their router, and dropless experts run eagerly; None: graphs hold whole layers."""
    expert_room: ExpertRoom | None
    """Room for the rows of dropless experts that ranks share; None where graphs hold no such experts."""
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
    alternatives: Alternatives | None = None
    """The runs of the same documents that were compared; None without times, or where they were not to be."""
    spread: SpreadPart | None = None
    """How much figures differ between draws; None where lengths and packs are not drawn."""
    packer_limits: tuple[PackerLimitPart, ...] = ()
    """What each single cap costs as a limit that the packer keeps to, ascending; empty where it keeps to none."""
    planned: Plan | None = field(default=None, repr=False)
    """The plan that training follows; None where there can be none, or none was made."""
    refused: list[str] = field(default_factory=list)
    """Why training by the plan would be refused, as far as the settings tell, or why there is no plan."""
    unknown_refusals: str | None = None
    """Why some of what training by the plan would refuse is not known; None where all is known."""

    @property
    def plan(self) -> Plan:
        """The plan that training follows.

        Raises:
            UsageError: there can be none, or none was made.
        """
        if self.planned is None:
            raise UsageError(*self.refused or ["no plan was made of this analysis: call make_plan"])
        return self.planned

    @property
    def steps(self) -> int:
        """Optimizer steps analysed."""
        return self.microbatches.num_steps

    @property
    def drawn(self) -> bool:
        """Whether micro-batches were drawn, because their lengths or the order in which training reads rows is not
        known."""
        return self.microbatches.drawn or self.spread is not None

    @property
    def fullest(self) -> int:
        """Documents of the fullest micro-batch of all draws."""
        return self.n_seqs.max if self.spread is None else self.spread.most.n_seqs.max

    @property
    def timed(self) -> bool:
        """Whether times of the user's own model are known."""
        return self.times.origin != "none"


FEW_PACKS = 0.003
"""Most packs, as a share, that a limit may add where no times are known to choose it by."""
Progress = Callable[[str, float, int], None]
"""Called with the stage, the share of the whole work that is done, and the number of documents (0: not known yet)."""
_READ_SHARE, _REPLAYED_SHARE = 0.1, 0.85
"""Progress-bar estimates: reading ends at 10% of the total time, replaying the schedule at 85%."""
_COUNTED_SHARE = 0.95
"""Progress-bar estimate: where tokens of text are counted, or many files are read, that takes 95% of the total time."""


def check_hardware(request: Request) -> None:
    """Refuse a name of `--gpu` that no times can be modelled for, and a file of `--host` that is none, before any work.

    With a cost table a name is not refused: it is only compared with the GPU of the table.

    Raises:
        DataError: the file of `--host` cannot be read, or is none.
        UsageError: no such GPU is known.
    """
    if request.gpu is not None and request.cost_table is None:
        from thdprof.analyze.times.gpus import find_gpu

        find_gpu(request.gpu)
    if request.host is not None:
        from thdprof.analyze.times.modelled_costs import load_host

        load_host(request.host)


def analyze(request: Request, *, progress: Progress = show_nothing) -> Analysis:
    """Read a dataset, replay its schedule, recommend buckets.

    Arguments and errors are those of `open_study`.
    """
    return open_study(request, progress=progress).analyze()


def open_study(request: Request, *, progress: Progress = show_nothing) -> Study:
    """Read a dataset to analyse it.

    Args:
        request: the dataset, the run, and what the analysis is made by.
        progress: called with the stage, the share of the whole work that is done, and the number of documents.

    Raises:
        DataError: the dataset or the cost table cannot be read, or has contents that training would refuse.
        UsageError: the settings or limits contradict each other or the dataset.
    """
    measured = None if request.cost_table is None else load_costs(request.cost_table)
    dataset, progress = read_requested(request, progress)
    return Study(request, dataset, measured, progress=progress)


def read_showing(locations: Sequence[str], progress: Progress, **how: Any) -> tuple[Dataset, Progress]:
    """Read a dataset as `read_dataset` does by `how`, and show how far that is; also `progress` of what remains.

    Raises:
        DataError, UsageError: as for `read_dataset`.
    """
    progress("reading", 0.0, 0)
    counted = 0.0

    def tick(stage: str, done: float, documents: int) -> None:
        nonlocal counted
        counted = _COUNTED_SHARE * done
        progress(stage, counted, documents)

    dataset = read_dataset(locations, tick=tick, **how)
    return dataset, lambda stage, done, documents: progress(stage, counted + (1 - counted) * done, documents)


def read_requested(request: Request, progress: Progress) -> tuple[Dataset, Progress]:
    """The dataset of a request, as `read_showing` reads it."""
    how = {name: getattr(request, name) for name in ("format", "cache", "engine")}
    return read_showing(request.locations, progress, settings=request.given, **how)


@dataclass(frozen=True, slots=True)
class Study:
    """The analysis of a dataset that was read."""

    request: Request
    """The run, and what the analysis is made by."""
    dataset: Dataset
    """The dataset of the request."""
    measured: CostTable | None
    """The table in the file `request.cost_table`; None without one."""
    progress: Progress = show_nothing
    """Called with the stage, the share of the whole work that is done, and the number of documents."""
    memo: Memo = FORGETFUL
    """Keeps intermediate results for the next study of this dataset."""
    whole: bool = True
    """Whether it also prices single caps and limits of documents, for which documents are packed once for each cap."""

    def analyze(self) -> Analysis:
        """Replay the schedule of the dataset, and recommend buckets; of what is drawn, also the spread over draws.

        Raises:
            DataError: the dataset has contents that training would refuse.
            UsageError: the settings or limits contradict each other or the dataset.
        """
        return self.add_spread(self.analyze_replay(self.replay()))

    def add_spread(self, first: Analysis) -> Analysis:
        """The study's analysis `first`, of what is drawn with the spread over draws."""
        others = list[Study]()
        for draw in self.dataset.other_draws:
            others.append(replace(self, dataset=replace(self.dataset, content=draw(), other_draws=())))
        if not others and find_packer(first.settings.packer).is_drawn:
            seeds = [{**self.request.given, "seed": (first.settings.seed + n) % 2**32} for n in range(1, DRAWS)]
            others = [replace(self, request=replace(self.request, given=given)) for given in seeds]
        if not others:
            return first
        lean = [replace(other, memo=FORGETFUL, whole=False) for other in others]
        draws = [study.analyze_replay(study.replay()) for study in lean]
        return replace(first, spread=_find_spread(first, [first, *draws]))

    def replay(self) -> Replay:
        """The schedule of the dataset under the request's settings."""
        documents = self.dataset.num_documents()

        def tick(done: float) -> None:
            share = _READ_SHARE + (_REPLAYED_SHARE - _READ_SHARE) * done
            self.progress("replaying the schedule", share, documents)

        replayed = replay(self.dataset, self.request.given, tick, self.memo)
        self.progress("recommending", _REPLAYED_SHARE, documents)
        return replayed

    def analyze_replay(self, replayed: Replay) -> Analysis:
        """The analysis of a dataset whose schedule under the request's settings was replayed.

        Raises:
            UsageError: limits that no choice of buckets keeps to, or kernels that the run's trainer has not.
        """
        request, dataset = self.request, self.dataset
        settings, schedule, table = replayed.settings, replayed.schedule, replayed.schedule.table
        if request.model is not None:
            _check_kernels(request.model, settings)
        reason = request.captures.router_reason
        room = self._choose_room(settings, table)
        run = make_run(
            settings,
            table,
            model=request.model,
            layer_graphs=request.impl == "transformer_engine",
            ends_at_router=reason is not None,
            expert_room=None if room is None else room.factor,
        )
        costs, modelled, gpu_note, unknown = self._find_costs(run)
        gpu = request.gpu if modelled is None else modelled.gpu.name
        chosen, moved = self._choose(run, costs, schedule.independent)
        predicted = Predictions(times=Times(origin="none", basis=unknown), verdict=Verdict(ruling=None, reason=unknown))
        if request.model is not None or self.measured is not None:
            predicted = self._predict(run, costs, chosen, moved, replayed, modelled, unknown)
        caps = [candidate.max_seqs for candidate in chosen.candidates]
        full_size = len(table) - _count_other_sizes(table, settings)
        notes = (*gpu_note, *dataset.notes, *schedule.notes, *note_order(settings, table))
        if room is not None and chosen.buckets:
            observed = None if request.expert_loads is None else request.expert_loads.observed
            if observed is not None and settings.pipeline_parallel_size > 1:
                notes += (f"{room.basis}: the loads of the first pipeline stage are taken for those of every stage",)
        profiles = {settings.context_parallel_size: run.profile}
        if table.groups is not None:
            profiles = Profile.by_cp_size(table, table.groups)
        warnings = caveats(
            run, costs, chosen, predicted, kind=replayed.kind, gpu=gpu, full_size=full_size, limits=request.limits
        )
        return Analysis(
            **{field.name: getattr(predicted, field.name) for field in fields(predicted)},
            request=request,
            run=run,
            dataset=self._summarize(),
            settings=settings,
            assumptions=replayed.assumptions,
            microbatches=table,
            profile=run.profile,
            n_seqs=run.profile.n_seqs.percentiles(),
            max_seqlen=run.profile.max_seqlen.percentiles(),
            n_tokens_max=int(table.n_tokens.max()),
            share_of_full_size=full_size / len(table),
            cp_sizes=_summarize_cp_sizes(run, profiles),
            costs=costs,
            slots=[list(rank) for rank in run.slots],
            recommendation=chosen if predicted.times.origin != "none" else chosen.without_times(),
            router_reason=reason,
            expert_room=room if chosen.buckets else None,
            offload=moved,
            longest=find_longest_captured(profiles, run.longest_possible),
            graph_tokens=run.n_tokens,
            model=request.model,
            model_source=request.model_source,
            gpu=gpu,
            pack_size_guessed=replayed.pack_size_guessed,
            packing_efficiency=schedule.packing_efficiency,
            packing_efficiency_without_cap=schedule.packing_efficiency_without_cap,
            packer_limits=_price_limits(dataset, settings, caps, self.memo) if self.whole else (),
            notes=notes,
            warnings=(*replayed.notes, *notes, *schedule.warnings, *warnings),
        )

    def _summarize(self) -> DatasetPart:
        return self.memo.get("summary", (), lambda: summarize_dataset(self.dataset))

    def _choose_room(self, settings: TrainingSettings, table: MicrobatchTable) -> ExpertRoom | None:
        """Room for the rows of dropless experts that ranks share; None where no graph holds such experts."""
        loads, model = self.request.expert_loads, self.request.model
        if loads is None or model is None or self.request.impl == "none":
            return None
        if loads.observed is not None and model.mtp_num_layers:
            raise UsageError(
                f"--expert-loads {loads.basis}: statistics lack the loads of layers of multi-token prediction: give a "
                "number"
            )
        return choose_room(
            loads,
            model,
            n_tokens=int(table.n_tokens.max()),
            microbatches=settings.global_batch_size // settings.micro_batch_size,
            chunks=settings.pipeline_parallel_size * (settings.virtual_pipeline_size or 1),
            max_step_rate=self.request.limits.max_fallback_rate,
        )

    def _find_costs(self, run: AnalyzedRun) -> tuple[CostTable, ModelledTimes | None, list[str], str]:
        """The cost table; the model of times that made it, if one did; a note on its GPU; and how to get times."""
        unknown: str | None = UNKNOWN_MODEL
        if run.model is not None:
            from thdprof.analyze.times.modelled_costs import explain_missing_times, extend_replays, gpu_of, model_times

            unknown = explain_missing_times(run.settings, self.request.attention, run.model)
        if (measured := self.measured) is not None:
            end = measured.measured_max_seqs()[-1]
            if unknown is None and measured.calibrated:
                measured = extend_replays(measured, run)
            ends = f"the cost table ends at {end} documents: larger caps replay as much longer as they are modelled"
            return measured, None, [] if measured is self.measured else [ends], FOREIGN_TABLE
        if unknown is None:
            gpu, note = gpu_of(self.request.gpu)
            of_run = run.model, run.settings, run.layer_graphs, run.ends_at_router, run.expert_room
            key = ("times", gpu, self.request.host, *of_run)
            modelled = run.table.hold(key, lambda: model_times(run, gpu, self.request.host))
            return modelled.table, modelled, [] if note is None else [note], FOREIGN_TABLE
        return built_in_costs(self.request.attention, run.n_tokens), None, [], unknown or FOREIGN_TABLE

    def _choose(
        self, run: AnalyzedRun, costs: CostTable, independent: int
    ) -> tuple[Recommendation, OffloadPrediction | None]:
        """The recommendation, and what is moved to the host where it captures anything."""
        limits = self.request.limits
        if self.request.impl == "none":
            limits = Limits(num_buckets=0)
        if self.request.offload is None:
            return recommend(run, costs, independent=independent, limits=limits, curve=self.whole), None
        from thdprof.analyze.buckets.saved_tensors import predict_offload

        moved = partial(predict_offload, costs, self.request.offload, n_tokens=run.n_tokens, num_slots=run.num_slots)
        if limits.graph_memory_bytes is not None:
            freed = moved(graph_memory_bytes=None).device_bytes_freed
            limits = replace(limits, graph_memory_bytes=limits.graph_memory_bytes + freed)
        chosen = recommend(run, costs, independent=independent, limits=limits)
        return chosen, moved(graph_memory_bytes=chosen.graph_memory_bytes) if chosen.buckets else None

    def _predict(
        self,
        run: AnalyzedRun,
        costs: CostTable,
        chosen: Recommendation,
        moved: OffloadPrediction | None,
        replayed: Replay,
        modelled: ModelledTimes | None,
        unknown: str,
    ) -> Predictions:
        """What is predicted of the run; `unknown` says how to get times, where `costs` are of another model."""
        from thdprof.analyze.times.answer import document_tokens, predict

        watched = self.request.offload is None or not (run.layer_graphs or run.ends_at_router)
        return predict(
            run,
            costs,
            chosen,
            modelled=modelled,
            unknown=unknown,
            offload=moved,
            watched=watched and self.request.impl != "local",
            tokens=document_tokens(replayed, row_tokens=self._summarize().tokens / max(1, self._summarize().rows)),
            price=self.request.gpu_hour_price,
            gbps=self.request.data_parallel_gbps,
        )


def _check_kernels(model: Model, settings: TrainingSettings) -> None:
    """Refuse kernels that the run's trainer does not have."""
    for name in ("compile", "liger"):
        if getattr(model, name) and not settings.is_of_trainer:
            raise UsageError(f"{describe_field(model, name)}: for layers of Hugging Face's Trainer; leave it out")
    if model.compile and model.liger:
        raise UsageError("--compile and --liger: compiled layers with Liger's kernels were not run; give one")


MOST_PRICED = 50_000
"""Documents, drawn at random and in their order, that are packed anew to tell what a limit costs."""


def _price_limits(
    dataset: Dataset, settings: TrainingSettings, caps: Sequence[int], memo: Memo
) -> tuple[PackerLimitPart, ...]:
    """What each of `caps` costs as the packer's limit, over one epoch; empty where the packer keeps to none."""
    content = dataset.content
    kept = find_packer(settings.packer).limit
    if kept is None or not kept.in_training or not isinstance(content, UnpackedDocuments):
        return ()
    if kept.of_row and settings.micro_batch_size > 1:  # a micro-batch joins several rows
        return ()
    lengths = content.document_tokens
    chosen = np.random.default_rng(0).choice(len(lengths), min(len(lengths), MOST_PRICED), replace=False)
    priced = replace(dataset, content=UnpackedDocuments(document_tokens=lengths[np.sort(chosen)]))
    efficiency: dict[int | None, float] = {}
    for limit in (settings.max_docs_per_pack, *caps):
        one_epoch = replace(settings, max_docs_per_pack=limit, train_samples=None, train_epochs=None)
        with suppress(DataError, UsageError):  # the packer cannot keep to it
            anew = memo.get(("limit", limit), one_epoch, partial(build_schedule, priced, one_epoch))
            efficiency[limit] = anew.packing_efficiency or 0.0
    now = efficiency.get(settings.max_docs_per_pack)
    return tuple(
        PackerLimitPart(max_docs=cap, packs_more=now / used - 1, unfilled=max(0.0, 1 - used))
        for cap in caps
        if now and (used := efficiency.get(cap))
    )


def choose_limit(analysis: Analysis) -> PackerLimitPart | None:
    """The least limit that costs hardly a pack, else the next below the one that costs none; None where no such is."""
    most = analysis.settings.max_docs_per_pack or analysis.fullest
    lower = [limit for limit in analysis.packer_limits if limit.max_docs < most]
    return next((limit for limit in lower if limit.packs_more <= FEW_PACKS), lower[-1] if lower else None)


def _find_spread(first: Analysis, draws: Sequence[Analysis]) -> SpreadPart:
    """The least and the most of the figures of all `draws`; fallback rates are those of the buckets of the first."""
    parts, buckets = [], first.recommendation.buckets
    for draw in draws:
        table = draw.microbatches
        size = np.array([first.settings.context_parallel_size]) if table.groups is None else table.groups.cp_size
        shapes = Shapes(
            n_seqs=table.joint(table.n_seqs),
            max_seqlen=table.joint(table.max_seqlen),
            n_tokens=np.maximum(table.joint(table.n_tokens) // size, first.graph_tokens),
            cp_size=size,
        )
        rate = fallback_rate(table, decide_all(buckets, shapes).choice < 0)
        largest = max((bucket.max_seqs for bucket in draw.recommendation.buckets), default=0)
        parts.append(DrawnPart(n_seqs=draw.n_seqs, max_seqlen=draw.max_seqlen, fallback_rate=rate, max_seqs=largest))
    return SpreadPart(draws=len(draws), least=_reduce(min, parts), most=_reduce(max, parts))


def _reduce(function: Callable[[Iterable[Any]], Any], values: Sequence[Any]) -> Any:
    """One of `values`, which are numbers or parts of a plan, by `function` of each number."""
    if not isinstance(values[0], Part):
        return function(values)
    names = type(values[0]).model_fields
    return type(values[0])(**{name: _reduce(function, [getattr(one, name) for one in values]) for name in names})


def _summarize_cp_sizes(run: AnalyzedRun, profiles: Mapping[int, Profile]) -> tuple[CpSize, ...]:
    """The micro-batches of each context-parallel size under dynamic context parallelism."""
    table = run.table
    if table.groups is None:
        return ()
    return tuple(
        CpSize(
            cp_size=size,
            share=profile.n_seqs.total / len(table),
            n_seqs=profile.n_seqs.percentiles(),
            max_seqlen=profile.max_seqlen.percentiles(),
            n_tokens=size * run.n_tokens,
            n_tokens_max=int(table.n_tokens[table.groups.cp_size == size].max()),
        )
        for size, profile in profiles.items()
    )


def _count_other_sizes(table: MicrobatchTable, settings: TrainingSettings) -> int:
    """Micro-batches that do not have the number of tokens that graphs are captured for."""
    if table.groups is not None:
        from thdprof.schedule.dynamic_cp import capacity

        return int((table.n_tokens != capacity(table, settings)).sum())
    if table.n_tokens.strides == (0,):
        return 0
    return int((table.n_tokens != table.n_tokens.max()).sum())
