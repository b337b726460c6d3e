"""Packing and micro-batches as released Megatron-Bridge forms them, through its own packers, samplers and collate_fn.

Bridge's packages import the whole training stack in their `__init__`; here they are bare modules that only lead to
their files, so that the few modules with the rules import alone. What those cannot find raises, on purpose.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the referee needs torch")
_PACKAGES = (
    "bridge",
    "bridge.data",
    "bridge.data.datasets",
    "bridge.data.packing",
    "bridge.training",
    "bridge.training.tokenizers",
    "bridge.training.utils",
    "bridge.utils",
)


def _lead_to_files() -> None:
    """Put bare packages of Bridge into sys.modules, unless they are there."""
    import megatron

    root = next((Path(p) for p in megatron.__path__ if (Path(p) / "bridge").is_dir()), None)
    if root is None:
        pytest.skip("the referee needs megatron-bridge", allow_module_level=True)
    for name in _PACKAGES:
        full = f"megatron.{name}"
        if full in sys.modules:
            continue
        package = ModuleType(full)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        package.__spec__ = importlib.util.spec_from_loader(full, loader=None, is_package=True)
        sys.modules[full] = package
        parent, _, child = full.rpartition(".")
        setattr(sys.modules[parent], child, package)


pytest.importorskip("megatron", reason="the referee needs megatron-bridge")
_lead_to_files()

from megatron.bridge.data import samplers  # noqa: E402
from megatron.bridge.data.packing import algorithms, parquet  # noqa: E402

TOKENIZER = SimpleNamespace(eos_id=0, eod=0, pad=0)


def pack(lengths: list[int], *, packer: str, pack_size: int, seed: int) -> list[list[int]]:
    """Rows of document lengths in Bridge's order; documents longer than the pack are dropped as create_hist does."""
    items = [{"input_ids": range(length + 1)} for length in lengths]
    _, histogram = algorithms.create_hist(items, pack_size)
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        return algorithms.create_packing_strategy(histogram, pack_size, packer)[0]
    finally:
        np.random.set_state(state)


def write_packed_parquet(path: Path, rows: list[list[int]], *, row_group_size: int = 500) -> Path:
    """Rows of document lengths as training sees them (one less than stored), written by Bridge's own writer."""
    content = []
    for documents in rows:
        stored = np.array(documents) + 1
        starts = np.cumsum(stored) - stored
        tokens = int(stored.sum())
        content.append({"input_ids": [7] * tokens, "loss_mask": [1] * tokens, "seq_start_id": starts.tolist()})
    parquet.write_packed_parquet(content, path, row_group_size=row_group_size)
    return path


def _batches(dataset, *, loader, global_batch_size, rank, ranks, seed, drop_last, data_sharding) -> Iterator[list[int]]:
    """Row indices that one rank collates together, from Bridge's samplers."""
    common = {
        "total_samples": len(dataset),
        "consumed_samples": 0,
        "micro_batch_size": 1,
        "data_parallel_rank": rank,
        "data_parallel_size": ranks,
    }
    match loader:
        case "single":
            # With drop_last off a rank may get no row of the last chunk, on which collate_fn stops.
            yield from samplers.MegatronPretrainingSampler(drop_last=True, **common)
            return
        case "cyclic":
            sampler = samplers.MegatronPretrainingRandomSampler(dataset, data_sharding=data_sharding, **common)
        case "batch":
            sampler = samplers.MegatronPretrainingBatchSampler(
                global_batch_size=global_batch_size,
                drop_last=drop_last,
                pad_samples_to_global_batch_size=not drop_last,
                seed=seed,
                **common,
            )
    while True:  # Bridge's cyclic_iter: the sampler knows its epoch
        yield from sampler


def bridge_microbatches(
    parquet_path: Path,
    *,
    pack_size: int,
    loader: str,
    global_batch_size: int,
    data_parallel_size: int,
    seed: int,
    drop_last: bool,
    pad_to_max_length: bool,
    pad_seq_to_mult: int,
    max_num_samples: int | None,
    num_steps: int,
    data_sharding: bool = True,
) -> list[tuple[int, int, int, int, int, int, int]]:
    """(step, dp_rank, microbatch, n_seqs, max_seqlen, n_tokens, squared), sorted, of the micro-batches of `num_steps`.

    The `batch` loader collates a rank's share of a global batch together and training then splits it into rows;
    `single` and `cyclic` collate one row. The `single` loader ends with the data.
    """
    dataset = parquet.GPTSFTPackedParquetDataset(
        str(parquet_path),
        TOKENIZER,
        pad_seq_to_mult=pad_seq_to_mult,
        max_seq_length=pack_size,
        max_num_samples=max_num_samples,
        seed=seed,
        pad_to_max_length=pad_to_max_length,
        prompt_template="{input} {output}",  # asked for, though packed rows do not use it
        label_key="output",
        truncation_field="input",
    )
    per_rank = global_batch_size // data_parallel_size
    seen = []
    for rank in range(data_parallel_size):
        batches = _batches(
            dataset,
            loader=loader,
            global_batch_size=global_batch_size,
            rank=rank,
            ranks=data_parallel_size,
            seed=seed,
            drop_last=drop_last,
            data_sharding=data_sharding,
        )
        position = 0
        while position < num_steps * per_rank and (indices := next(batches, None)) is not None:
            collated = dataset.collate_fn([dataset[index] for index in indices])
            name = "cu_seqlens_q_padded" if pad_seq_to_mult > 1 else "cu_seqlens_q"
            for boundaries, longest, tokens in zip(
                collated[name], collated["max_seqlen_q"], collated["tokens"], strict=True
            ):
                step, microbatch = divmod(position, per_rank)
                squared = int(boundaries.long().diff().square().sum())
                seen.append((step, rank, microbatch, len(boundaries) - 1, int(longest), len(tokens), squared))
                position += 1
    dataset.close()
    whole = min(sum(1 for row in seen if row[1] == rank) // per_rank for rank in range(data_parallel_size))
    return sorted(row for row in seen if row[0] < whole)
