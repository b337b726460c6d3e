"""Hybrid models with megatron-core's own Mamba layers on a GPU, through every kind of graph."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.gpu_training import train
from support.paths import ROOT

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is None, reason="needs mamba_ssm"),
]
DETERMINISTIC = {"MAMBA_DETERMINISTIC": "1", "CAUSAL_CONV1D_DETERMINISTIC": "1"}
"""Without atomic additions, and without tuning, which may choose other kernels in another process."""


@pytest.mark.parametrize(
    ("impl", "more"),
    [("chunk", ("--dropout", "0.1")), ("transformer_engine", ()), ("local", ())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_equals_its_eager_twin(plans, tmp_path, monkeypatch, impl, more):
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    common = ("--model", "hybrid", "--hybrid-pattern", "M-*-", "--layers", "4", *more)
    eager = train(plans[1], tmp_path / "eager.jsonl", "--padded-eager", *common)
    ours = train(plans[1], tmp_path / "ours.jsonl", "--impl", impl, *common)
    assert ours["captures"] > 0
    assert ours["fallbacks"] == ours["predicted"]
    assert sum(ours["fallbacks"]) > 0
    assert sum(ours["replays"].values()) > 20
    assert len(ours["losses"]) == 12
    print(ours["losses"], eager["losses"], ours["grad_norms"], eager["grad_norms"], sep="\n")
    assert ours["losses"] == eager["losses"]
    assert ours["grad_norms"] == eager["grad_norms"]


@pytest.mark.parametrize(
    ("name", "environment"),
    [("isolation_in_chunk_graphs", {}), ("isolation_in_layer_graphs", DETERMINISTIC)],  # the first tunes its kernels
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_documents_do_not_mix(name, environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/gpu/gpu_mamba_cases.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": path},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
