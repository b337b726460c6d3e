"""Packs a dataset anew, and compares the trainer's own packs with the new ones under the run's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.analysis import FEW_PACKS, Analysis, Progress, Study, analyze, read_requested
from thdprof.analyze.buckets.cost_table import load_costs
from thdprof.analyze.planning import add_plan
from thdprof.analyze.predictions import Range
from thdprof.analyze.settings.request import Request
from thdprof.analyze.sweep import Rate
from thdprof.errors import UsageError
from thdprof.pack.documents import Documents, collect_documents, read_sources
from thdprof.pack.order import OrderFigures, measure_order, order_packs
from thdprof.pack.packs import pack_documents
from thdprof.read.dataset import (
    Content,
    ConversationFile,
    Conversations,
    Dataset,
    PackedRows,
    RowRule,
    UnpackedDocuments,
)
from thdprof.schedule.packing import pad
from thdprof.systems import find_packer
from thdprof.systems.megatron_gpt import train_share
from thdprof.training import TailPolicy, TrainingSettings

_READ_SHARE = 0.4
"""Progress-bar estimate: the share of the work that ends with the analysis of the old packs."""
_CAPS = tuple(quarter << power for power in range(11) for quarter in (4, 5, 6, 7))
"""Caps that are compared: powers of two, and three numbers between each and the next."""
_OLD_ROWS = ("packer", "max_docs_per_pack", "packing_processes", "packing_batch", "packing_bins", "shuffle_seed",
             "loader", "seq_length", "split", "sft_tokenizer_prompt_format", "tokenizer_model", "length_column",
             "drop_last")  # fmt: skip
"""Settings of the run that say how the old rows were made and read."""
_OF_CONVERSATIONS = ("sft_tokenizer_prompt_format", "tokenizer_model")
"""Those of them by which conversations are still read."""
_RUN_LENGTH = ("train_samples", "train_iters", "train_epochs")

Target = Literal["trl", "bridge", "megatron-sft", "index"]
Rule = RowRule | Literal["conversations"]
"""How training reads the new packs: as rows, or as lines of conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Documents in packs, in the order in which training reads them."""

    documents: Documents
    """What is packed."""
    order: NDArray[np.int64]
    """Indices of the documents, pack after pack, shape [documents]."""
    offsets: NDArray[np.int64]
    """Pack p holds order[offsets[p] : offsets[p + 1]], shape [packs + 1]."""
    tokens: NDArray[np.int32]
    """Tokens of the documents as training sees them, padded if it pads them, pack after pack, shape [documents]."""
    costs: NDArray[np.float64]
    """Sum of the squared lengths of each pack's documents as training sees them, by which packs are ordered, shape
    [packs]."""
    seq_length: int
    """Most tokens of a pack."""

    def make_dataset(self, rule: Rule) -> Dataset:
        """The packs as training reads them."""
        content: Content
        if rule == "conversations":
            lines = np.arange(1, len(self.offsets))
            tokens = self.documents.tokens[self.order]
            file = ConversationFile(
                path="new packs", conversation_tokens=tokens, line_offsets=self.offsets, line_numbers=lines, faults={}
            )
            format, content = "megatron-sft", Conversations(files=(file,))
        else:
            content = PackedRows(document_tokens=self.tokens, row_offsets=self.offsets, rule=rule)
            format = "lengths" if rule == "concatenate" else rule
        return Dataset.from_content(format, ["new packs"], content, pack_tokens=self.seq_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One column of the comparison: the run with the old packs or with the new ones."""

    analysis: Analysis
    """The analysis of the run."""
    packs: int
    """Packs of one epoch."""
    fill: float
    """Share of the packs' tokens that hold documents, 0 to 1."""
    graph_memory_bytes: int | None
    """Memory of the graphs; None: not known."""
    slowest_over_mean: float | None
    """Work of a step's slowest rank over that of the mean rank; None under dynamic context parallelism."""
    slowest_over_mean_random: float | None
    """The same with the micro-batches in a random order."""
    tokens_per_second: Range | None
    """Tokens of documents that the run trains on per second; None: no times are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """What a cap on the documents of a pack makes of the run."""

    max_docs: int | None
    """The cap, the document of an unused tail included; None: any number."""
    packs: int
    """Packs of one epoch."""
    documents: int
    """Most documents of a pack, without that of a tail."""
    tokens_per_second: float | None
    """Tokens of documents that the run trains on per second, on a host in the middle of the range; None: no times."""
    more_packs: float = 0.0
    """Packs that the cap adds, as a share of those without a cap; 0 where no caps are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacking:
    """Everything that `thdprof pack` reports and writes."""

    packs: Packs
    """The new packs."""
    max_docs: int | None
    """Most documents of a pack, the one of an unused tail included; None: any number."""
    curve: tuple[Cap, ...]
    """The caps that were compared; empty where the cap was given."""
    before: Side
    """The run with its trainer's own packs."""
    after: Side
    """The run with the new packs, read in their order."""
    old: Request
    """The dataset and the run with its trainer's own packs, over one epoch."""
    new: Request
    """The run with the new packs."""
    order: OrderFigures | None
    """The steps of the new order and of a random one; None: no step is full."""
    sources: tuple[str, ...]
    """Names of the sources that rows have; empty where they have none."""


