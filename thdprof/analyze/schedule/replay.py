"""A dataset and training settings -> the settings completed, and the micro-batches that training forms under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable, join_steps
from thdprof.analyze.schedule.rows import schedule_rows, shuffle_dataset, trainer_table
from thdprof.analyze.schedule.samplers import torch_randperm
from thdprof.analyze.schedule.schedule import FORGETFUL, Memo, Schedule, Tick, fill_rows
from thdprof.analyze.settings.resolve import Assumption, resolve_settings
from thdprof.analyze.sources.base import Content, Conversations, Dataset, PackedRows, UnpackedDocuments
from thdprof.plan import DatasetPart
from thdprof.training import (
    AXOLOTL_PACKERS,
    DRAWN_PACKERS,
    DYNAMIC_CP,
    GRAIN_PACKERS,
    RL_PACKERS,
    STEP_PACKERS,
    TRL_PACKERS,
    Kind,
    Loader,
    TrainingSettings,
    definitions,
)


def build_schedule(
    dataset: Dataset, settings: TrainingSettings, tick: Tick = lambda done: None, memo: Memo = FORGETFUL
) -> Schedule:
    """Predict the micro-batches of a training run.

    Args:
        memo: keeps work for the next schedule of this dataset; a memo must not serve two datasets.

    Raises:
        DataError: the data cannot fill one step, or has a row that training would refuse.
        UsageError: the settings do not fit the dataset.
    """
    match dataset.content:
        case PackedRows():
            return schedule_rows(dataset.content, settings)
        case UnpackedDocuments():
            return _schedule_documents(dataset.content, settings, memo)
    from thdprof.analyze.schedule.gpt_dataset import schedule_conversations, schedule_streams

    if isinstance(dataset.content, Conversations):
        return schedule_conversations(dataset.content, settings)
    return schedule_streams(dataset.content, settings, tick, memo)


def _schedule_documents(documents: UnpackedDocuments, settings: TrainingSettings, memo: Memo) -> Schedule:
    """The schedule of documents that `settings.packer` packs, before training starts or step by step."""
    if settings.packer in DYNAMIC_CP:
        from thdprof.analyze.schedule.dynamic_cp import dynamic_cp

        return dynamic_cp(documents.document_tokens, settings)
    from thdprof.analyze.schedule import packers

    if settings.packer in STEP_PACKERS:
        pack = packers.dp_balanced
        if settings.packer in RL_PACKERS:
            from thdprof.analyze.schedule.step_packers import pack_steps as pack
        packing = pack(documents.document_tokens, settings)
        exact = settings.loader == "single" and settings.packer not in DRAWN_PACKERS
        table = fill_rows(packing.rows, settings).table(settings, packing.num_microbatches, exact=exact)
        one_epoch = len(table) * len(documents.document_tokens) // max(1, len(packing.rows.document_tokens))
        return Schedule(table=table, distinct=one_epoch, **packing.summarize())
    if settings.packer in GRAIN_PACKERS:
        from thdprof.analyze.schedule.grain import schedule_grain

        return schedule_grain(documents.document_tokens, settings)
    if settings.packer in AXOLOTL_PACKERS:
        return _schedule_multipack(documents.document_tokens, settings)
    lengths = documents.document_tokens
    if settings.shuffle_seed is not None and settings.packer != "none":  # TRL shuffles before it packs, and the rows
        lengths = lengths[shuffle_dataset(len(lengths), settings.shuffle_seed)]
    key = tuple(getattr(settings, name) for name in _OF_PACKING)
    packing = memo.get("packed", key, lambda: packers.pack_rows(lengths, settings, documents.trained_from))
    return replace(schedule_rows(packing.rows, settings), **packing.summarize())


def _schedule_multipack(lengths: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of documents that Axolotl packs anew in every epoch, in the order in which its sampler reads them.

    A pack is a micro-batch of `micro_batch_size` x `seq_length` tokens. Every rank takes each so-many-th, and a partial
    round of the ranks is left out.
    """
    from thdprof.analyze.schedule import packers

    sequential, size = settings.sampling == "sequential", settings.micro_batch_size
    of_packs = replace(
        settings,
        micro_batch_size=1,
        seq_length=size * settings.seq_length,
        global_batch_size=settings.global_batch_size // size,
        sampling="sequential",
        drop_last=True,
        shuffle_seed=None,
        train_samples=None,
        train_epochs=None,
    )
    wanted = None if settings.train_samples is None else settings.train_samples // settings.global_batch_size
    tables: list[MicrobatchTable] = []
    steps = epoch = 0
    while (epoch < (settings.train_epochs or 1)) if wanted is None else (steps < wanted):
        if not (tables and sequential):
            order = slice(None) if sequential else torch_randperm(len(lengths), settings.seed + epoch)
            packing = packers.pack_rows(lengths[order], settings)
            table = replace(trainer_table(packing.rows, of_packs), exact=sequential)
        tables.append(table)
        steps, epoch = steps + table.num_steps, epoch + 1
    joined = tables[0] if len(tables) == 1 and wanted is None else join_steps(tables, wanted or steps)
    return Schedule(table=joined, distinct=len(tables[0]), **packing.summarize())


_OF_PACKING = ("packer", "seq_length", "seed", "max_docs_per_pack", "pad_seq_to_mult", "tail_policy",
               "packing_processes", "packing_batch", "shuffle_seed")  # fmt: skip
