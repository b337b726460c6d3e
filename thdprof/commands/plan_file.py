"""Plans that a command reads: from a file, or from stdin where the argument is `-`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml
from thdprof.plan import Plan, load_plan, parse_plan

_STDIN = "<stdin>"


def from_stdin(argument: Path | None) -> bool:
    """Whether `argument` stands for stdin."""
    return str(argument) == "-"


def shown(argument: Path) -> str:
    """The argument as messages name it."""
    return _STDIN if from_stdin(argument) else str(argument)


def check_one_stdin(*arguments: Path | None) -> None:
    """Refuse to read two things from stdin.

    Raises:
        UsageError: `-` is given more than once.
    """
    if sum(from_stdin(argument) for argument in arguments) > 1:
        raise UsageError("- is given twice, but stdin can be read only once; name a file for one of them")


def read_plan(argument: Path) -> Plan:
    """The plan that `argument` names.

    Raises:
        DataError: it cannot be read or is no plan; the message begins with the file's name, or with `<stdin>`.
    """
    if not from_stdin(argument):
        return load_plan(argument)
    return parse_plan(parse_yaml(_stdin_text(), where=_STDIN), where=_STDIN)


@contextlib.contextmanager
def plan_as_file(argument: Path) -> Iterator[Path]:
    """A file that holds the plan, for readers that need one; of stdin a copy that lasts as long as the block.

    Raises:
        DataError: stdin cannot be read, or is empty.
    """
    if not from_stdin(argument):
        yield argument
        return
    with tempfile.TemporaryDirectory(prefix="thdprof-") as directory:
        path = Path(directory) / "stdin.yaml"
        path.write_text(_stdin_text(), encoding="utf-8")
        yield path


def _stdin_text() -> str:
    try:
        text = "" if sys.stdin is None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{_STDIN}: cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{_STDIN}: is empty; pipe a plan into it, as in: thdprof analyze DATASET -o - | thdprof ...")
    return text
