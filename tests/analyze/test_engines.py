"""Many files, read by several processes: one result, whoever reads them and in whatever order they are done."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import sample_files
from support.kept_shards import change_kept
from support.rank_processes import ForkedProgram

from thdprof.analyze.sources import read_dataset
from thdprof.errors import DataError, UsageError
from thdprof.read import engines
from thdprof.read.dataset import Shard


@pytest.fixture
def forked(monkeypatch):
    """Processes are forked; other tests start them as users do."""
    monkeypatch.setattr(engines, "subprocess", SimpleNamespace(Popen=ForkedProgram, PIPE=subprocess.PIPE))


@pytest.fixture
def several(monkeypatch, forked):
    """Several processes, from 20 files on."""
    monkeypatch.setattr(engines, "_MANY", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(7)
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(60):
        rows = [rng.integers(1, 60, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 9))]
        sample_files.write_bridge(directory / f"{number:03}.parquet", rows)
    return directory


def plan_of(thdprof, tmp_path, directory, *more):
    done = thdprof("analyze", directory, "--seq-length", 512, "-o", tmp_path / "plan.yaml", "--force", *more)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "plan.yaml").read_bytes()


def test_the_plan_is_the_same_whoever_reads(thdprof, tmp_path, shards, monkeypatch):
    alone = plan_of(thdprof, tmp_path, shards)
    assert not (shards / ".thdprof").exists()
    monkeypatch.setattr(engines, "_MANY", 20)
    for processes, size in ((1, 1), (2, 7), (3, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processes: set(range(n)), raising=False)
        monkeypatch.setattr(engines, "_BATCH", size)
        assert plan_of(thdprof, tmp_path, shards, "--cache", tmp_path / f"kept-{processes}") == alone
    kept = tmp_path / "kept-3" / "shards.sqlite"
    assert plan_of(thdprof, tmp_path, shards, "--cache", kept.parent) == alone
    change_kept(kept, lambda lengths: np.maximum(lengths - 1, 1))  # a cache that is used shows
    assert plan_of(thdprof, tmp_path, shards, "--cache", kept.parent) != alone


def test_changed_files_alone_are_read_again(tmp_path, shards, several, monkeypatch):
    read_dataset([str(shards)])
    before = change_kept(shards / ".thdprof" / "shards.sqlite", lambda lengths: lengths * 0 + 9)
    sample_files.write_bridge(shards / "000.parquet", [[7, 7]])
    again = read_dataset([str(shards)]).content.document_tokens
    assert again[:2].tolist() == [7, 7]
    assert set(again[2:].tolist()) == {9}
    assert len(before) > 100


def test_a_cache_that_is_no_database_is_made_anew(tmp_path, shards, several):
    expected = read_dataset([str(shards)])
    (shards / ".thdprof" / "shards.sqlite").write_bytes(b"no database" * 1000)
    assert read_dataset([str(shards)]).fingerprint == expected.fingerprint
    assert len(change_kept(shards / ".thdprof" / "shards.sqlite")) == expected.num_documents()
    assert (shards / ".thdprof" / "shards.broken").read_bytes() == b"no database" * 1000


def test_a_cache_that_is_damaged_inside_is_made_anew(tmp_path, shards, several):
    expected, file = read_dataset([str(shards)]), shards / ".thdprof" / "shards.sqlite"
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xa5" * 12288 + content[16384:])
    assert read_dataset([str(shards)]).fingerprint == expected.fingerprint
    assert len(change_kept(file)) == expected.num_documents()
    assert (shards / ".thdprof" / "shards.broken").exists()


def test_a_damaged_cache_that_cannot_be_renamed_is_noted(tmp_path, shards, monkeypatch):
    expected = read_dataset([str(shards)], cache=tmp_path / "kept")
    content = (tmp_path / "kept" / "shards.sqlite").read_bytes()
    (tmp_path / "kept" / "shards.sqlite").write_bytes(content[:4096] + b"\xa5" * 12288 + content[16384:])
    (tmp_path / "kept" / "shards.broken").mkdir()
    again = read_dataset([str(shards)], cache=tmp_path / "kept")
    assert again.fingerprint == expected.fingerprint
    assert "could not be kept in" in again.notes[-1]


def test_a_shard_without_arrays_is_none():
    with pytest.raises(ValueError, match="no array"):
        engines.unpack(engines.pack(Shard(())))


def test_a_cache_that_was_named_and_cannot_be_used_is_noted(tmp_path, shards):
    (tmp_path / "file").write_text("")
    (note,) = read_dataset([str(shards)], cache=tmp_path / "file").notes
    assert f"what was read could not be kept in {tmp_path / 'file'}" in note
    assert read_dataset([str(shards)]).notes == ()


def test_a_name_that_is_no_utf8_is_kept(shards, several):
    os.rename(shards / "000.parquet", os.fsencode(shards) + b"/\xff.parquet")
    documents = read_dataset([str(shards)]).num_documents()
    assert len(change_kept(shards / ".thdprof" / "shards.sqlite")) == documents


def test_of_kept_shards_those_of_the_dataset_are_unpacked(tmp_path, shards, several, monkeypatch):
    read_dataset([str(shards)], cache=tmp_path / "kept")
    unpacked, unpack = [], engines.unpack
    monkeypatch.setattr(engines, "unpack", lambda content: unpacked.append(content) or unpack(content))
    read_dataset([str(shards / "00*.parquet")], cache=tmp_path / "kept")
    assert len(unpacked) == 10


def test_a_locked_cache_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_LOCKED_S", 0.01)
    kept = engines.KeptShards(tmp_path, "key")
    kept.keep([("b", "1", Shard((np.arange(3),)))])
    with closing(sqlite3.connect(tmp_path / "shards.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        kept.keep([("a", "1", Shard((np.arange(3),)))])
    assert "locked" in str(kept.fault)
    kept.keep([("a", "1", Shard((np.arange(3),)))])
    assert engines.KeptShards(tmp_path, "key").load(["a", "b"]).keys() == {"b"}


def test_a_broken_file_is_named_and_nothing_is_written(thdprof, tmp_path, shards, several):
    (shards / "041.parquet").write_bytes((shards / "041.parquet").read_bytes()[:-30] + b"x" * 26 + b"PAR1")
    done = thdprof("analyze", shards / "*.parquet", "-o", tmp_path / "plan.yaml", "--format", "bridge")
    assert (done.returncode, done.stdout) == (1, "")
    assert "041.parquet" in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert not (tmp_path / "plan.yaml").exists()


# --- what engines do with batches -------------------------------------------------------------------------------------


def double(directory, items):
    """Twice each item; the first process that gets 13 kills itself, or each one that does."""
    for item, how in items:
        os.close(tempfile.mkstemp(prefix=f"{item}-", dir=directory)[0])
        if how == "always" or (how == "once" and len(list(Path(directory).glob(f"{item}-*"))) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise DataError(f"{item}: is broken")
        if how == "cannot":
            raise OSError(5, "cannot", str(item))
    return [2 * item for item, _ in items]


def results(directory, hows):
    items = [(number, hows.get(number)) for number in range(40)]
    work = partial(double, str(directory))
    parts = engines.run(work, items, size=4, engine="local", parallel=True)
    return [answer for _, answer in sorted(pair for part in parts for pair in part)]


@pytest.fixture
def importable(monkeypatch):
    """Workers import this module, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(sys.modules[__name__].double, "__module__", "test_engines")
    monkeypatch.setitem(sys.modules, "test_engines", sys.modules[__name__])


