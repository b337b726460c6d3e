"""Rows that `thdprof pack` writes for Megatron-Bridge, beside those of its own packer and read by its own loader."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thdprof.analyze import analyze_dataset
from thdprof.analyze.settings.request import read_request
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.demo import write_demo
from thdprof.errors import DataError, UsageError
from thdprof.pack import write
from thdprof.pack.repack import repack

bridge = pytest.importorskip("support.bridge_referee")
pytestmark = pytest.mark.referee


def pack(path, output, **flags):
    request = read_request([str(path)], flags, settings=None, launch=None)
    result, dataset = repack(request, max_docs=None, window=None, target="bridge")
    write.write_packs(result, dataset, target="bridge", path=output)
    return result


def documents(rows) -> Counter:
    """Tokens and masks of every document, with the number of times that it is there."""
    found: Counter = Counter()
    for row in rows:
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        assert len(row["input_ids"]) == len(row["loss_mask"])
        for begin, end in pairwise(bounds):
            mask = [int(value) for value in row["loss_mask"][begin : end - 1]]  # the last has no label
            found[tuple(row["input_ids"][begin:end]), tuple(mask)] += 1
    return found


def released_metadata(result, monkeypatch) -> dict:
    """What the released packer says of packs of these lengths."""
    packs, seq_length = result.packs, result.packs.seq_length
    rows = [part.tolist() for part in np.split(packs.tokens, packs.offsets[1:-1])]
    monkeypatch.setattr(bridge.algorithms, "first_fit_decreasing", lambda lengths, size: rows)
    histogram = np.bincount(packs.tokens, minlength=seq_length + 1).tolist()
    return bridge.algorithms.create_packing_strategy(histogram, seq_length, "first_fit_decreasing")[1]


def test_packed_rows_are_packed_anew_and_read_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_TOKENS_A_GROUP", 300_000)
    demo = write_demo(tmp_path / "demo")
    output = tmp_path / "training_2048.idx.parquet"
    result = pack(demo.bridge, output, data_parallel_size=2, global_batch_size=4)
    old, new = pq.read_table(demo.bridge).to_pylist(), pq.read_table(output).to_pylist()
    assert documents(new) == documents(old)
    assert len(new) <= len(old)
    [metadata] = json.loads((tmp_path / "training_2048_metadata.jsonl").read_text())
    assert metadata == released_metadata(result, monkeypatch)
    given = {"data_parallel_size": 2, "global_batch_size": 4, "loader": "single"}
    table = analyze_dataset(output, **given).microbatches
    frame = table.to_pandas()
    frame["squared"] = table.squared
    real = bridge.bridge_microbatches(
        output, pack_size=2048, loader="single", global_batch_size=4, data_parallel_size=2, seed=1234, drop_last=True,
        pad_to_max_length=False, pad_seq_to_mult=1, max_num_samples=None, num_steps=table.num_steps,
    )  # fmt: skip
    assert list(frame.itertuples(index=False, name=None)) == real
    assert len(real) > 1000
    dataset = read_dataset([str(output)])
    np.testing.assert_array_equal(dataset.content.document_tokens, result.packs.tokens)
    assert dataset.pack_tokens == 2048


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_tokens_are_those_that_bridge_packs(masked, tmp_path):
    rng = np.random.default_rng(7)
    rows = [rng.integers(1, 90, int(n)).tolist() for n in np.minimum(rng.geometric(0.05, 400) + 1, 70)]
    rows[4], rows[9] = [5], [6]
    masks = [(rng.random(len(row)) < (0.6 if masked else 2)).astype(int).tolist() for row in rows]
    table = {"input_ids": rows}
    if masked:
        table["labels"] = [
            [t if on else -100 for t, on in zip(row, mask, strict=True)] for row, mask in zip(rows, masks, strict=True)
        ]
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    output = tmp_path / "packs.parquet"
    result = pack(tmp_path / "rows.parquet", output, seq_length=64)
    items = [{"input_ids": row, "loss_mask": mask} for row, mask in zip(rows, masks, strict=True) if len(row) > 1]
    sequences, histogram = bridge.algorithms.create_hist(items, 64)
    assignments, _ = bridge.algorithms.create_packing_strategy(histogram, 64, "first_fit_decreasing")
    theirs = bridge.algorithms.fill_packing_strategy(assignments, sequences, 64, 0)
    assert documents(pq.read_table(output).to_pylist()) == documents(theirs)
    assert sum(documents(theirs).values()) > 350
    num_long = sum(len(row) > 65 for row in rows)
    assert num_long > 0
    assert result.packs.documents.notes == (
        "2 documents without a token to train on left out",
        f"{num_long} documents longer than 64 tokens left out",
    )


def test_what_bridge_would_not_read_is_refused(tmp_path):
    demo = write_demo(tmp_path / "demo")
    with pytest.raises(UsageError, match=r"Megatron-Bridge reads names that end in \.parquet or \.pq"):
        pack(demo.bridge, tmp_path / "packs.bin")
    demo.megatron.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"documents\.bin: is missing, or has not the .* tokens of"):
        pack(demo.megatron, tmp_path / "packs.parquet", seq_length=512)
    with pytest.raises(UsageError, match="--pad-seq-to-mult 8: --to bridge pads no documents"):
        pack(demo.lengths, tmp_path / "packs.parquet", seq_length=4096, packer="ffd", pad_seq_to_mult=8)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
