"""The host's rate: measured in a process of its own where there is a GPU, else a stated range."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from thdprof.analyze import analyze_dataset
from thdprof.analyze.times import modelled_costs
from thdprof.analyze.times.gpus import GPUS
from thdprof.analyze.times.modelled_costs import STATED, HostRate, measure_host
from thdprof.errors import DataError
from thdprof.training import Model

HOST = "schema: thdprof.host/1"


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        (["nvidia0"], None, True),
        (["nvidia0"], "0", True),
        (["nvidia0"], "", False),
        ([], None, False),
        ([], "0", False),
    ],
)
def test_a_gpu_is_one_that_this_process_may_use(monkeypatch, devices, visible, expected):
    monkeypatch.setattr(modelled_costs.Path, "glob", lambda self, pattern: iter([self / name for name in devices]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert modelled_costs.has_gpu() is expected


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU and torch, whose measurement is made by a function that is given."""
    monkeypatch.setattr(modelled_costs, "has_gpu", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    asked: list[list[str]] = []

    def measures(how: Any) -> list[list[str]]:
        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            assert options["timeout"] > 0
            asked.append(command)
            if isinstance(how, BaseException):
                raise how
            return subprocess.CompletedProcess(command, 0, stdout=how, stderr="")

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    measure_host.cache_clear()
    yield measures
    measure_host.cache_clear()


def test_a_host_is_measured_once_by_another_process_and_is_a_range_around_what_it_says(machine):
    asked = machine(json.dumps({"launch_us": 20.0, "gpu": "NVIDIA H200"}))
    found = measure_host()
    assert found is not None
    assert found.low_us < 20.0 * 5 < found.high_us  # a launch of Megatron's modules takes about five of torch's own
    assert STATED.low_us < found.low_us < found.high_us < STATED.high_us
    assert measure_host() is found
    assert asked == [[sys.executable, "-m", "thdprof.runtime.timing"]]


@pytest.mark.parametrize(
    "how",
    [
        subprocess.TimeoutExpired("python", 60),
        subprocess.CalledProcessError(1, "python"),
        OSError("no such file"),
        "",
        "torch warns\n",
        "[20.0]",
        '{"gpu": "NVIDIA H200"}',
        '{"launch_us": null}',
    ],
)
def test_a_host_that_cannot_be_measured_is_not_guessed(machine, how):
    machine(how)
    assert measure_host() is None


def test_nothing_is_run_without_a_gpu_or_without_torch(machine, monkeypatch):
    asked = machine(json.dumps({"launch_us": 20.0}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert measure_host() is None
    measure_host.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(modelled_costs, "has_gpu", lambda: False)
    assert measure_host() is None
    assert asked == []


def test_a_hosts_file_narrows_the_range(tmp_path):
    file = tmp_path / "host.yaml"
    file.write_text("schema: thdprof.host/1\nlaunch_us: 6.0\n")
    rate = modelled_costs.load_host(file)
    assert rate.high_us / rate.low_us == pytest.approx(1.69)
    assert rate.low_us == pytest.approx((6.0 * 4.7 * (75 * 150) ** 0.5) ** 0.5 / 1.3)
    model = Model(num_layers=28, hidden_size=1024, num_attention_heads=16, vocab_size=32000)
    lengths = [200, 600, 900] * 100
    run = {"model": model, "gpu": "h100", "seq_length": 4096, "packer": "first_fit_decreasing"}
    wide, narrow = (analyze_dataset(lengths, **run, host=host).times for host in (None, file))
    assert narrow.eager_step_ms[1] / narrow.eager_step_ms[0] <= 1.7 < wide.eager_step_ms[1] / wide.eager_step_ms[0] <= 2
    assert "the host of host.yaml, measured" in narrow.basis


@pytest.mark.parametrize(
    "text", ["launch_us: 6", "schema: thdprof.host/1", "schema: thdprof.host/1\nlaunch_us: -1", "[]"]
)
def test_what_is_no_hosts_file_is_refused(tmp_path, text):
    (tmp_path / "host.yaml").write_text(text)
    with pytest.raises(DataError, match="not a file of thdprof calibrate --host"):
        modelled_costs.load_host(tmp_path / "host.yaml")
    with pytest.raises(DataError, match="not a file of thdprof calibrate --host"):  # without a model, too
        analyze_dataset([3, 4], host=tmp_path / "host.yaml")


@pytest.mark.parametrize(("here", "taken"), [("h100", "measured"), ("h200", "stated"), (None, "stated")])
def test_a_measured_host_counts_for_the_gpu_of_this_machine_alone(monkeypatch, here, taken):
    measured = HostRate(low_us=10.0, high_us=12.0, basis="this machine")
    monkeypatch.setattr(modelled_costs, "measure_host", lambda: measured)
    monkeypatch.setattr(modelled_costs, "local_gpu", lambda: None if here is None else GPUS[here])
    assert modelled_costs.host_of(GPUS["h100"]) is {"measured": measured, "stated": STATED}[taken]


def test_the_driver_tells_the_gpu_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(modelled_costs, "DRIVER", tmp_path)
    assert modelled_costs.local_gpu() is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ: 1\n")
    assert modelled_costs.local_gpu() is GPUS["a100"]
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA L40S\n")
    assert modelled_costs.local_gpu() is None


@pytest.mark.parametrize(("exits", "gpus", "found"), [(0, True, "h100"), (0, False, None), (9, True, None)])
def test_nvidia_smi_names_the_gpu_of_a_virtual_machine(tmp_path, monkeypatch, exits, gpus, found):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho NVIDIA H100 80GB HBM3\necho NVIDIA A100\nexit {exits}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(modelled_costs, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(modelled_costs, "has_gpu", lambda: gpus)
    modelled_costs.name_gpu.cache_clear()
    assert modelled_costs.local_gpu() is (found and GPUS[found])
    modelled_costs.name_gpu.cache_clear()
