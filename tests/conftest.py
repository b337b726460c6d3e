"""Shared fixtures."""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support.command import ENVIRONMENT, AnalysisHere, run_in_process, unwrap
from support.paths import ROOT
from support.rank_processes import fork_server
from support.warm_tokenizer import counting

logging.getLogger("megatron").setLevel(logging.ERROR)
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tensors of tests are small, and each worker has a core: more threads would wait for each other, busily."""

_GPU_PLACES = [Path(tempfile.gettempdir()) / f"thdprof-tests-{os.getuid()}-gpu-{place}.lock" for place in range(6)]
"""Locks of the tests that may use GPUs at a time."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, which makes hardly any and takes a fifth less time so."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of all garbage collections to come: captures begin with one, of two seconds else.

    The server of ranks is forked here, so that they have what was imported.
    """
    gc.collect()
    gc.freeze()
    fork_server()


_FILES = set[str]()


def pytest_runtest_logstart(location: tuple[str, int | None, str]) -> None:
    """Leave what a file of tests has left out of collections, too: it is much by the end, and many tests collect."""
    if location[0] not in _FILES:
        _FILES.add(location[0])
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a few GPU tests run at a time, whichever processes run them, and one that measures the GPU by itself."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with ExitStack() as turn:
        places = [turn.enter_context(path.open("w")) for path in _GPU_PLACES]
        if item.get_closest_marker("alone"):
            for place in places:
                fcntl.flock(place, fcntl.LOCK_EX)
        elif not any(map(_is_taken, places)):
            fcntl.flock(places[os.getpid() % len(places)], fcntl.LOCK_EX)
        return (yield)


def _is_taken(place: IO[str]) -> bool:
    """Whether this process has taken the place, which was free."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded with the test's file and name, so that a failure repeats, wherever the file lies."""
    return np.random.default_rng(list(f"tests/{request.node.nodeid.rpartition('/')[2]}".encode()))


@pytest.fixture
def thdprof() -> Callable[..., subprocess.CompletedProcess]:
    """Runs the command line in the test's own process, which takes milliseconds, and joins wrapped lines again."""

    def run(*args: object, **options) -> subprocess.CompletedProcess:
        done = run_in_process(*args, **options)
        done.stderr = unwrap(done.stderr)
        if not done.stdout.startswith(("{", "schema:")):  # no JSON and no plan
            done.stdout = unwrap(done.stdout)
        return done

    return run


@pytest.fixture
def thdprof_process() -> Callable[..., subprocess.CompletedProcess]:
    """Runs the command line in a process of its own, which takes a second.

    It is for tests of the process itself: closed streams, terminals, and what it can import. `variables` are of the
    environment; other options go to `subprocess.run`.
    """

    def run(*args: object, variables: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "thdprof", *map(str, args)]
        environment = {**os.environ, **ENVIRONMENT, **(variables or {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.run(command, **{**streams, "cwd": ROOT, "timeout": 120, **options}, env=environment)

    return run


@pytest.fixture
def analysis_here(monkeypatch) -> None:
    """Lets a start of training analyse in the test's own process; other tests start the analysis, as users do."""
    from thdprof.runtime import startup

    monkeypatch.setattr(startup, "subprocess", AnalysisHere)


@pytest.fixture
def warm_tokenizer() -> Iterator[None]:
    """Counts tokens in forked processes; other tests start the programs that count them, as users do."""
    with counting():
        yield


@pytest.fixture(scope="module")
def megatron_parser():
    """A parser with all of Megatron's arguments."""
    argv, sys.argv = sys.argv, ["pytest"]
    try:
        arguments = pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")
    finally:
        sys.argv = argv
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
