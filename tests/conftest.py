"""Shared fixtures."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.paths import ROOT

logging.getLogger("megatron").setLevel(logging.ERROR)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded with the test's file and name, so that a failure repeats, wherever the file lies."""
    return np.random.default_rng(list(f"tests/{request.node.nodeid.rpartition('/')[2]}".encode()))


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
