"""The command line's output: lines, tables and a progress bar, on any terminal, pipe or encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from thdprof.commands.heartbeat import heartbeat

if TYPE_CHECKING:
    from rich.console import Console

    from thdprof.analyze.analysis import Progress

_WIDE = 1000
"""Columns of the console for reports; so wide that rich never wraps or cuts a line, and the terminal wraps it."""


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Make both streams take any text: one that is closed swallows it, characters it lacks become escapes.

    Afterwards both are as they were, so that a program can call the command line and go on.
    """
    with contextlib.ExitStack() as stack:
        if sys.stdout is None:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        if sys.stderr is None:
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stack.callback(_restore_errors, stream, stream.errors or "strict")
                stream.reconfigure(errors="backslashreplace")
        yield


def _restore_errors(stream: io.TextIOWrapper, errors: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # what the stream still holds cannot be written
        stream.reconfigure(errors=errors)


def discard_output() -> None:
    """Send what stdout still holds nowhere, so that a later flush does not fail too; the stream stays usable."""
    with contextlib.suppress(OSError, ValueError):
        target = sys.stdout.fileno()
        with contextlib.ExitStack() as stack:
            kept = os.dup(target)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, target)
            null = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, null)
            os.dup2(null, target)
            sys.stdout.flush()


@contextlib.contextmanager
def of_a_gate() -> Iterator[None]:
    """Keep a gate's exit code when its output pipe closes: `thdprof check ... | head -1` must still return 3."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def write(text: str) -> None:
    """Write `text` to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(line: str) -> None:
    """Write a line to stderr as it is; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def console(*, stderr: bool) -> Console:
    """A console for reports, which never cuts or wraps a line."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process
            raise BrokenPipeError

    return Plain(stderr=stderr, width=_WIDE, height=25, emoji=False)


@contextlib.contextmanager
def progress_bar(
    *,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[Progress]:
    """A progress bar on stderr that shows the stage, documents a second and the time left.

    Off a terminal there is no bar: a plain line says where a long command is, about once a minute (`heartbeat`).

    Args:
        now: the time in seconds, from any beginning.
        wait: waits for an event, at most so many seconds; returns whether the event is set.
    """
    if not sys.stderr.isatty():
        with heartbeat(say, now=now, wait=wait) as progress:
            yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    began = now()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, rate="")

        def show(stage: str, done: float, documents: int) -> None:
            rate = documents * done / max(1e-6, now() - began)
            text = f"{rate:,.0f} documents/s" if documents else ""
            bar.update(task, description=stage, completed=done, rate=text)

        yield show
