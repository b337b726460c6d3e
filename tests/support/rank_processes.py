"""A script of tests/support that runs as several ranks on the host, each a process of its own.

Run as a program it is the parent of the ranks: `rank_processes.py SCRIPT WORLD STORE` imports the script once, which
takes seconds, and forks a process for each rank.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

from support.paths import ROOT


def printed_by_ranks(script: ModuleType, world: int, store: Path) -> list[str]:
    """What each of `world` ranks of a script printed: its `main` gets rank, world and store, and must end well."""
    done = subprocess.run(
        [sys.executable, __file__, str(script.__file__), str(world), str(store)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return [_output(store, rank).read_text() for rank in range(world)]


def _output(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.name}-{rank}.txt")


def _run_ranks(path: str, world: int, store: Path) -> int:
    """Run the ranks, and return 0 where all of them ended well."""
    spec = importlib.util.spec_from_file_location("ranks", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["ranks"] = script
    spec.loader.exec_module(script)
    pids = []
    for rank in range(world):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            with _output(store, rank).open("w") as file:
                os.dup2(file.fileno(), 1)
            script.main(rank, world, str(store))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(_run_ranks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
