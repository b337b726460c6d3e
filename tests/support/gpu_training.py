"""Training runs of the Megatron example on a GPU, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def train(plan: Path, log: Path, *options: str) -> dict:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",  # else processes may choose other kernels, which add in another order
    }
    command = [sys.executable, str(ROOT / "examples" / "pretrain_packed_gpt.py"), "--plan", str(plan)]
    command += ["--layers", "2", "--hidden", "256", "--heads", "4", "--log-file", str(log), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(log.read_text().splitlines()[-1])["result"]
