"""GPU cases of a file, each run in a process of its own."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys

from support.paths import ROOT


def run_case(file: str, name: str) -> None:
    """Run the case `name` of a file in tests/gpu, which says `ok` in its last line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
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


def free_port() -> int:
    """A free port below those from which the system takes its own, so that no process takes it by chance meanwhile."""
    chosen = random.Random(os.urandom(8))
    while True:
        port = chosen.randrange(20_000, 32_000)
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):
                return port
