"""The rows that Hugging Face's Trainer reads in every step, and the micro-batches that it forms of them.

Rules: transformers 5.23, `trainer.py`; accelerate 1.15, `data_loader.py`
(SeedableRandomSampler, BatchSamplerShard); datasets 5.2, `Dataset.shuffle`; TRL 1.16, `sft_trainer.py`; ms-swift 4.6,
`dataloader/shard.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read.dataset import PackedRows
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.schedule.samplers import torch_randperm
from thdprof.schedule.schedule import Samples
from thdprof.training import TrainingSettings

NO_ROW = -1
"""Stands for a row that a micro-batch lacks: the last one of an epoch may hold fewer."""


def shuffle_dataset(size: int, seed: int) -> NDArray[np.int64]:
    """The order in which `datasets.Dataset.shuffle(seed=seed)` puts `size` examples, int64, shape [size]."""
    return np.random.default_rng(seed).permutation(size)


def epoch_rows(num_rows: int, epoch: int, settings: TrainingSettings, *, by_row: bool = False) -> NDArray[np.int64]:
    """The rows of one epoch, int64, shape [micro-batches of a rank, ranks, rows of a micro-batch].

    The permutation is seeded with the seed plus the epoch; with sequential sampling the rows keep their order. Every
    rank takes each so-many-th micro-batch. With `drop_last` a partial round of the ranks is left out. Otherwise rows
    from the epoch's beginning fill it up; on a single rank the last micro-batch then has fewer rows, and `NO_ROW` in
    the place of the others.

    With `by_row`, as ms-swift has it, rows are dealt to the ranks one by one. Without `drop_last` the last micro-batch
    of every rank may have fewer; rows beyond a multiple of the ranks are never read.
    """
    ranks, size = settings.data_parallel_size, settings.micro_batch_size
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


def trainer_table(rows: PackedRows, settings: TrainingSettings, *, by_row: bool = False) -> MicrobatchTable:
    """The micro-batches that the Trainer forms of `rows`, with what the collator and the tail policy add."""
    num_rows = rows.num_rows()
    read = epoch_rows(num_rows, 0, settings, by_row=by_row)
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
        read = read if epoch == 0 else epoch_rows(num_rows, epoch, settings, by_row=by_row)
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
