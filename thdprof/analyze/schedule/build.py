"""Replays how training forms micro-batches: turns the rows of a dataset into a micro-batch table."""

from __future__ import annotations

from typing import Any

from thdprof.analyze.schedule import packers
from thdprof.analyze.schedule.collate import with_tails
from thdprof.analyze.schedule.dp_balanced import dp_balanced
from thdprof.analyze.schedule.dynamic_cp import dynamic_cp
from thdprof.analyze.schedule.from_rows import schedule_rows
from thdprof.analyze.schedule.from_samples import schedule_conversations, schedule_streams
from thdprof.analyze.schedule.memo import FORGETFUL, Memo
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.schedule import Schedule, Tick
from thdprof.analyze.schedule.trainer import dataset_shuffle
from thdprof.analyze.sources.base import Conversations, Dataset, PackedRows, UnpackedDocuments
from thdprof.training import DYNAMIC_CP, TrainingSettings


def build_schedule(
    dataset: Dataset, settings: TrainingSettings, tick: Tick = lambda done: None, memo: Memo = FORGETFUL
) -> Schedule:
    """Predict the micro-batches of a training run.

    Args:
        dataset: the data.
        settings: the run.
        tick: called with the share of the work that is done, 0 to 1.
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
        case Conversations():
            return schedule_conversations(dataset.content, settings)
        case streams:
            return schedule_streams(streams, settings, tick, memo)


def _schedule_documents(documents: UnpackedDocuments, settings: TrainingSettings, memo: Memo) -> Schedule:
    """The schedule of documents that `settings.packer` packs, before training starts or step by step."""
    if settings.packer in DYNAMIC_CP:
        return _schedule_dynamic_cp(documents, settings)
    if settings.packer == "dp_balanced":
        rows, num_microbatches = dp_balanced(documents.document_tokens, settings=settings)
        n_seqs, max_seqlen, tokens, squared = with_tails(rows, settings)
        table = MicrobatchTable(
            n_seqs=n_seqs,
            max_seqlen=max_seqlen,
            n_tokens=tokens,
            squared=squared,
            data_parallel_size=settings.data_parallel_size,
            num_microbatches=num_microbatches,
            exact=settings.loader == "single",
        )
        used = float(rows.num_tokens().sum()) / (rows.num_rows() * settings.seq_length)
        one_epoch = len(table) * len(documents.document_tokens) // max(1, len(rows.document_tokens))
        independent = max(1, min(len(table), one_epoch))
        return Schedule(table=table, independent=independent, packing_efficiency=used)
    adds_tail = settings.packer.startswith("first_fit") or settings.tail_policy == "append_dummy_seq"
    options: dict[str, Any] = {
        "packer": settings.packer,
        "pack_tokens": settings.seq_length,
        "seed": settings.seed,
        "max_documents": settings.max_docs_per_pack,
        "pad_to_multiple": settings.pad_seq_to_mult,
        "tail_documents": int(adds_tail),
        "processes": settings.packing_processes,
    }
    lengths = documents.document_tokens
    if settings.shuffle_seed is not None:  # TRL shuffles before it packs, and the rows after
        lengths = lengths[dataset_shuffle(len(lengths), settings.shuffle_seed)]
    packing = memo.get(
        "packed", (*options.items(), settings.shuffle_seed), lambda: packers.pack_rows(lengths, **options)
    )
    schedule = schedule_rows(packing.rows, settings)
    return Schedule(
        table=schedule.table,
        notes=packing.notes,
        warnings=schedule.warnings,
        independent=schedule.independent,
        packing_efficiency=packing.efficiency,
        packing_efficiency_without_cap=packing.efficiency_without_cap,
    )


def _schedule_dynamic_cp(documents: UnpackedDocuments, settings: TrainingSettings) -> Schedule:
    """The schedule of documents under dynamic context parallelism."""
    table, used, notes, warnings = dynamic_cp(documents.document_tokens, settings=settings)
    one_epoch = len(table) * len(documents.document_tokens) // (table.num_steps * settings.global_batch_size)
    independent = max(1, min(len(table), one_epoch))
    return Schedule(
        table=table,
        notes=tuple(notes),
        warnings=tuple(warnings),
        independent=independent,
        packing_efficiency=used,
    )
