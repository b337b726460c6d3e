"""A script of tests/support that runs as several ranks on the host, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.paths import ROOT


def printed_by_ranks(script: ModuleType, world: int, store: Path) -> list[str]:
    """What each of `world` ranks of a script printed, which is called with RANK WORLD STORE; all must end well."""
    started = [
        subprocess.Popen(
            [sys.executable, str(script.__file__), str(rank), str(world), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    ended = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(error for _, error in ended)
    return [out for out, _ in ended]
