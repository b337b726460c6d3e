"""Activations on the host on a GPU: every scenario of gpu_cases_offload.py, and Megatron beside its eager twin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from test_megatron_gpu import ROOT, plans, train  # noqa: E402, F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", ["graph_memory", "eager_memory", "orders", "soak"])
def test_on_a_gpu(name):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/gpu_cases_offload.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize(
    ("impl", "model", "choice"),
    [
        ("chunk", "dense", ("--offload", "all", "--dropout", "0.1")),
        ("chunk", "dense", ("--offload", "core_attn,mlp_fc1,mlp_act", "--offload-fraction", "0.5")),
        ("chunk", "moe", ("--offload", "all")),
        ("transformer_engine", "dense", ("--offload", "all")),
    ],
)
def test_a_run_equals_its_eager_twin(plans, tmp_path, impl, model, choice):  # noqa: F811
    common = ("--model", model, "--layers", "6", "--hidden", "1024", "--heads", "16")
    dropout = choice[choice.index("--dropout") :] if "--dropout" in choice else ()
    eager = train(plans[2], tmp_path / "eager.jsonl", "--padded-eager", *common, *dropout)
    kept = train(plans[2], tmp_path / "kept.jsonl", "--impl", impl, *common, *dropout)
    ours = train(plans[2], tmp_path / "ours.jsonl", "--impl", impl, *common, *choice)
    less = kept["pool_bytes"] - ours["pool_bytes"]
    print({k: [r[k] / 2**20 for r in (kept, ours)] for k in ("pool_bytes", "peak_bytes", "host_bytes", "freed_bytes")})
    assert ours["captures"] > 0
    assert ours["fallbacks"] == ours["predicted"]
    assert sum(ours["fallbacks"]) > 0
    assert len(ours["losses"]) == 12
    assert ours["losses"] == eager["losses"]
    assert ours["grad_norms"] == eager["grad_norms"]
    assert ours["host_bytes"] > 0
    assert abs(less - ours["freed_bytes"]) <= max(0.1 * ours["freed_bytes"], 24 * 2**20)  # pools grow in steps
    assert less > ours["freed_bytes"] / 2
