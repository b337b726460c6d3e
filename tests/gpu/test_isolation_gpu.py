"""verify_isolation on a GPU: every scenario of isolation_cases.py in a process of its own, and a Megatron decoder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    "kept_apart",
    "many_documents",
    "padding_between_documents",
    "dropout",
    "dropped_boundaries",
    "baked_boundaries",
    "megatron_decoder",
]


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    if name != "dropout":
        pytest.importorskip("transformer_engine.pytorch")
    if name == "megatron_decoder":
        pytest.importorskip("megatron.core")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "tests/gpu/isolation_cases.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
