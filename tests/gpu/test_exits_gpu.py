"""Processes whose graphs hold NCCL's communicators end by themselves, with their own exit codes, on two GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.gpu_process import free_port
from support.paths import ROOT

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("left_open", 7),
        ("destroyed_first", 5),
        ("aborted_first", 6),
        ("error_half_way", 1),
        ("error_while_the_gpu_waits", 1),
        ("aborted_while_the_gpu_waits", 6),
    ],
)
def test_a_process_ends_by_itself(name, code):
    """torchrun tells of the rank that ended first; one that does not end is killed by torchrun after a minute."""
    command = ["timeout", "60", sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "tests/gpu/gpu_cases_exits.py", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=150)
    assert re.search(rf"exitcode *: {code} ", done.stderr), done.stdout + done.stderr
