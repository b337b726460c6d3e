"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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
