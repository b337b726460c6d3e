"""Tokens of packed documents, shifted together, beside megatron-core's own way document by document."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import shifting_ranks
from support.paths import ROOT


@pytest.mark.parametrize("world", [1, 3])
def test_documents_are_shifted_as_megatron_core_does_it(world, tmp_path):
    command = [sys.executable, str(Path(shifting_ranks.__file__)), "RANK", str(world), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [str(rank) if word == "RANK" else word for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    ended = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(error for _, error in ended)
    assert all(int(out.split()[-1]) > 100 for out, _ in ended)