"""Settings that decide the rows of a packer."""
_DEFAULT_LOADERS: dict[str, Loader] = {
    "megatron": "single",
    "megatron-sft": "single",
    "bridge": "batch",
    "bridge-npy": "batch",
    "llamafactory": "trainer",
    "trl-text": "trainer",
}
"""Format -> the sampler that its own training code uses by default."""


def summarize_dataset(dataset: Dataset) -> DatasetPart:
    """What plans and reports say of the dataset that was read."""
    return DatasetPart(
        uris=list(dataset.uris),
        format=dataset.format,
        fingerprint=dataset.fingerprint,
        rows=dataset.num_rows(),
        documents=dataset.num_documents(),
        tokens=dataset.num_tokens(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The schedule of a dataset, and the settings that made it."""

    kind: Kind
    """What the dataset holds, which decides the settings that apply to it."""
    settings: TrainingSettings
    """The run's settings, complete."""
    assumptions: tuple[Assumption, ...]
    """Settings that nobody gave."""
    schedule: Schedule
    """The micro-batches, and notes on them."""
    pack_size_guessed: bool
    """Whether the files do not tell the pack size, and `seq_length` is the tokens of a row that was the fullest."""
    notes: tuple[str, ...]
    """Settings that were given in vain."""


def replay(
    dataset: Dataset,
    given: Mapping[str, Any],
    tick: Tick = lambda done: None,
    memo: Memo = FORGETFUL,
    *,
    planned_guess: bool = False,
) -> Replay:
    """The micro-batches that training forms of `dataset` under the settings `given`, by name.

    `planned_guess` tells that the `seq_length` given is a plan's, which took it from the fullest row of its data. It
    stays a guess unless the files now tell the same.

    Raises:
        DataError: the data cannot be trained on as it is.
        UsageError: settings that cannot be.
    """
    content, kind = dataset.content, _kind(dataset.content)
    packer = definitions()["packer"].canonical(given.get("packer"))
    packed_in_training = kind == "documents" and packer in (*STEP_PACKERS, *GRAIN_PACKERS)
    default_loader: Loader | None = "single" if packed_in_training else _DEFAULT_LOADERS.get(dataset.format)
    if dataset.usual_packer is not None and packer in (None, *TRL_PACKERS):
        default_loader = "trainer"
    longest = fullest = None
    if isinstance(content, UnpackedDocuments):
        longest = max(1, int(content.document_tokens.max()))
    elif isinstance(content, PackedRows) and dataset.pack_tokens is None:
        fullest = max(1, int(content.num_tokens().max()))
    settings, assumptions, vain = resolve_settings(
        given,
        pack_tokens=fullest or dataset.pack_tokens,
        size_guessed=fullest is not None,
        dataset_format=dataset.format,
        default_loader=default_loader,
        usual_packer=dataset.usual_packer,
        longest=longest,
        num_datasets=len(dataset.uris),
        kind=kind,
    )
    tick(0.0)
    schedule = build_schedule(dataset, settings, tick, memo)
    if settings.shared_capture_ranks > 1 and schedule.table.groups is None:
        together = replace(schedule.table, shared_capture_ranks=settings.shared_capture_ranks)
        schedule = replace(schedule, table=together)
    if dataset.other_draws:
        schedule = replace(schedule, table=replace(schedule.table, exact=False))
    guessed = fullest is not None and given.get("seq_length") is None
    if planned_guess:
        guessed = dataset.pack_tokens != settings.seq_length
    if guessed:
        trainers = "LLaMA-Factory's cutoff_len" if dataset.format == "llamafactory" else "TRL's max_length"
        owner = {"bridge": "Megatron-Bridge's pack size", "trl": trainers}.get(kind, "training's sequence length")
        schedule = _mark_guessed_size(schedule, kind, settings, owner=owner, planned=planned_guess)
    return Replay(
        kind=kind,
        settings=settings,
        assumptions=assumptions,
        schedule=schedule,
        pack_size_guessed=guessed,
        notes=vain,
    )


def _kind(content: Content) -> Kind:
    match content:
        case PackedRows(rule=rule):
            return "packs" if rule == "concatenate" else rule
        case UnpackedDocuments():
            return "documents"
        case Conversations():
            return "conversations"
        case _:
            return "streams"


def _mark_guessed_size(
    schedule: Schedule, kind: Kind, settings: TrainingSettings, *, owner: str, planned: bool
) -> Schedule:
    """The schedule with a note on its pack size, and not exact where training's counts depend on that size.

    Megatron-Bridge and tail policies fill rows up to it: then every full row would have a document more. The Trainer's
    rows are filled up to the size that the plan itself gives. `owner` names that size, and `planned` tells that a plan
    holds the guess.
    """
    fills = kind == "bridge" or (settings.tail_policy != "none" and settings.loader != "trainer")
    row, give = ("the plan's fullest row", "analyse again with") if planned else ("the fullest row", "give")
    remedy = f", and tails are counted by it: {give} training's as --seq-length" if fills else ""
    note = f"pack size taken from {row}, {settings.seq_length} tokens; {owner} is that or more{remedy}"
    table = schedule.table
    if fills and table.exact:
        table = replace(table, exact=False, size_guessed=True)
    return replace(schedule, table=table, notes=(note, *schedule.notes))
