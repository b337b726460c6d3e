"""The demo dataset: its distribution, its formats, its bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from thdprof.analyze import sources
from thdprof.analyze.sources import demo
from thdprof.analyze.sources.demo import PACK_TOKENS, DemoFiles, documents_per_row, write_demo
from thdprof.errors import DataError, UsageError


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> DemoFiles:
    return write_demo(tmp_path_factory.mktemp("demo"))


def nearest_rank(values, percent: float) -> int:
    return int(np.percentile(values, percent, method="inverted_cdf"))


def test_documents_per_row_meet_the_example_distribution_exactly():
    n = documents_per_row()
    assert [nearest_rank(n, p) for p in (50, 90, 96, 99, 100)] == [12, 43, 64, 106, 358]
    assert n.min() >= 1


def test_bridge_rows(files):
    table = pq.read_table(files.bridge)
    assert [str(f.type) for f in table.schema] == ["list<element: int64>", "list<element: int8>"] + [
        "list<element: int64>"
    ]
    assert table.column_names == ["input_ids", "loss_mask", "seq_start_id"]
    assert [pq.ParquetFile(files.bridge).metadata.row_group(i).num_rows for i in range(4)] == [500] * 4
    stored, trained, totals, longest = [], [], [], 0
    for row in table.to_pylist():
        tokens, starts = row["input_ids"], row["seq_start_id"]
        assert len(row["loss_mask"]) == len(tokens)
        assert starts[0] == 0
        lengths = np.diff([*starts, len(tokens)])
        assert lengths.min() >= 2
        assert all(tokens[end - 1] == 0 for end in [*starts[1:], len(tokens)])
        total = len(tokens) - len(starts)
        longest = max(longest, int(lengths.max()) - 1)
        stored.append(len(starts))
        totals.append(total)
        trained.append(len(starts) + (total < PACK_TOKENS))
    assert len(stored) == 2000
    for counts in (stored, trained):
        assert [nearest_rank(counts, p) for p in (50, 90, 99, 100)] == [12, 43, 106, 358]
    assert sorted(trained) == documents_per_row().tolist()
    short = [t for t in totals if t < PACK_TOKENS]
    assert 100 < len(short) < 400
    assert max(totals) == PACK_TOKENS
    assert all(t % 16 for t in short)
    (entry,) = json.loads(files.bridge_metadata.read_text())
    assert entry == {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": 358,
        "packing_factor": round(sum(stored) / 2000, 2),
        "packing_efficiency": round(sum(totals) / 2000 / PACK_TOKENS * 100, 2),
        "pack_size": PACK_TOKENS,
        "min_packed_seqlen": min(totals),
    }


def test_trl_rows(files):
    rows = pq.read_table(files.trl).to_pylist()
    assert len(rows) == 1000
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= PACK_TOKENS
        assert min(row["seq_lengths"]) >= 1


def test_lengths_are_json_lines(files):
    lengths = [json.loads(line)["length"] for line in files.lengths.read_text().splitlines()]
    assert len(lengths) == 20_000
    assert min(lengths) >= 8
    assert max(lengths) <= 4096
    assert np.mean(lengths) > 1.5 * np.median(lengths)  # heavy-tailed


def test_megatron_index_and_tokens_are_what_the_real_reader_reads(files):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")
    dataset = indexed.IndexedDataset(str(files.megatron.with_suffix("")), mmap=True)
    assert len(dataset) == 5000
    assert dataset.index.dtype == np.uint16
    assert files.megatron.with_suffix(".bin").stat().st_size == 2 * int(dataset.sequence_lengths.sum())
    for i in (0, 1, 2500, 4999):
        tokens = dataset[i]
        assert len(tokens) == dataset.sequence_lengths[i]
        assert tokens[-1] == 0
        assert tokens[:-1].min() >= 1
        assert tokens.max() < demo.VOCABULARY
    assert np.mean(dataset.sequence_lengths) > 1.5 * np.median(dataset.sequence_lengths)


@pytest.mark.parametrize("name", ["megatron", "bridge", "trl", "lengths"])
@pytest.mark.parametrize("whole_directory", [False, True])
def test_thdprof_recognises_and_reads_it(files, name, whole_directory):
    path = getattr(files, name)
    dataset = sources.read_dataset([str(path.parent if whole_directory else path)])
    assert dataset.format == name
    assert dataset.uris == (str(path),)
    rows = {"megatron": 5000, "bridge": 2000, "trl": 1000, "lengths": 20_000}
    assert dataset.num_rows() == rows[name]
    assert dataset.num_documents() >= dataset.num_rows()


def digests(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def test_same_bytes_every_time_and_small(files, tmp_path):
    write_demo(tmp_path / "again")
    first, second = digests(files.lengths.parents[1]), digests(tmp_path / "again")
    assert first == second
    assert len(first) == 6
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 30e6


def test_refuses_a_directory_with_content(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty; give --force to write into it, or another name"):
        write_demo(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    write_demo(tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(DataError, match="is a file"):
        write_demo(tmp_path / "notes.txt")
