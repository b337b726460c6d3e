"""FP8 in graphs of layers and of chunks, with parameters in FP8, recomputed activations, and quantization by module.

Beside eager training by the same micro-batches, bit for bit, step by step: losses, gradients, weights and their scales.
"""

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
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SCRIPT = str(ROOT / "tests" / "gpu" / "quantized_cases.py")
CASES = (
    "layers",
    "dropless, overlapped",
    "layers, blockwise, overlapped",
    "dropless, preprocessed",
    "dropless, first layer in bf16",
    "dropless, blockwise",
    "chunk, blockwise",
    "chunk, blockwise, parameters",
    "chunk, delayed",
    "layers, delayed",
    "dropless, delayed",
    "two layers a graph, overlapped",
    "full recompute",
    "full recompute, delayed",
    "full recompute, weights in bf16",
    "dropless, recompute",
    "dropless, recompute, parameters",
    "nothing kept",
    "layers, nothing kept",
    "layers, nothing kept, parameters",
    "dropless, fused operations",
    "by module",
    "layers, by module",
    "dropless, by module",
)
"""Cases of quantized_cases.py."""


def run(case, *launcher):
    folders = (ROOT, ROOT / "tests", ROOT / "benchmarks" / "apex_stand_in")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",
    }
    command = [sys.executable, "-W", "ignore", *launcher, SCRIPT, case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_training_in_fp8_leaves_behind_what_eager_training_does(case):
    assert f": {case}: equal: " in run(case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    "case", ["dropless, overlapped", "layers, blockwise, overlapped", "two layers a graph, overlapped"]
)
def test_parameters_in_fp8_are_gathered_from_two_ranks_while_graphs_replay(case):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    assert run(case, *launcher).count(f": {case}: equal: ") == 2
