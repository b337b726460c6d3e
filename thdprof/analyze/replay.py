"""A dataset and training settings -> the settings completed, and the micro-batches that training forms under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from thdprof.analyze.settings.resolve import Assumption, resolve_settings
from thdprof.errors import DataError
from thdprof.plan import DatasetPart
from thdprof.read.dataset import Content, Conversations, Dataset, PackedRows, UnpackedDocuments
from thdprof.schedule import samplers
from thdprof.schedule.schedule import FORGETFUL, Memo, Schedule, Tick, fill_rows
from thdprof.schedule.steps import schedule_steps
from thdprof.schedule.trainer import shuffle_dataset, trainer_table
from thdprof.systems import find_format, find_packer
from thdprof.systems.bridge import collate_rows, map_samples
from thdprof.training import PACKERS, Kind, TrainingSettings, definitions


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
            return _schedule_rows(dataset.content, settings)
        case UnpackedDocuments():
            return _schedule_documents(dataset.content, settings, memo)
        case Conversations():
            from thdprof.systems.megatron_sft import schedule_conversations

            return schedule_conversations(dataset.content, settings)
    from thdprof.systems.megatron_gpt import schedule_streams

    return schedule_streams(dataset.content, settings, tick, memo)


def _schedule_documents(documents: UnpackedDocuments, settings: TrainingSettings, memo: Memo) -> Schedule:
    """The schedule of documents that `settings.packer` packs, before training starts or while it goes on."""
    packer, lengths = find_packer(settings.packer), documents.document_tokens
    if packer.replay is not None:
        return packer.replay(lengths, settings)
    if packer.by_step is not None:
        return schedule_steps(packer.pack(lengths, settings), lengths, settings)
    if settings.shuffle_seed is not None and not packer.row_is_document:  # TRL shuffles before it packs, and the rows
        lengths = lengths[shuffle_dataset(len(lengths), settings.shuffle_seed)]
    key = tuple(getattr(settings, name) for name in _OF_PACKING)
    packing = memo.get("packed", key, lambda: packer.pack(lengths, settings, documents.trained_from))
    return replace(_schedule_rows(packing.rows, settings), **packing.summarize())


def _schedule_rows(rows: PackedRows, settings: TrainingSettings) -> Schedule:
    """The schedule of rows that were packed before training."""
    totals = rows.num_tokens()
    if int(totals.max()) > settings.seq_length:
        row = int((totals > settings.seq_length).argmax())
        raise DataError(
            f"row {row}: {totals[row]} tokens are more than --seq-length {settings.seq_length}"
            f"{', and Megatron-Bridge stops on it' if rows.rule == 'bridge' else ''}; give --seq-length {totals.max()}"
        )
    stored = rows.num_rows()
    distinct = stored // settings.micro_batch_size
    if settings.loader == "trainer":
        by_row = find_packer(settings.packer).deals_rows
        return Schedule(table=trainer_table(rows, settings, by_row=by_row), distinct=distinct)
    mapping = None
    if settings.max_num_samples is not None:
        mapping = map_samples(stored, settings.max_num_samples, settings.seed)
    num_rows = stored if mapping is None else len(mapping)
    steps, warnings = samplers.num_steps(num_rows, settings)
    read = {
        "single": samplers.sequential_rows,
        "cyclic": samplers.cyclic_rows,
        "batch": samplers.batch_rows,
        None: samplers.drawn_rows,
    }[settings.loader](num_rows, steps, settings)
    if mapping is not None:
        read = mapping[read]
    if rows.rule == "bridge":
        table = collate_rows(rows, read, settings)
        together = settings.num_microbatches if settings.loader == "batch" else 1
        return Schedule(table=table, warnings=warnings, distinct=min(len(table), stored) // together)
    samples = fill_rows(rows, settings).take(read).merge_rows(settings)
    if rows.rule == "trl":
        samples = samples.pad(settings.pad_seq_to_mult)
    table = samples.table(settings, exact=settings.loader is not None)
    return Schedule(table=table, warnings=warnings, distinct=distinct)


_OF_PACKING = ("packer", "seq_length", "seed", "max_docs_per_pack", "pad_seq_to_mult", "tail_policy",
               "packing_processes", "packing_batch", "shuffle_seed")  # fmt: skip
"""Settings that decide the rows of a packer."""


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
    default_loader = find_format(dataset.format).loader
    name = definitions()["packer"].canonical(given.get("packer"))
    packer = find_packer(name) if name in PACKERS else None
    if kind == "documents" and packer is not None and packer.packs_in_training:
        default_loader = "single"
    if dataset.usual_packer is not None and (name is None or (packer is not None and packer.is_trl)):
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
    if dataset.other_draws or find_packer(settings.packer).is_drawn:
        schedule = replace(schedule, table=replace(schedule.table, exact=False))
    guessed = fullest is not None and given.get("seq_length") is None
    if planned_guess:
        guessed = dataset.pack_tokens != settings.seq_length
    if guessed:
        owner = find_format(dataset.format).size_owner
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