def repack(
    request: Request,
    *,
    max_docs: int | Literal["auto"] | None,
    window: int | None,
    target: Target | None = None,
    progress: Progress = lambda stage, done, documents: None,
) -> tuple[Repacking, Dataset]:
    """Pack the dataset of `request` anew; also the dataset as it was read.

    Args:
        request: the dataset and the run, which is compared over one epoch.
        max_docs: most documents of a pack, with the one that training appends for an unused tail; None: any number;
            "auto": the one of the `_CAPS` by which the run trains on most tokens per second. Without times it is the
            least that adds at most 0.3% of packs.
        window: steps over which packs are balanced; 0 keeps a random order, None takes the default.
        target: the trainer whose rows are made; None: the one that the run's settings name.

    Raises:
        DataError: the dataset cannot be read, or nothing is left to pack.
        UsageError: the settings contradict each other, or blend several datasets by weights.
    """
    if request.given.get("weights") is not None:
        raise UsageError(
            "--weights: pack each dataset of a blend for itself, and blend the packs by the same weights; where they "
            "count rows, as with --sft, multiply each by packs over rows"
        )
    measured = None if request.cost_table is None else load_costs(request.cost_table)
    dataset, show = read_requested(request, progress)
    if dataset.other_draws:
        raise UsageError(f"{dataset.uris[0]}: lengths that are drawn are no data to pack; thdprof analyze counts packs")
    stored = ("seq_length",) if isinstance(dataset.content, PackedRows) else ()
    old = replace(request, given=_without(request.given, (*_RUN_LENGTH, *stored)))
    before = Study(old, dataset, measured, whole=False).analyze()
    seq_length = request.given.get("seq_length") or before.settings.seq_length
    rule = _find_rule(dataset, before.settings, target)
    usual: TailPolicy = "append_dummy_seq" if rule == "trl" else before.settings.tail_policy
    tail: TailPolicy = request.given.get("tail_policy", usual)
    adds_tail = rule == "bridge" or tail == "append_dummy_seq"
    if rule == "conversations":  # SFTDataset's padding belongs to the last one
        tail = "extend_last"
    elif rule == "bridge":
        tail = "append_dummy_seq" if before.settings.pad_to_max_length else "none"
    new = replace(request, given=read_in_order(request.given, rule, before.settings, seq_length))
    one_epoch = replace(new, given=_without(new.given, _RUN_LENGTH))
    make = partial(
        make_packs, dataset, before.settings, seq_length=seq_length, adds_tail=adds_tail, tail=tail, window=window
    )
    if rule == "conversations":  # whose epochs follow each other without a gap
        make = partial(make, per_step=before.settings.global_batch_size)

    def try_cap(cap: int | None, done: float) -> _Trial:
        show("packing", _READ_SHARE + (1 - _READ_SHARE) * done, dataset.num_documents())
        packs = make(max_docs=cap, for_bridge=target == "bridge")
        analysis = Study(one_epoch, packs.make_dataset(rule), measured).analyze()
        return _measure_cap(cap, packs, analysis), packs, analysis

    curve: tuple[Cap, ...] = ()
    if max_docs == "auto":
        best, curve = _choose_cap(try_cap, tail=int(adds_tail))
    else:
        best = try_cap(max_docs, 0.0)
    chosen, packs, after = best
    if rule == "conversations" and (left := chosen.packs % after.settings.global_batch_size):
        note = (
            f"the last {left} packs fill no step, and a second epoch of --sft begins behind them, where ranks are then "
            "less even: train one epoch, or take these lines off"
        )
        packs = replace(packs, documents=replace(packs.documents, notes=(*packs.documents.notes, note)))
    old_packs, tokens = _count_packs(dataset, before, packs)
    sources = read_sources(packs.documents)
    result = Repacking(
        packs=packs,
        max_docs=chosen.max_docs,
        curve=curve,
        before=_summarize(before, old_packs, tokens),
        after=_summarize(after, chosen.packs, int(packs.tokens.sum(dtype=np.int64))),
        old=old,
        new=new,
        order=_measure_order(packs, after.settings, sources),
        sources=() if sources is None else tuple(sources[0]),
    )
    return result, dataset


_Trial = tuple[Cap, Packs, Analysis]


