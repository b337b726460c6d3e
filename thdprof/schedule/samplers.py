"""Which rows each data-parallel rank reads in each step: the batch samplers of Megatron and Megatron-Bridge.

Rules: megatron-core 0.19, `megatron/training/datasets/data_samplers.py`; Megatron-Bridge 0.6, `data/samplers.py`.
The functions named `..._rows` return row indices, int64, shape [steps, ranks, rows of one rank and step], in reading
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.schedule import compiled
from thdprof.training import Loader, TrainingSettings, suggest_setting

MoreRows = Literal["same", "other ranks", "other order", "refused"]
"""What more rows of a micro-batch, and as many fewer micro-batches, do to a step: it holds the same documents on the
same ranks, or on other ranks, or the documents are packed or read in another order, or training refuses it."""
MORE_ROWS: Mapping[Loader | None, MoreRows] = {
    "single": "other ranks",
    "cyclic": "other order",
    "batch": "same",
    "trainer": "other ranks",
    None: "same",
}
"""What more rows do, by the loader that reads rows which were packed before; None: the order that is drawn."""
_RANDOM64_FROM = (2**32 - 1) // 20
"""Number of elements from which torch draws 64 bits for each swap (ATen/native/TensorFactories.cpp, randperm_cpu)."""


def torch_randperm(size: int, seed: int) -> NDArray[np.int64]:
    """Return `torch.randperm(size, generator=torch.Generator().manual_seed(seed))`, int64, shape [size].

    torch seeds its Mersenne twister with the low 32 bits of `seed`, as NumPy's RandomState does.
    """
    permutation = np.arange(size, dtype=np.int64)
    if size < 2:
        return permutation
    state = np.random.RandomState(seed % 2**32)
    wide = size >= _RANDOM64_FROM
    draws = state.randint(0, 2**32, size=(size - 1) * (2 if wide else 1), dtype=np.uint32)
    if wide:
        high, low = draws[0::2].astype(np.uint64), draws[1::2]
        remainders = (high << np.uint64(32)) | low
    else:
        remainders = draws.astype(np.uint64)
    remainders %= np.arange(size, 1, -1, dtype=np.uint64)
    if size < 50_000:  # lists swap faster than arrays in plain Python
        return np.array(_swap_forward(permutation.tolist(), remainders.tolist()), dtype=np.int64)
    return np.asarray(compiled.run(_swap_forward, size, permutation, remainders.view(np.int64)))


def _swap_forward(permutation: Any, offsets: Any) -> Any:
    """Swap each element i of `permutation` with element i + offsets[i], in ascending order of i."""
    for i in range(len(offsets)):
        j = i + offsets[i]
        held = permutation[i]
        permutation[i] = permutation[j]
        permutation[j] = held
    return permutation


PADDING_ROW = -1
"""Index of a row that only fills up the last global batch of an epoch. As an index into the dataset it is the last row,
which Megatron-Bridge reads there with its loss masked."""


def _steps_of_one_epoch(num_rows: int, settings: TrainingSettings) -> int:
    """Number of steps that `num_rows` rows fill; a partial last step counts only where the sampler pads it."""
    size = settings.global_batch_size
    if settings.loader == "batch" and not settings.drop_last:
        return -(-num_rows // size)
    return num_rows // size


def num_steps(num_rows: int, settings: TrainingSettings) -> tuple[int, tuple[str, ...]]:
    """The number of steps to predict, and a warning if the data ends before the run does.

    Raises:
        DataError: the rows do not fill one step.
    """
    one_epoch = _steps_of_one_epoch(num_rows, settings)
    if one_epoch == 0:
        raise DataError(
            f"{num_rows} rows do not make one step of --global-batch-size {settings.global_batch_size}; "
            "give more data or a smaller batch"
        )
    if settings.train_samples is None:
        return one_epoch, ()
    steps = settings.train_samples // settings.global_batch_size
    if settings.loader == "single" and steps > one_epoch:
        warning = (
            f"the run asks for {steps} steps, but the data ends after {one_epoch}: the single loader does not start "
            "again, and training stops there"
        )
        return one_epoch, (warning,)
    return steps, ()


def sequential_rows(num_rows: int, steps: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """Sampler `single`: reads the file once, in order, one micro-batch for each rank in turn."""
    return deal_in_order(np.arange(steps * settings.global_batch_size), steps, settings)


def deal_in_order[T: np.generic](values: NDArray[T], steps: int, settings: TrainingSettings) -> NDArray[T]:
    """Deal `values` [rows] as the sampler `single` deals the rows: shape [steps, ranks, rows of one rank and step]."""
    shape = (steps, settings.num_microbatches, settings.data_parallel_size, settings.micro_batch_size)
    dealt = values[: steps * settings.global_batch_size].reshape(shape).transpose(0, 2, 1, 3)
    return dealt.reshape(steps, settings.data_parallel_size, -1)


def cyclic_rows(num_rows: int, steps: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """Sampler `cyclic`: reads a new torch permutation in every epoch, which is seeded with the epoch's number alone.

    Raises:
        DataError: a rank reads nothing of an epoch.
    """
    ranks, size = settings.data_parallel_size, settings.micro_batch_size
    chunk = ranks * size
    active = num_rows - num_rows % chunk
    bucket = num_rows // chunk * size
    permute = lru_cache(maxsize=2)(torch_randperm)
    needed = steps * settings.num_microbatches * size
    rows = np.empty((ranks, needed), dtype=np.int64)
    filled, consumed = [0] * ranks, [0] * ranks
    while min(filled) < needed:  # all ranks read an epoch before the next, so that they share its permutation
        for rank in range(ranks):
            epoch, offset = divmod(consumed[rank], active)
            if settings.data_sharding:
                epoch_rows = permute(bucket, epoch)[offset // ranks :] + rank * bucket
            else:
                epoch_rows = permute(num_rows // size * size, epoch)[offset:][rank::ranks]
            batches = len(epoch_rows) // size
            if batches == 0:
                raise DataError(
                    f"{num_rows} rows: Megatron's cyclic sampler gives rank {rank} nothing in epoch {epoch}; "
                    f"use {suggest_setting('data_sharding', 'true')}, or more data"
                )
            taken = min(batches * size, needed - filled[rank])
            rows[rank, filled[rank] : filled[rank] + taken] = epoch_rows[:taken]
            filled[rank] += taken
            consumed[rank] += batches * chunk
    return rows.reshape(ranks, steps, -1).transpose(1, 0, 2)


def batch_rows(num_rows: int, steps: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """Sampler `batch` of Megatron-Bridge: deals the global batches of a torch permutation to the ranks row by row.

    The permutation of an epoch is seeded with seed + epoch. Without `drop_last` PADDING_ROW fills up the last global
    batch of an epoch.
    """
    ranks, size = settings.data_parallel_size, settings.global_batch_size
    steps_an_epoch = _steps_of_one_epoch(num_rows, settings)
    epochs = []
    for epoch in range(-(-steps // steps_an_epoch)):
        order = np.full(steps_an_epoch * size, PADDING_ROW, dtype=np.int64)
        permutation = torch_randperm(num_rows, settings.seed + epoch)[: order.size]
        order[: permutation.size] = permutation
        epochs.append(order.reshape(steps_an_epoch, size // ranks, ranks).transpose(0, 2, 1))
    return np.concatenate(epochs)[:steps]


def drawn_rows(num_rows: int, steps: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """Reads one permutation for each epoch, drawn with `seed`: an example where the order in training is not known."""
    needed = steps * settings.global_batch_size
    random = np.random.default_rng(settings.seed)
    epochs = [random.permutation(num_rows) for _ in range(-(-needed // num_rows))]
    rows = np.concatenate(epochs)[:needed]
    return rows.reshape(steps, settings.data_parallel_size, -1)


def gather_documents(lengths: NDArray[np.int64], settings: TrainingSettings) -> NDArray[np.int64]:
    """Document lengths of every global batch, in the order in which the ranks gather them, shape [steps, batch size].

    A scheduler of Megatron collects a step's documents by data-parallel rank, then micro-batch, then place in the
    micro-batch; each rank reads its own with the sampler `single`.

    Args:
        lengths: tokens of every document in file order, int64, shape [documents]. They repeat over epochs.

    Raises:
        DataError: the documents do not fill one step.
    """
    size = settings.global_batch_size
    steps = (settings.train_samples or len(lengths)) // size
    if steps == 0 or len(lengths) == 0:
        raise DataError(
            f"{len(lengths)} documents do not make one step of --global-batch-size {size}; "
            "give more data or a smaller batch"
        )
    order = sequential_rows(len(lengths), steps, settings).reshape(steps, size)
    return lengths[order % len(lengths)]
