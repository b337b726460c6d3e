"""Micro-batches as released megatron-core forms them, through its own datasets, samplers and flattening."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the referee needs megatron-core")
pytest.importorskip("megatron.core", reason="the referee needs megatron-core")


class Tokenizer:
    """As little as GPTDatasetConfig asks for."""

    vocab_size = 1000
    eod = 1
    pad = -5
    unique_identifiers: dict = {}  # noqa: RUF012


def write_indexed_dataset(prefix: Path, lengths: Sequence[int]) -> Path:
    """An IndexedDataset of `lengths` uint16 tokens a sequence, each sequence its own document."""
    sizes = np.asarray(lengths, dtype=np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64))) * 2
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1))
        file.write(sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    np.full(max(1, int(sizes.sum())), 7, dtype="<u2").tofile(prefix.with_name(prefix.name + ".bin"))
    return prefix


def train_dataset(
    prefixes: Sequence[Path],
    *,
    weights: Sequence[float] | None,
    seq_length: int,
    split: str,
    seed: int,
    train_samples: int | None,
    add_extra_token: bool,
    cache: Path,
):
    """The training dataset that megatron-core builds."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([str(p) for p in prefixes], list(weights) if weights else None),
        split=split,
        path_to_cache=str(cache),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=add_extra_token,
        inter_document_masking=True,
        mmap_bin_files=True,
    )
    sizes = [train_samples, 0 if train_samples is not None else None, 0 if train_samples is not None else None]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def samplers():
    """The module of megatron's samplers."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        from megatron.training.datasets import data_samplers
    finally:
        sys.argv = argv
    return data_samplers


def microbatches(
    dataset,
    *,
    loader: str,
    micro_batch_size: int,
    data_parallel_size: int,
    num_microbatches: int,
    num_steps: int,
    data_sharding: bool = True,
) -> dict[tuple[int, int, int], tuple[int, int, int, int]]:
    """(step, rank, micro-batch) -> (n_seqs, max_seqlen, n_tokens, squared) from the real samplers and flattening."""
    from megatron.core.utils import flatten_batch_for_packed_sequences

    module = samplers()
    common = {
        "total_samples": len(dataset),
        "consumed_samples": 0,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
    }
    seen = {}
    for rank in range(data_parallel_size):
        if loader == "single":
            sampler = module.MegatronPretrainingSampler(data_parallel_rank=rank, **common)
        else:
            sampler = module.MegatronPretrainingRandomSampler(
                dataset, data_parallel_rank=rank, data_sharding=data_sharding, **common
            )
        batches = (batch for _ in iter(int, 1) for batch in sampler)  # cyclic_iter of megatron.training
        for position in range(num_steps * num_microbatches):
            rows = [dataset[index] for index in next(batches)]
            merged = flatten_batch_for_packed_sequences(torch.utils.data.default_collate(rows))
            boundaries = merged["cu_seqlens"]
            key = (position // num_microbatches, rank, position % num_microbatches)
            squared = int(boundaries.long().diff().square().sum())
            seen[key] = (boundaries.numel() - 1, int(merged["max_seqlen"]), merged["tokens"].numel(), squared)
    return seen


def schedule_table(num_microbatches: int, chunks: int, group: int):
    """megatron-core's own table of (micro-batch, chunk) in forward order."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    return get_schedule_table(num_microbatches, chunks, group)


def num_warmup(*, pp: int, rank: int, vp: int | None, num_microbatches: int, chunks: int, group: int) -> int:
    """megatron-core's own number of warm-up forwards of a pipeline rank."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank), virtual_pipeline_model_parallel_size=vp
    )
    return get_pp_rank_microbatches(num_microbatches, chunks, group, p2p_communicator=communicator)[2]
