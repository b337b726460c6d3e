"""Runs the command line, and scripts of the project, inside the test's own process as in one of their own.

Standard streams are pipes on descriptors 0, 1 and 2, so a test sees bytes that went past `sys.stdout` too. Everything
that a process would take with it when it ends is put back: streams, arguments, directory, environment, signal
handlers, warnings and matplotlib's settings.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from support.paths import ROOT
from thdprof.words import WIDEST

ENVIRONMENT = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
"""Variables that make output independent of the terminal in which the suite runs."""
_RESTORED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)


def run_in_process(
    *args: object, cwd: Path = ROOT, input: str | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The exit code and output of `thdprof ARGS`, without the start of a process.

    Args:
        args: the command's arguments, each turned into a string.
        cwd: directory in which the command runs.
        input: text on its standard input, at most a pipe's buffer of 64 KiB; without it the input is empty.
        env: the whole environment; the test's own with `ENVIRONMENT` unless given.
    """
    from thdprof.cli import main

    program = ROOT / "thdprof" / "__main__.py"
    return call_as_program(main, program, *args, package="thdprof", cwd=cwd, input=input, env=env)


class AnalysisHere:
    """What `thdprof.runtime.startup` uses of `subprocess`: `thdprof analyze` runs as of `run_in_process`."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    class Popen:
        """The process, which has ended when it has started."""

        def __init__(self, command: list[str], **_: object) -> None:
            assert command[1:3] == ["-m", "thdprof"]
            self._done = run_in_process(*command[3:])
            self.returncode = self._done.returncode

        def communicate(self, timeout: float) -> tuple[str, str]:
            return self._done.stdout, self._done.stderr

        def poll(self) -> int:
            return self.returncode


def unwrap(text: str) -> str:
    """`text` with the lines joined again that `thdprof.words.wrap_text` has broken."""
    lines: list[str] = []
    last, indent = "", ""
    for line in text.splitlines(keepends=True):
        word = line.strip().partition(" ")[0]
        if line.startswith(indent) and line[len(indent) :][:1].strip() and len(last.rstrip()) + 1 + len(word) > WIDEST:
            lines[-1] = f"{lines[-1].rstrip()} {line.lstrip()}"
        else:
            lines.append(line)
            indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
        last = line
    return "".join(lines)


def run_script(path: str, *args: object, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """The exit code and output of `python PATH ARGS` for a script of the project that has a function `main`.

    Args:
        path: the script's path below the project's directory.
        args: the script's arguments, each turned into a string.
        cwd: directory in which the script runs.
        variables: environment variables beside the test's own and `ENVIRONMENT`.
    """
    module = load_script(path, f"run_{Path(path).stem}")
    env = {**os.environ, **ENVIRONMENT, **variables}
    return call_as_program(module.main, ROOT / path, *args, cwd=cwd, env=env)


def load_script(path: str, name: str) -> types.ModuleType:
    """The project's script at `path` as a new module called `name`; it is not run as a program."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call_as_program(
    main: Callable[[], object],
    program: Path,
    *args: object,
    package: str = "",
    cwd: Path = ROOT,
    input: str | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The exit code and output of `main` as if it were the program of a process.

    Args:
        main: returns the exit code, or raises SystemExit.
        program: the file that the process would run, the first of `sys.argv`.
        args: the program's arguments, each turned into a string.
        package: for a program that is run by `python -m`, the name of its package.
        cwd, input, env: as of `run_in_process`.
    """
    arguments = list(map(str, args))
    environment = {**os.environ, **ENVIRONMENT} if env is None else env
    with contextlib.ExitStack() as stack:
        out, error = (stack.enter_context(_captured(number)) for number in (1, 2))
        stack.enter_context(_given(input))
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(_as_program(program, package, arguments))
        stack.enter_context(_signals_kept())
        stack.enter_context(_warnings_of_a_process())
        stack.enter_context(_drawing_kept())
        code = _exit_code(main)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    return subprocess.CompletedProcess([str(program), *arguments], code, _text(out), _text(error))


def _exit_code(main: Callable[[], object]) -> int:
    """Run `main` and return its exit code: 1, with the traceback on stderr, for an exception that it lets pass."""
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
        return 1
    return code if isinstance(code, int) else int(code is not None)


def _text(read: bytearray) -> str:
    return io.TextIOWrapper(io.BytesIO(bytes(read)), encoding="utf-8").read()


@contextlib.contextmanager
def _captured(number: int) -> Iterator[bytearray]:
    """Make descriptor `number`, and `sys.stdout` or `sys.stderr` on it, a pipe; its bytes are there at the end."""
    name = {1: "stdout", 2: "stderr"}[number]
    read: bytearray = bytearray()
    with _replaced(number) as (reading, ended):
        reader = threading.Thread(target=_drain, args=(reading, ended[0], read), daemon=True)
        reader.start()
        stream = open(number, "w", encoding="utf-8", errors="strict", closefd=False)  # noqa: SIM115 - closed below
        try:
            with mock.patch.object(sys, name, stream):
                yield read
        finally:
            with contextlib.suppress(OSError, ValueError):
                stream.close()
            os.write(ended[1], b".")
            reader.join()


@contextlib.contextmanager
def _replaced(number: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Put a pipe's writing end at descriptor `number`; gives its reading end, and a pipe that tells of the end."""
    sys.__dict__[{1: "stdout", 2: "stderr"}[number]].flush()
    kept = os.dup(number)
    reading, writing = os.pipe()
    ended = os.pipe()
    os.dup2(writing, number)
    os.close(writing)
    try:
        yield reading, ended
    finally:
        os.dup2(kept, number)
        for descriptor in (kept, reading, *ended):
            os.close(descriptor)


def _drain(reading: int, ended: int, read: bytearray) -> None:
    """Read until nothing is left after the end: a child that still runs may hold the pipe open."""
    while True:
        ready, _, _ = select.select([reading, ended], [], [])
        if reading in ready:
            some = os.read(reading, 2**16)
            read += some
            if some:
                continue
        if ended in ready:
            return


@contextlib.contextmanager
def _given(text: str | None) -> Iterator[None]:
    """Make standard input a pipe that holds `text`."""
    kept = os.dup(0)
    reading, writing = os.pipe()
    os.write(writing, (text or "").encode())
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    try:
        with open(0, encoding="utf-8", closefd=False) as stream, mock.patch.object(sys, "stdin", stream):
            yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@contextlib.contextmanager
def _as_program(program: Path, package: str, arguments: list[str]) -> Iterator[None]:
    """Make the arguments, and the program's name in messages, those of a process that runs `program`."""
    main = types.ModuleType("__main__")
    main.__package__ = package
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        with mock.patch.object(sys, "argv", [str(program), *arguments]):
            yield
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _RESTORED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _warnings_of_a_process() -> Iterator[None]:
    """Show a warning on stderr, as a process does, instead of collecting it for pytest's summary."""

    def show(message, category, filename, lineno, file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _drawing_kept() -> Iterator[None]:
    """Put matplotlib's settings back, and close figures that the command left open."""
    before = sys.modules.get("matplotlib")
    try:
        with before.rc_context() if before is not None else contextlib.nullcontext():
            yield
    finally:
        if before is None and sys.modules.get("matplotlib") is not None:
            sys.modules["matplotlib"].rc_file_defaults()
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
