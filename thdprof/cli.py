"""The command line: the app with its commands, and the one place where an error becomes a message and an exit code.

Heavy modules are imported inside the commands that use them, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from thdprof.commands import streams
from thdprof.commands.analyze import analyze
from thdprof.commands.calibrate import calibrate
from thdprof.commands.check import check
from thdprof.commands.compare import compare
from thdprof.commands.demo import demo
from thdprof.commands.export import export
from thdprof.commands.help import LaunchCommand, PanelCommand, PanelGroup, usage_message
from thdprof.commands.merge import merge
from thdprof.commands.pack import pack
from thdprof.commands.report import report
from thdprof.commands.sweep import sweep
from thdprof.errors import ThdprofError
from thdprof.words import WIDEST, wrap_text

app = typer.Typer(
    name="thdprof",
    cls=PanelGroup,
    help="CUDA-graph caps for packed-sequence (THD) training, chosen from the data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (analyze, sweep, pack, report, merge, export, compare, check, calibrate, demo):
    app.command(cls=LaunchCommand if _command in (analyze, sweep, pack) else PanelCommand)(_command)
_MOST_LINES = 3
"""Lines of an error's message."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130


def _version(value: bool) -> None:
    if value:
        from thdprof import __version__

        typer.echo(f"thdprof {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@functools.cache
def build_parser() -> Any:
    """The commands as typer builds them from their signatures, which takes milliseconds."""
    return typer.main.get_command(app)


class _Ended(BaseException):
    """A signal asks the process to end; raised so that temporary files are removed first."""


def _end(number: int, frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)  # `timeout` sends it twice
    raise _Ended(number)


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """Raise `_Ended` for the signals that end a process; afterwards they do what they did before.

    After one has come, all are ignored for good, for the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, on the process's own arguments or on `argv`.

    A program may call it again and again: it leaves signals and streams as they were.

    Raises:
        SystemExit: always, with the exit code.
    """
    with streams.prepare_streams(), _ending_signals():
        code = _run(argv)
    sys.exit(code)


def _run(argv: Sequence[str] | None) -> int:
    """The command's exit code; its error, if any, is said."""
    try:
        code = build_parser()(args=None if argv is None else list(argv), prog_name="thdprof", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer makes an exit code of it
            return _fail("interrupted", _INTERRUPTED)
    except ThdprofError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except _Ended as ended:
        number = signal.Signals(ended.args[0])
        return _fail(f"ended by {number.name}", 128 + number)
    except BrokenPipeError:
        streams.discard_output()
        return 1
    except MemoryError:
        return _fail(
            "out of memory: analyse fewer files at a time, fewer steps (--train-iters), or on a larger machine", 1
        )
    except Exception as error:
        return _report_foreign_error(error)
    return code if isinstance(code, int) else 0


def _report_foreign_error(error: Exception) -> int:
    """Exit code of an error that is not thdprof's own: the parser's, the system's, or a defect."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        message = usage_message(error)
        streams.say(f"thdprof: {message}" if message else error.format_message())  # the help, of a command alone
        return int(error.exit_code)
    if type(error).__name__ == "Abort":
        return 1
    if os.environ.get("THDPROF_DEBUG"):
        raise error
    if isinstance(error, OSError) and error.strerror:
        if error.filename is not None:
            return _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 1)
        streams.discard_output()
        return _fail(f"stdout: cannot be written: {error.strerror}", 1)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return _fail(f"internal error, please report it: {text} (THDPROF_DEBUG=1 shows where)", 1)


def _fail(message: str, code: int) -> int:
    lines = [part for line in f"thdprof: {message}".split("\n") for part in wrap_text(line)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"{lines[_MOST_LINES - 1][: WIDEST - 4]} ..."]
    streams.say("\n".join(lines))
    return code


if __name__ == "__main__":
    main()
