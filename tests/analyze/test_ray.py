"""Files that are read on a Ray cluster; skipped where Ray is not installed (`make test-ray`)."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import numpy as np
import pytest
from support import conversations, sample_files

from thdprof.analyze.sources import read_dataset
from thdprof.read import engines

pytest.importorskip("ray")


@pytest.fixture
def cluster():
    """A head and a node, both of this machine."""
    from ray.cluster_utils import Cluster

    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    running.more = running.add_node(num_cpus=1)
    yield running
    running.shutdown()


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(7)
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(200):
        sample_files.write_bridge(
            directory / f"{number:03}.parquet", [rng.integers(1, 60, 5).tolist() for _ in range(20)]
        )
    return directory


def test_a_cluster_reads_what_a_machine_reads(thdprof, tmp_path, shards, cluster):
    for engine in ("local", f"ray:{cluster.address}"):
        options = ("--seq-length", 512, "--cache", tmp_path / engine[:3], "--engine", engine)
        done = thdprof("analyze", shards, *options, "-o", tmp_path / f"{engine[:3]}.yaml")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "ray.yaml").read_bytes() == (tmp_path / "loc.yaml").read_bytes()


@pytest.mark.skipif(find_spec("transformers") is None, reason="text needs transformers")
def test_a_cluster_counts_text(thdprof, tmp_path, cluster, rng):
    tokenizer = conversations.write_tokenizer(tmp_path / "tiny")
    (tmp_path / "text").mkdir()
    for part in range(3):
        stored = [conversations.conversation(rng) for _ in range(20)]
        conversations.write_lines(tmp_path / "text" / f"{part}.jsonl", stored)
    found = []
    for engine in ("local", f"ray:{cluster.address}"):
        options = ("--tokenizer", tokenizer, "--packer", "bfd", "--engine", engine, "--cache", tmp_path / engine[:3])
        done = thdprof("analyze", tmp_path / "text", *options, "--json")
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]


def test_a_node_that_dies_in_the_middle_costs_nothing(shards, cluster, tmp_path, monkeypatch):
    expected = read_dataset([str(shards)])
    monkeypatch.setattr(engines, "_BATCH", 2)
    begun, shares = threading.Event(), []

    def tick(stage, done, documents):
        shares.append(done)
        begun.set()

    def kill():
        begun.wait(60)
        cluster.remove_node(cluster.more, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    found = read_dataset([str(shards)], engine=f"ray:{cluster.address}", cache=tmp_path / "kept", tick=tick)
    killer.join()
    assert shares[0] < 0.5
    assert found.fingerprint == expected.fingerprint
    assert found.content.document_tokens.tolist() == expected.content.document_tokens.tolist()


def test_no_cluster_is_told_in_a_line(thdprof, tmp_path):
    path = sample_files.write_lines(tmp_path / "lengths.jsonl", [5])
    done = thdprof("analyze", path, "--engine", "ray:127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("thdprof: --engine ray:127.0.0.1:1: no cluster answers there")
    assert len(done.stderr.splitlines()) <= 3
