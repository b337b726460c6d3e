"""The micro-batch table of packed rows equals what released Megatron-Bridge's samplers and collate_fn give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import bridge_referee as referee  # skips without megatron-bridge, fails where that does not import

from thdprof.analyze.replay import build_schedule
from thdprof.analyze.sources import read_dataset
from thdprof.training import TrainingSettings

pytestmark = pytest.mark.referee


def random_rows(rng: np.random.Generator, pack_size: int, multiple: int) -> list[list[int]]:
    """Rows of documents that are multiples of `multiple`; every fifth or so fills the pack."""
    rows = []
    for _ in range(int(rng.integers(15, 40))):
        row, free = [], int(rng.integers(1, pack_size // multiple + 1)) * multiple
        if rng.random() < 0.2:
            free = pack_size
        while free:
            row.append(int(rng.integers(1, max(1, free // multiple // 2) + 1)) * multiple)
            free -= row[-1]
        rows.append(row)
    return rows


@pytest.mark.parametrize("pad_seq_to_mult", [1, 4])
@pytest.mark.parametrize("loader", ["single", "cyclic", "batch"])
def test_table_equals_megatron_bridge(tmp_path, rng, loader, pad_seq_to_mult):
    compared = 0
    for trial, (drop_last, pad_to_max_length, mapped, sharded) in enumerate(
        itertools.product((True, False), (True, False), (True, False), (True, False))
    ):
        pack_size = int(rng.integers(3, 20)) * 4
        ranks, share = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        rows = random_rows(rng, pack_size, pad_seq_to_mult)
        path = referee.write_packed_parquet(tmp_path / f"{trial}.parquet", rows, row_group_size=7)
        steps = 3 * len(rows) // (ranks * share)
        common = {
            "loader": loader,
            "global_batch_size": ranks * share,
            "data_parallel_size": ranks,
            "seed": trial,
            "drop_last": drop_last,
            "data_sharding": sharded,
            "pad_to_max_length": pad_to_max_length,
            "pad_seq_to_mult": pad_seq_to_mult,
            "max_num_samples": int(rng.integers(15, 90)) if mapped else None,
        }
        expected = referee.bridge_microbatches(path, pack_size=pack_size, num_steps=steps, **common)
        settings = TrainingSettings(seq_length=pack_size, train_samples=steps * ranks * share, **common)
        table = build_schedule(read_dataset([str(path)]), settings).table
        assert table.exact
        columns = [*(c.to_pylist() for c in next(table.record_batches()).columns), table.squared.tolist()]
        assert list(zip(*columns, strict=True)) == expected
        compared += len(expected)
    assert compared > 300
