"""Cases of small models in a loop of their own on megatron-core, each in a process of its own, on one or more GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

from support.gpu_process import of_ranks
from support.gpu_training import LIMIT_S
from support.paths import ROOT

APEX_STAND_IN = ROOT / "benchmarks" / "apex_stand_in"
"""What Megatron's fused accumulation of gradients imports."""


def run_case(script: str, case: str, *, gpus: int = 1, apex: bool = False, **environment: str) -> str:
    """What a case of a file in tests/gpu prints, on all ranks; kernels are deterministic.

    Args:
        script: name of the file.
        case: name of the case.
        gpus: number of ranks, each on a GPU, or all on one if there are fewer; with one, torchrun is left out.
        apex: whether the stand-in for apex can be imported.
        environment: environment variables besides the usual ones.
    """
    folders = (ROOT, ROOT / "tests", *([APEX_STAND_IN] if apex else []))
    usual = {
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",
    }
    command = [sys.executable, "-W", "ignore", *(of_ranks(gpus) if gpus > 1 else [])]
    command += [str(ROOT / "tests" / "gpu" / script), case]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **usual, **environment}, timeout=LIMIT_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
