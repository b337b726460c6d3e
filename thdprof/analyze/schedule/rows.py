"""The schedule of rows that were packed before training, as Megatron-Bridge, TRL and plain collators read them.

Rules of Hugging Face's Trainer: transformers 5.23, `trainer.py`; accelerate 1.15, `data_loader.py`
(SeedableRandomSampler, BatchSamplerShard); datasets 5.2, `Dataset.shuffle`; TRL 1.16, `sft_trainer.py`; ms-swift 4.6,
`dataloader/shard.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import samplers
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.samplers import torch_randperm
from thdprof.analyze.schedule.schedule import Samples, Schedule, fill_rows
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError
from thdprof.training import SWIFT_PACKERS, TrainingSettings

NO_ROW = -1
"""Stands for a row that a micro-batch lacks: the last one of an epoch may hold fewer."""


def shuffle_dataset(size: int, seed: int) -> NDArray[np.int64]:
    """The order in which `datasets.Dataset.shuffle(seed=seed)` puts `size` examples, int64, shape [size]."""
    return np.random.default_rng(seed).permutation(size)


def epoch_rows(num_rows: int, epoch: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """The rows of one epoch, int64, shape [micro-batches of a rank, ranks, rows of a micro-batch].

    The permutation is seeded with the seed plus the epoch; with sequential sampling the rows keep their order. Every
    rank takes each so-many-th micro-batch. With `drop_last` a partial round of the ranks is left out. Otherwise rows
    from the epoch's beginning fill it up; on a single rank the last micro-batch then has fewer rows, and `NO_ROW` in
    the place of the others.

    With ms-swift's packers rows are dealt to the ranks one by one. Without `drop_last` the last micro-batch of every
    rank may have fewer; rows beyond a multiple of the ranks are never read.
    """
    ranks, size = settings.data_parallel_size, settings.micro_batch_size
    by_row = settings.packer in SWIFT_PACKERS
    if by_row:
        num_rows -= num_rows % ranks
    if settings.sampling == "sequential":
        order = np.arange(num_rows, dtype=np.int64)
    else:
        order = torch_randperm(num_rows, settings.seed + epoch)
    together = ranks * size
    kept = num_rows // together * together if settings.drop_last else num_rows
    missing = -kept % together
    again = order[np.arange(missing) % num_rows] if ranks > 1 and not by_row else np.full(missing, NO_ROW)
    filled = np.append(order[:kept], again)
    return filled.reshape(-1, size, ranks).transpose(0, 2, 1) if by_row else filled.reshape(-1, ranks, size)


def trainer_table(rows: PackedRows, settings: TrainingSettings) -> MicrobatchTable:
    """The micro-batches that the Trainer forms of `rows`, with what the collator and the tail policy add."""
    num_rows = rows.num_rows()
    read = epoch_rows(num_rows, 0, settings)
    one_epoch = -(-len(read) // settings.num_microbatches)  # the last step may accumulate fewer micro-batches
    if one_epoch == 0:
        raise DataError(
            f"{num_rows} rows do not fill one micro-batch of every rank with drop_last; give more data, or a smaller "
            "--micro-batch-size"
        )
    if settings.train_samples is not None:
        steps = settings.train_samples // settings.global_batch_size
    else:
        steps = one_epoch * (settings.train_epochs or 1)
    stored = shuffle_dataset(num_rows, settings.shuffle_seed) if settings.shuffle_seed is not None else None
    parts: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for epoch in range(-(-steps // one_epoch)):
        read = read if epoch == 0 else epoch_rows(num_rows, epoch, settings)
        if stored is not None:
            read = np.append(stored, NO_ROW)[read]
        for start in range(0, len(read), settings.num_microbatches):
            if len(counts) == steps:
                break
            step = read[start : start + settings.num_microbatches]
            parts.append(step.transpose(1, 0, 2).reshape(-1, settings.micro_batch_size))
            counts.append(len(step))
    read = np.concatenate(parts)
    present = read != NO_ROW
    collated = Samples.from_rows(rows).apply(lambda values: np.where(present, values[read], 0)).join()
    padded = collated.pad(settings.pad_seq_to_mult)
    room = settings.micro_batch_size * settings.seq_length
    tail = np.maximum(room + (-room % settings.pad_seq_to_mult) - padded.n_tokens, 0)
    end = read[np.arange(len(read)), present.sum(axis=1) - 1]
    last = np.where(padded.n_tokens > collated.n_tokens, 1, rows.last()[end])
    return padded.fill(tail, settings.tail_policy, last).table(settings, np.array(counts, dtype=np.int32), exact=True)


_BRIDGE_ROUNDING = 16
"""Megatron-Bridge rounds the longest row up to a multiple of so many tokens (GPTSFTDataset.pad_seq_length_to_mult)."""


def schedule_rows(rows: PackedRows, settings: TrainingSettings) -> Schedule:
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
        return Schedule(table=trainer_table(rows, settings), distinct=distinct)
    mapping = _sample_mapping(stored, settings)
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
        table = _bridge_table(rows, read, settings)
        together = settings.num_microbatches if settings.loader == "batch" else 1
        return Schedule(table=table, warnings=warnings, distinct=min(len(table), stored) // together)
    samples = fill_rows(rows, settings).take(read).merge_rows(settings)
    if rows.rule == "trl":
        samples = samples.pad(settings.pad_seq_to_mult)
    table = samples.table(settings, exact=settings.loader is not None)
    return Schedule(table=table, warnings=warnings, distinct=distinct)


def _sample_mapping(num_rows: int, settings: TrainingSettings) -> NDArray[np.int64] | None:
    """The row that each sample reads under Megatron-Bridge's max_train_samples, int64, shape [samples]; else None."""
    wanted = settings.max_num_samples
    if wanted is None:
        return None
    random = np.random.RandomState(settings.seed)
    epochs = np.tile(np.arange(num_rows, dtype=np.int64), (-(-wanted // num_rows), 1))
    for epoch in epochs:
        random.shuffle(epoch)
    return epochs.reshape(-1)[:wanted]


def _bridge_table(rows: PackedRows, read: NDArray[np.int64], settings: TrainingSettings) -> MicrobatchTable:
    """Collate the rows with indices `read` [steps, ranks, rows] as Megatron-Bridge's collate_fn does.

    Every row makes one micro-batch. The sampler `batch` collates all rows that a rank reads in a step; otherwise each
    row is collated alone. Rows that are collated together get equal lengths, and `cu_seqlens` as long as those of the
    row with the most documents.
    """
    samples = Samples.from_rows(rows).take(read)
    totals = np.asarray(samples.n_tokens)
    together = settings.loader == "batch"
    if settings.pad_to_max_length:
        length = np.full_like(totals, settings.seq_length)
    else:
        collated = totals.max(axis=2, keepdims=True) if together else totals
        rounded = -(-collated // _BRIDGE_ROUNDING) * _BRIDGE_ROUNDING
        length = np.broadcast_to(np.minimum(rounded, settings.seq_length), totals.shape)
    samples = samples.fill(length - totals, "append_dummy_seq", rows.last()[read])
    if together:
        most = samples.n_seqs.max(axis=2, keepdims=True)
        samples = samples._replace(n_seqs=np.broadcast_to(most, samples.n_seqs.shape))
    return samples.table(settings, exact=settings.loader is not None)
