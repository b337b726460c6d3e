"""GPU cases of a file, each run in a process of its own."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress

from support.paths import ROOT


def run_case(file: str, name: str, *, one_gpu: bool = False) -> None:
    """Run the case `name` of a file in tests/gpu, which says `ok` in its last line.

    Args:
        file: name of the file in tests/gpu.
        name: the case.
        one_gpu: let it see the first GPU only.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if one_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    done = subprocess.run(
        [sys.executable, f"tests/gpu/{file}", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


def of_ranks(ranks: int) -> list[str]:
    """The arguments of Python that start a script on so many ranks, each on a GPU of its own.

    Where there are fewer GPUs, all ranks share one, as if each were on a host of its own.
    """
    import torch

    if torch.cuda.device_count() < ranks:
        return [str(ROOT / "benchmarks" / "as_hosts.py"), str(ranks), "1", str(free_port())]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]


def free_port() -> int:
    """A port that is free now and that the system gives to no process which asks for any: those are larger."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(20_000, 29_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
