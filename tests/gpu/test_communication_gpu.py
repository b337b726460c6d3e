"""Communication inside graphs on two GPUs: replayed beside padded eager, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.gpu_process import free_port
from support.gpu_training import LIMIT_S
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
CASES = {
    "user_buffers": "1",
    "all_to_all": "1",
    "all_to_all_unfused_rope": "1",
    "all_to_all_gpt_oss": "1",
    "all_gather": "1",
    "last_stage_without_layers": "1",
    "deferred_output_gradients": "1",
    "experts": "8",
    "experts_overlapped": "8",
    "experts_overlapped_delayed": "8",
}
"""Cases of communication_cases.py, each with CUDA_DEVICE_MAX_CONNECTIONS as Megatron wants it."""


@pytest.mark.parametrize("case", CASES)
def test_communication_inside_graphs_equals_eager(case):
    folders = (ROOT, ROOT / "tests", ROOT / "benchmarks" / "apex_stand_in")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": CASES[case],
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",
        "UB_SKIPMC": "1",  # user buffers without multicast of NVLink
    }
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(ROOT / "tests" / "gpu" / "communication_cases.py"), case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count(f": {case}: equal: ") == 2
