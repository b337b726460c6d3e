"""The micro-batch table equals what released Megatron-Bridge forms, over random packed files and settings."""

from __future__ import annotations

import numpy as np
import pytest

from thdprof.analyze.replay import build_schedule
from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.analyze.sources import read_dataset

bridge = pytest.importorskip("support.bridge_referee")
pytestmark = pytest.mark.referee


def write_rows(rng: np.random.Generator, path, pack_size: int) -> int:
    """A packed parquet file of random rows, as Bridge types its columns; the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = int(rng.integers(8, 60))
    tokens, starts = [], []
    for _ in range(rows):
        documents = int(rng.integers(1, 9))
        lengths = rng.integers(1, max(2, pack_size // 9), documents)  # trained tokens; stored is one more
        if rng.random() < 0.4:
            lengths[-1] += max(0, pack_size - int(lengths.sum()))  # a full row
        ends = np.cumsum(lengths + 1)
        tokens.append(rng.integers(1, 50, int(ends[-1])).tolist())
        starts.append([0, *ends[:-1].tolist()])
    masks = [[1] * len(t) for t in tokens]
    table = pa.table(
        {"input_ids": tokens, "loss_mask": pa.array(masks, type=pa.list_(pa.int8())), "seq_start_id": starts}
    )
    pq.write_table(table, path, row_group_size=7)
    return rows


@pytest.mark.parametrize("loader", ["batch", "single", "cyclic"])
def test_tables_equal_megatron_bridge(rng, tmp_path, loader):
    compared = tails = 0
    for case in range(25):
        path = tmp_path / f"training_{case}.idx.parquet"
        pack_size = int(rng.integers(20, 200))
        rows = write_rows(rng, path, pack_size)
        ranks, microbatches = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        batch = ranks * microbatches
        if rows < batch:
            continue
        epochs = 1 if loader == "single" else int(rng.integers(1, 3))
        mapped = int(rng.integers(batch, 2 * rows)) if rng.random() < 0.3 else None
        available = mapped or rows
        given = {
            "seq_length": pack_size,
            "data_parallel_size": ranks,
            "global_batch_size": batch,
            "loader": loader,
            "seed": int(rng.integers(0, 10_000)),
            "drop_last": bool(rng.random() < 0.5) if loader == "batch" else True,
            "pad_to_max_length": bool(rng.random() < 0.5),
            "pad_seq_to_mult": int(rng.choice([1, 8])),
            "max_num_samples": mapped,
            "train_samples": max(batch, epochs * available - batch),
        }
        settings, *_ = resolve_settings(
            given, pack_tokens=None, dataset_format="bridge", default_loader="batch", num_datasets=1
        )
        table = build_schedule(read_dataset([str(path)]), settings).table
        real = bridge.bridge_microbatches(
            path,
            pack_size=pack_size,
            loader=loader,
            global_batch_size=batch,
            data_parallel_size=ranks,
            seed=given["seed"],
            drop_last=given["drop_last"],
            pad_to_max_length=given["pad_to_max_length"],
            pad_seq_to_mult=given["pad_seq_to_mult"],
            max_num_samples=mapped,
            num_steps=table.num_steps,
        )
        frame = table.to_pandas()
        frame["squared"] = table.squared
        ours = list(frame.itertuples(index=False, name=None))
        assert ours == real, given
        assert table.exact
        compared += len(real)
        tails += sum(row[5] < pack_size or given["pad_to_max_length"] for row in real)
    assert compared > 400
    assert tails > 50