def _choose_cap(try_cap: Callable[[int | None, float], _Trial], *, tail: int) -> tuple[_Trial, tuple[Cap, ...]]:
    """The cap of the most tokens per second, and the curve; without times the least cap that adds few packs.

    `try_cap` takes a cap and the share of trials that is done. `tail` is the documents that training adds to a pack.
    """
    best = try_cap(None, 0.0)
    curve = [best[0]]
    counts = np.diff(best[1].offsets) + tail
    caps = [cap for cap in reversed(_CAPS) if counts.mean() < cap < counts.max()]
    for number, cap in enumerate(caps, start=1):
        chosen, packs, analysis = try_cap(cap, number / (len(caps) + 1))
        chosen = replace(chosen, more_packs=chosen.packs / curve[0].packs - 1)
        curve.append(chosen)
        rate, most = chosen.tokens_per_second, best[0].tokens_per_second
        if chosen.more_packs <= FEW_PACKS if rate is None or most is None else rate > most:
            best = chosen, packs, analysis
    return best, tuple(curve)


def _measure_order(
    packs: Packs, settings: TrainingSettings, sources: tuple[list[str], NDArray[np.int64]] | None
) -> OrderFigures | None:
    count = len(packs.costs)
    if count < settings.global_batch_size:
        return None
    of_sources = None
    if sources is not None:
        names, source = sources
        place = source[packs.order] * count + np.repeat(np.arange(count), np.diff(packs.offsets))
        of_sources = np.bincount(place, packs.tokens, minlength=len(names) * count).reshape(len(names), count)
    return measure_order(
        packs.costs,
        np.arange(count),
        **_describe_steps(settings),
        sizes=np.stack([np.add.reduceat(packs.tokens, packs.offsets[:-1], dtype=np.float64), np.diff(packs.offsets)]),
        sources=of_sources,
    )


def _describe_steps(settings: TrainingSettings) -> dict[str, int]:
    """Arguments of `order_packs` and `measure_order`."""
    return {
        "num_ranks": settings.data_parallel_size,
        "num_microbatches": settings.num_microbatches,
        "micro_batch_size": settings.micro_batch_size,
        "seed": settings.seed,
    }


def _measure_cap(max_docs: int | None, packs: Packs, analysis: Analysis) -> Cap:
    rate = Rate.from_worth(analysis.worth, analysis.times, step_ms=analysis.recommendation.step_ms)
    return Cap(
        max_docs=max_docs,
        packs=len(packs.offsets) - 1,
        documents=int(np.diff(packs.offsets).max()),
        tokens_per_second=None if rate is None else rate.middle,
    )


def plan_packs(result: Repacking, path: Path | None) -> Analysis:
    """The analysis, with its plan, of a run with the new packs, written to `path` as rows; None: not written as rows.

    Raises:
        DataError: the file cannot be read.
    """
    analysis = result.after.analysis
    if path is not None:
        analysis = analyze(replace(result.new, locations=[str(path)], format="auto"))
    return add_plan(analysis)


def make_packs(
    dataset: Dataset,
    settings: TrainingSettings,
    *,
    seq_length: int,
    adds_tail: bool,
    tail: TailPolicy,
    max_docs: int | None,
    window: int | None,
    per_step: int = 1,
    for_bridge: bool = False,
) -> Packs:
    """The packs of the dataset's documents, in the order of training.

    They are ordered by the sum of squared lengths: a micro-batch's time grows with that alone, where rows are padded.
    `adds_tail` says that training appends a document for an unused tail, which counts for `max_docs`; `tail` is what
    attention sees of it. The number of packs is a multiple of `per_step` where that adds few. `for_bridge` is for
    `collect_documents`.

    Raises:
        DataError: no document is left to pack.
        UsageError: `max_docs` leaves no place for a document.
    """
    pads = isinstance(dataset.content, UnpackedDocuments) and find_packer(settings.packer).pads_documents
    multiple = settings.pad_seq_to_mult if pads else 1
    if isinstance(dataset.content, Conversations) and settings.context_parallel_size > 1:
        multiple = 2 * settings.context_parallel_size  # as SFTDataset pads each conversation
    if for_bridge and multiple > 1:
        raise UsageError(
            f"--pad-seq-to-mult {multiple}: --to bridge pads no documents; pack rows that Megatron-Bridge has padded"
        )
    longest = max(1, seq_length // multiple * multiple)
    documents = collect_documents(dataset, settings, seq_length=longest, for_bridge=for_bridge)
    tokens = pad(documents.tokens.astype(np.int64), multiple)
    more = int(adds_tail)
    if max_docs is not None and max_docs <= more:
        raise UsageError(f"--max-docs {max_docs}: training adds a document for an unused tail; use {more + 1} or more")
    cap = None if max_docs is None else max_docs - more
    pack = pack_documents(tokens, seq_length=seq_length, max_docs=cap, multiple=per_step)
    costs = np.bincount(pack, weights=np.square(tokens, dtype=np.float64))
    if tail != "none":
        last, rest = np.zeros_like(costs), seq_length - np.bincount(pack, weights=tokens)
        if tail == "extend_last":
            last[pack] = tokens
        costs += rest * (2 * last + rest)
    read = order_packs(
        costs,
        **_describe_steps(settings),
        window=window,
        sizes=np.stack([np.bincount(pack, weights=tokens), np.bincount(pack)]),
    )
    place = np.empty_like(read)
    place[read] = np.arange(len(read))
    order = np.argsort(place[pack], kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(place[pack])))).astype(np.int64)
    return Packs(
        documents=documents,
        order=order,
        offsets=offsets,
        tokens=tokens[order].astype(np.int32),
        costs=costs[read],
        seq_length=seq_length,
    )


