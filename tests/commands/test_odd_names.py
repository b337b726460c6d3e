"""Files whose names are not UTF-8: all formats are read there, and nothing that is written or printed fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from support.sample_files import write_bridge, write_bridge_npy, write_index, write_lines, write_trl

ROWS = [[3, 5], [8], [1, 6, 1], [7, 1], [8], [2, 2, 2, 2], [8], [1, 7]]
WRITERS = {
    "a.idx": lambda path: write_index(path, [n for row in ROWS for n in row]),
    "a.parquet": lambda path: write_bridge(path, ROWS),
    "a.npy": lambda path: write_bridge_npy(path, ROWS),
    "trl.parquet": lambda path: write_trl(path, ROWS),
    "stream.arrow": lambda path: write_trl(path, ROWS, kind="stream"),
    "file.arrow": lambda path: write_trl(path, ROWS, kind="file"),
    "a.jsonl": lambda path: write_lines(path, ROWS),
}


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / os.fsdecode(b"d\xff\xfe")
    try:
        path.mkdir()
    except OSError:
        pytest.skip("the file system takes UTF-8 alone")
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_read_and_checked(thdprof, tmp_path, odd, name):
    plain = WRITERS[name](tmp_path / name)
    data = Path(plain).rename(odd / name)
    command = ("analyze", data, "--seq-length", 8, "--loader", "single", "-o", tmp_path / "plan.yaml", "--json")
    done = thdprof(*command, *(("--split", "1") if name == "a.idx" else ()))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dataset"]["uris"] == [str(data)]
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["dataset"]["uris"] == [str(data)]
    done = thdprof("check", tmp_path / "plan.yaml")
    assert done.returncode == 0, done.stderr
    assert "\\udcff\\udcfe" in done.stdout


def test_files_that_are_no_arrow_are_told_by_name(thdprof, odd):
    for name, head in (("a.parquet", b"PAR1" + bytes(9)), ("a.arrow", b"ARROW1")):
        (odd / name).write_bytes(head)
        done = thdprof("analyze", odd / name, "--format", "trl")
        assert done.returncode == 1
        assert f"d\\udcff\\udcfe/{name}: " in done.stderr
        assert "internal error" not in done.stderr


def test_overrides_leave_out_a_path_that_is_no_text(thdprof, odd):
    data = write_bridge(odd.parent / "a.parquet", ROWS).rename(odd / "a.parquet")
    assert (
        thdprof("analyze", data, "--loader", "single", "--pad-to-max-length", "-o", odd / "plan.yaml").returncode == 0
    )
    done = thdprof("export", odd / "plan.yaml", "--to", "megatron-bridge", "-o", odd / "out")
    assert done.returncode == 0, done.stderr
    for file in (odd / "out").iterdir():
        assert "a.parquet" not in file.read_text(encoding="utf-8")
    assert any("also set dataset.offline_packing_specs" in f.read_text() for f in (odd / "out").iterdir())


def test_everything_that_is_written_there(thdprof, odd):
    data = write_lines(odd / "a.jsonl", ROWS)
    done = thdprof(
        "analyze", data, "--seq-length", 8, "--loader", "single", "-o", odd / "plan.yaml", "--microbatches",
        odd / "table.parquet",
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("internal")) == (0, 0)
    assert (odd / "table.parquet").read_bytes()[:4] == b"PAR1"
    for command in (
        ("check", odd / "plan.yaml", "--json"), ("compare", odd / "plan.yaml", odd / "plan.yaml", "--json"),
        ("export", odd / "plan.yaml", "--to", "json"), ("export", odd / "plan.yaml", "--to", "megatron-lm"),
        ("export", odd / "plan.yaml", "--to", "megatron-bridge", "-o", odd / "bridge"), ("demo", odd / "demo"),
        ("analyze", odd / "demo/bridge", "--loader", "single"), ("analyze", odd / "demo/trl", "-o", "-"),
        ("sweep", data, "--loader", "single", "seq-length=8,16", "-o", odd / "plans", "--json"),
    ):  # fmt: skip
        done = thdprof(*command)
        assert done.returncode == 0, (command, done.stderr)
