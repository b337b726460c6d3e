"""What the command line reads and writes, on any terminal, pipe or encoding: plans, lines, tables, a progress bar."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.errors import DataError
from thdprof.files import json_text
from thdprof.words import wrap_text, write_count

if TYPE_CHECKING:
    from rich.console import Console

    from thdprof.analyze.analysis import Progress
    from thdprof.plan import Plan

_WIDE = 1000
"""Columns of the console for reports; so wide that rich never wraps or cuts a line, and the terminal wraps it."""


@contextlib.contextmanager
def prepare_streams() -> Iterator[None]:
    """Make both streams take any text: one that is closed swallows it, characters it lacks become escapes.

    Afterwards both are as they were, so that a program can call the command line and go on.
    """
    with contextlib.ExitStack() as stack:
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if stream is None:
                stack.enter_context(redirect(stack.enter_context(open(os.devnull, "w"))))
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


def print_gate[Result](
    result: Result, *, json: bool, to_dict: Callable[[Result], Any], print_text: Callable[[Result, Console], None]
) -> None:
    """Print a gate's result as JSON or text.

    A pipe that closes is no error, so that `thdprof check ... | head -1` still returns 3.
    """
    try:
        if json:
            write_json(to_dict(result))
        else:
            print_text(result, console(stderr=False))
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def write(text: str) -> None:
    """Write `text` to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write `value` to stdout as one JSON object."""
    write(json_text(value) + "\n")


def say(line: str) -> None:
    """Write a line to stderr, a long one wrapped; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{part}\n" for whole in line.split("\n") for part in wrap_text(whole)))
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

    Off a terminal there is no bar: a plain line says where a long command is, about once a minute (`heartbeat`, which
    documents the arguments).
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


# --- lines that show in a job's log that a long command lives ---------------------------------------------------------


FIRST_SECONDS = 30.0
"""Seconds of silence before the first line; a command that ends before says nothing."""
LATER_SECONDS = 60.0
"""Seconds between two lines."""


@contextlib.contextmanager
def heartbeat(
    say: Callable[[str], None],
    *,
    now: Callable[[], float],
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[Progress]:
    """Say where the command is, from a thread, since reading or packing may tell nothing for minutes.

    The first line comes after `FIRST_SECONDS`, the others `LATER_SECONDS` apart, and none after the context is left. A
    loop that holds Python's lock, such as NumPy's shuffle, delays a line until it ends.

    Args:
        wait: waits for an event, at most so many seconds; returns whether the event is set.
    """
    place, over, began = ("starting", 0.0, 0), threading.Event(), now()

    def show(stage: str, done: float, documents: int) -> None:
        nonlocal place
        place = stage, done, documents

    def beat() -> None:
        seconds = FIRST_SECONDS
        while not wait(over, seconds):
            say(_describe(*place, now() - began))
            seconds = LATER_SECONDS

    thread = threading.Thread(target=beat, name="thdprof-heartbeat", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: the work goes on without lines
        thread.start()
    try:
        yield show
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _describe(stage: str, done: float, documents: int, seconds: float) -> str:
    """The line for a log, `seconds` after the command began."""
    minutes, rest = divmod(int(seconds), 60)
    took = f"{minutes:,} min {rest} s" if minutes else f"{rest} s"
    size = f"{write_count(documents, 'document')}, " if documents else ""
    share = f"about {int(100 * done)}% of the work done, " if 0 < done < 1 else ""
    return f"still {stage}: {size}{share}{took} so far"


# --- plans from a file, or from stdin where the argument is - ---------------------------------------------------------


_STDIN = "<stdin>"


def is_stdin(argument: Path | None) -> bool:
    """Whether `argument` stands for stdin."""
    return str(argument) == "-"


def name_plan(argument: Path) -> str:
    """The argument as messages name it."""
    return _STDIN if is_stdin(argument) else str(argument)


def read_plan(argument: Path) -> Plan:
    """The plan that `argument` names.

    Raises:
        DataError: it cannot be read or is no plan; the message begins with the file's name, or with `<stdin>`.
    """
    from thdprof.files import parse_yaml
    from thdprof.plan import load_plan, parse_plan

    if not is_stdin(argument):
        return load_plan(argument)
    try:
        text = "" if sys.stdin is None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{_STDIN}: cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{_STDIN}: is empty; pipe a plan into it, as in: thdprof analyze DATASET -o - | thdprof ...")
    return parse_plan(parse_yaml(text, where=_STDIN), where=_STDIN)
