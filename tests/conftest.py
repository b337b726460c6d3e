"""Shared fixtures."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
logging.getLogger("megatron").setLevel(logging.ERROR)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded with the test's name, so that a failure repeats."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def thdprof() -> Callable[..., subprocess.CompletedProcess]:
    """Runs the command line in a process of its own."""

    def run(*args: object, **options) -> subprocess.CompletedProcess:
        environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
        return subprocess.run(
            [sys.executable, "-m", "thdprof", *map(str, args)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=options.pop("cwd", ROOT),
            timeout=120,
            **options,
        )

    return run