def test_a_worker_that_is_killed_is_replaced(tmp_path, importable):
    assert results(tmp_path, {13: "once", 30: "once"}) == [2 * n for n in range(40)]
    assert len(list(tmp_path.glob("13-*"))) == 2


def test_what_fails_twice_is_told_by_name(tmp_path, importable, forked):
    with pytest.raises(DataError, match=r"^13: failed twice while it was read: .*SIGKILL"):
        results(tmp_path, {13: "always"})
    with pytest.raises(OSError, match="cannot") as raised:
        results(tmp_path, {13: "cannot"})
    assert raised.value.filename == "13"
    with pytest.raises(DataError, match=r"^20: is broken$"):
        results(tmp_path, {20: "raises"})


@pytest.mark.parametrize("name", ["Ray", "local:2", "dask", ""])
def test_other_engines_are_refused(name, tmp_path):
    with pytest.raises(UsageError, match="give local, ray, or ray:ADDRESS"):
        read_dataset([str(tmp_path)], engine=name)


def test_ray_that_is_missing_is_told(thdprof, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = sample_files.write_lines(tmp_path / "lengths.jsonl", [5])
    done = thdprof("analyze", path, "--engine", "ray:auto")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install '.[ray]'" in " ".join(done.stderr.split())
    assert [*tmp_path.iterdir()] == [path]


def test_an_interrupted_scan_goes_on_where_it_was(shards, several, monkeypatch):
    monkeypatch.setattr(engines, "_BATCH", 4)

    def interrupt(stage, done, documents):
        if done > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_dataset([str(shards)], tick=interrupt)
    database = shards / ".thdprof" / "shards.sqlite"
    kept = len(change_kept(database, lambda lengths: lengths * 0 + 99))
    again = read_dataset([str(shards)])
    assert 0 < kept < again.num_documents()
    assert int((again.content.document_tokens == 99).sum()) == kept
    assert len(change_kept(database)) == again.num_documents()


def test_a_shard_survives_its_bytes():
    shard = Shard((np.arange(5, dtype=np.int32), np.array([0, 5])), {"faults": [[3, "é"]], "digest": None})
    again = engines.unpack(engines.pack(shard))
    assert [a.tolist() for a in again.arrays] == [a.tolist() for a in shard.arrays]
    assert again.facts == shard.facts
    assert again.arrays[0].dtype == np.int32