def read_in_order(given: Mapping[str, Any], rule: Rule, settings: TrainingSettings, seq_length: int) -> dict[str, Any]:
    """The run's settings for the new packs: those given, and a loader that reads rows in their order."""
    found = {**_without(given, _OLD_ROWS), "seq_length": seq_length, "loader": "single"}
    if rule == "trl":
        found |= {"loader": "trainer", "sampling": "sequential", "drop_last": settings.drop_last}
    if rule == "conversations":
        found |= {name: given[name] for name in _OF_CONVERSATIONS if name in given} | {"split": "100,0,0"}
    return found


def _without(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def _find_rule(dataset: Dataset, settings: TrainingSettings, target: Target | None) -> Rule:
    """How training reads the new packs: as the trainer of the target does, else as that of the run."""
    if target == "megatron-sft":
        return "conversations"
    if target in ("trl", "bridge"):
        return target
    if isinstance(dataset.content, PackedRows):
        return dataset.content.rule
    if settings.is_of_trainer:
        return "trl"
    bridge = isinstance(dataset.content, UnpackedDocuments) and find_packer(settings.packer).rule == "bridge"
    return "bridge" if bridge else "concatenate"


def _count_packs(dataset: Dataset, before: Analysis, packs: Packs) -> tuple[int, int]:
    """Packs of the old rows in an epoch, and the tokens of documents in them."""
    tokens, seq_length = int(packs.tokens.sum(dtype=np.int64)), before.settings.seq_length
    match dataset.content:
        case PackedRows():
            return dataset.num_rows(), dataset.num_tokens()
        case UnpackedDocuments() if before.packing_efficiency is not None:
            return round(tokens / (before.packing_efficiency * seq_length)), tokens
        case Conversations():
            lines = [
                file.line_tokens()[train_share(before.settings.split, len(file.line_numbers))]
                for file in dataset.content.files
            ]
            return sum(map(len, lines)), sum(int(np.minimum(line, seq_length).sum()) for line in lines)
    return -(-tokens // seq_length), tokens


def _summarize(analysis: Analysis, packs: int, tokens: int) -> Side:
    work, worth = _work(analysis), analysis.worth
    shuffled = None if work is None else np.random.default_rng(analysis.settings.seed).permutation(work)
    return Side(
        analysis=analysis,
        packs=packs,
        fill=tokens / (packs * analysis.settings.seq_length),
        graph_memory_bytes=analysis.recommendation.graph_memory_bytes if analysis.timed else None,
        slowest_over_mean=None if work is None else slowest_over_mean(analysis, work),
        slowest_over_mean_random=None if shuffled is None else slowest_over_mean(analysis, shuffled),
        tokens_per_second=None if worth is None else worth.tokens_per_second,
    )


def _work(analysis: Analysis) -> NDArray[np.float64] | None:
    """Milliseconds of every micro-batch, shape [micro-batches]; without times the sum of its squared lengths."""
    table, costs, buckets = analysis.microbatches, analysis.costs, analysis.recommendation.buckets
    if table.groups is not None or table.squared is None:
        return None
    more = costs.squared_ms(table.squared)
    if more is None or not analysis.timed:
        return table.squared
    if buckets:
        return more + costs.replay_ms(buckets[-1].max_seqs, buckets[-1].max_seqlen) + (costs.outside_ms or 0.0)
    hides = costs.at_host("low").host_bound  # longer attention, on every host that is expected
    return (0.0 if hides else more) + costs.eager_ms(table.n_seqs) + (costs.outside_ms or 0.0)


def slowest_over_mean(analysis: Analysis, work: NDArray[np.float64]) -> float:
    """The slowest rank's share of work [micro-batches] in a step over the mean rank's, over all full steps."""
    table = analysis.microbatches
    by_rank = table.per_rank_step(work, np.add)
    full = table.num_microbatches == table.num_microbatches.max()
    return float(by_rank[full].max(axis=1).sum() / by_rank[full].mean(axis=1).sum())
