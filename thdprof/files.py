"""Files: written whole or not at all, never over a file that is read; JSON without NaN; YAML whose faults are told with
file and line."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thdprof.errors import DataError, UsageError


def check_targets(paths: Sequence[Path], *, force: bool) -> None:
    """Refuse, before the work and not after it, files that cannot be written or must not be replaced.

    Raises:
        UsageError: a path is another's, a directory, a device or a pipe, in no directory, or exists without `force`.
        OSError: it cannot be looked at.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    if len(set(targets)) < len(targets):
        raise UsageError(f"{paths[-1]}: is named for two outputs; give each a file of its own")
    for path, target in zip(paths, targets, strict=True):
        if target.is_dir():
            raise UsageError(f"{path}: is a directory; name a file")
        if target.exists() and not target.is_file():
            raise UsageError(f"{path}: is not a regular file; give another name")
        if not force and os.path.lexists(path):
            raise UsageError(f"{path}: exists; give --force to replace it, or another name")
        if not target.parent.is_dir():
            raise UsageError(f"{path}: there is no directory {target.parent}; make it first")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, after an fsync, when the block ends well.

    A symbolic link is followed: its target is replaced. If the block fails or the process is killed, `path` stays
    as it was.

    Raises:
        DataError: the directory does not exist or cannot be written, or `path` is a device or a pipe.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise DataError(f"{path}: is not a regular file; give another name")
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    temporary = Path(name)
    try:
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(descriptor, target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~mask)
        os.close(descriptor)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write `text` to `path`, whole or not at all; an existing file is replaced only with `force`.

    Raises:
        DataError: the file exists and `force` is false, or it cannot be written.
    """
    if not force and os.path.lexists(path):
        raise DataError(f"{path}: exists; give --force to replace it, or another name")
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """`value` as JSON text, without a line break at its end; `indent` None puts it on one line.

    Raises:
        ValueError: it holds NaN or an infinite number, for which JSON has no word.
    """
    return json.dumps(value, indent=indent, allow_nan=False)


def check_not_inputs(outputs: Iterable[Path], inputs: Iterable[Path | None]) -> None:
    """Refuse, whatever `--force` says, to replace a file that is read; links are followed.

    Raises:
        UsageError: an output is one of the inputs.
    """
    read = [path for path in inputs if path is not None]
    for output in outputs:
        for path in read:
            with contextlib.suppress(OSError):  # one of them does not exist
                if os.path.samefile(output, path):
                    raise UsageError(f"-o {output}: is {path}, which is read; give another name")


def read_yaml(path: Path | str, *, where: str) -> Any:
    """What a YAML file holds; `where` names it in errors.

    Raises:
        DataError: as `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(path, where=where), where=where)


def read_text(path: Path | str, *, where: str) -> str:
    """The text of a YAML file; `where` names it in errors.

    Raises:
        DataError: it cannot be read, or is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not YAML: {error}") from error


def parse_yaml(text: str, *, where: str) -> Any:
    """What YAML `text` holds; `where` names it in errors.

    Raises:
        DataError: it is no YAML, is nested too deeply, or holds a date, number or tag that cannot be.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Tells the line of a value that cannot be, as YAML's own errors do."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, AttributeError, TypeError) as error:
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise DataError(f"{where}: not YAML: {line}{said}") from error
    except yaml.YAMLError as error:
        raise DataError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise DataError(f"{where}: not YAML: is nested too deeply") from error
