"""The stamp of a cost table: kept in plans, compared with what runs."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
import yaml
from support.command import run_in_process

from thdprof.plan import load_plan
from thdprof.training.stamp import Stamp, compare_stamp, compare_with_installed

STAMP = Stamp(
    torch="2.11.0+cu130",
    transformer_engine="2.20.2",
    cudnn="9.19.0",
    megatron_core="0.19.2",
    gpu="NVIDIA H200",
    processor="Intel Xeon Platinum 8481C",
)
SAME = STAMP.model_dump()


def test_the_same_surroundings_are_no_reason_to_warn():
    assert compare_stamp(STAMP, SAME) is None
    assert compare_stamp(STAMP, {**SAME, "torch": "2.11.0"}) is None
    assert compare_stamp(STAMP, {}) is None


def test_every_difference_is_named_with_both_values():
    here = {**SAME, "transformer_engine": "2.17.1", "gpu": "NVIDIA H100 80GB HBM3", "cudnn": None}
    told = compare_stamp(STAMP, here)
    assert "Transformer Engine 2.17.1, measured with 2.20.2" in told
    assert "GPU NVIDIA H100 80GB HBM3, measured with NVIDIA H200" in told
    assert "cuDNN not installed, measured with 9.19.0" in told
    assert "torch" not in told
    assert "thdprof calibrate" in told


def test_analyze_compares_what_is_installed_and_the_gpu_that_is_named(monkeypatch):
    installed = {"transformer-engine": "2.14.1"}

    def version_of(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    told = compare_with_installed(STAMP)
    assert ": Transformer Engine 2.14.1, measured with 2.20.2. They" in told
    installed.clear()
    assert compare_with_installed(STAMP) is None
    assert compare_with_installed(STAMP, gpu="h200") is None
    assert "GPU h100" in compare_with_installed(STAMP, gpu="h100")
    assert compare_with_installed(None, gpu="h100") is None


TABLE = {
    "schema": "thdprof.costs/1",
    "name": "a model",
    "calibrated": True,
    "hardware": "NVIDIA H200",
    "attention": "Transformer Engine 2.20.2",
    "n_tokens": 4096,
    "eager": [{"n_seqs": 12, "ms": 126.0}],
    "replay": [{"max_seqs": 16, "ms": 37.0}],
    "outside_ms": 9.0,
    "optimizer_ms": 12.0,
    "ms_per_squared_token": 1e-6,
    "squared_tokens": 3e6,
}


@pytest.fixture
def analyzed(tmp_path):
    """Runs analyze with a table of the given stamp; returns the command's result and the plan."""

    def run(stamp: dict | None):
        costs, plan, data = tmp_path / "costs.yaml", tmp_path / "plan.yaml", tmp_path / "demo"
        costs.write_text(yaml.safe_dump({**TABLE, **({} if stamp is None else {"stamp": stamp})}))
        run_in_process("demo", data)
        ran = run_in_process(
            *("analyze", data / "megatron" / "documents", "--seq-length", 4096, "--global-batch-size", 8),
            *("--train-iters", 4, "--cost-table", costs, "-o", plan, "--force"),
        )
        assert ran.returncode == 0, ran.stderr
        return ran, plan

    return run


def test_a_plan_carries_the_stamp_of_its_table_and_analyze_warns_of_another_version(analyzed):
    ran, path = analyzed({**SAME, "megatron_core": "0.1.0", "torch": importlib.metadata.version("numpy")})
    stamp = load_plan(path).costs.stamp
    assert stamp.transformer_engine == "2.20.2"
    assert stamp.megatron_core == "0.1.0"
    warned = [line for line in ran.stderr.splitlines() if "measured elsewhere" in line]
    assert len(warned) == (1 if compare_with_installed(stamp) else 0)


def test_a_plan_without_a_stamp_loads_and_warns_of_nothing(analyzed):
    ran, path = analyzed(None)
    values = yaml.safe_load(path.read_text())
    assert "stamp" not in values["costs"]
    path.write_text(yaml.safe_dump(values))
    assert load_plan(path).costs.stamp is None
    assert "measured elsewhere" not in ran.stderr


def test_install_warns_once_where_the_run_differs(analyzed, caplog):
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from thdprof.runtime.megatron.run_stamp import warn_of_other_surroundings

    _, path = analyzed(SAME)
    plan = load_plan(path)
    caplog.set_level(logging.ERROR, logger="torch")  # which warns where it is imported first
    with caplog.at_level(logging.WARNING):
        warn_of_other_surroundings(plan, SAME)
        assert not caplog.records
        warn_of_other_surroundings(plan, {**SAME, "transformer_engine": "2.18.0"})
    assert len(caplog.records) == 1
    assert "Transformer Engine 2.18.0, measured with 2.20.2" in caplog.text


def test_the_processor_is_read_from_the_system(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from thdprof.runtime.megatron.run_stamp import processor

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8481C\nflags\t: fpu\n")
    assert processor(cpuinfo) == "Intel(R) Xeon(R) 8481C"
    assert processor(tmp_path / "absent")
