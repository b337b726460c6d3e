"""A function that runs as several ranks on the host, each a process of its own.

The processes are forked from a server, which is forked from a worker of pytest before its first test: the worker has
imported the training stack, which takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from unittest import mock

_LOCK = threading.Lock()
"""Held where a program starts, which looks whether others have ended, and where its end is waited for."""


def fork_server() -> None:
    """Fork the server from this process. It ends with the process."""
    multiprocessing.set_forkserver_preload([])
    with mock.patch.object(util, "spawnv_passfds", _fork), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the worker only wait
        forkserver.ensure_running()


def _fork(_: bytes, command: Sequence[str], passed: Sequence[int]) -> int:
    """Stands for `util.spawnv_passfds`: a fork that runs the last word of `command`, with the files `passed` open."""
    if child := os.fork():
        return child
    try:
        atexit._clear()  # what pytest does at its end
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in (nowhere, *passed):
                os.dup2(nowhere, number, inheritable=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        exec(command[-1], {})
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    os._exit(1)


def start_ranks(function: Callable[..., None], world: int, *given: object) -> None:
    """Call `function(rank, *given)`, a function of a module, in `world` processes; all of them must end well."""
    import torch

    torch.multiprocessing.start_processes(function, given, nprocs=world, start_method="forkserver")


class ForkedProgram:
    """What the readers of many files use of `subprocess.Popen`, for a fork of the server that calls their function."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        *_, imported, call = command[3].split("; ")
        module, function = imported.split()[1], call.removesuffix("()")
        (given, sent), (received, returned) = (Pipe(duplex=False) for _ in range(2))
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(module, function, given, returned))
        with _LOCK:
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill
        self.stdin, self.stdout = os.fdopen(os.dup(sent.fileno()), "wb"), os.fdopen(os.dup(received.fileno()), "rb")
        for end in (given, sent, received, returned):
            end.close()

    def wait(self) -> int:
        with _LOCK:
            self._process.join()
        return self._process.exitcode

    def communicate(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self._process.join()


def _serve(module: str, function: str, given: Connection, returned: Connection) -> None:
    os.setsid()
    os.dup2(given.fileno(), 0)
    os.dup2(returned.fileno(), 1)
    getattr(sys.modules[module], function)()


def printed_by_ranks(function: Callable[[int, int, str], None], world: int, store: Path) -> list[str]:
    """What `function(rank, world, store)` printed in each of `world` processes, behind lines of Megatron's log."""
    start_ranks(_print_to_file, world, function, world, str(store))
    return [_output(str(store), rank).read_text() for rank in range(world)]


def _print_to_file(rank: int, function: Callable[[int, int, str], None], world: int, store: str) -> None:
    with _output(store, rank).open("w") as file:
        os.dup2(file.fileno(), 1)
    function(rank, world, store)


def _output(store: str, rank: int) -> Path:
    return Path(f"{store}-{rank}.txt")
