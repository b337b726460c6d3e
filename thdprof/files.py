"""Files: an output is written whole or not at all, and never over an input; errors in YAML name the file and line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from thdprof.errors import DataError, UsageError

_DEEPEST = 100
"""Most levels of YAML values inside each other; a plan has 6."""
_MOST_REPEATED = 10_000
"""Most values that the aliases of one YAML text repeat; aliases of aliases would grow without end."""


def check_targets(paths: Sequence[Path], *, force: bool) -> None:
    """Refuse output files that cannot be written or must not be replaced. Called before the work, not after it.

    Raises:
        UsageError: two paths are one file; or a path is a directory, a device or a pipe; or the file exists and
            `force` is false.
        DataError: a path's directory does not exist.
        OSError: a path cannot be looked at.
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
            raise DataError(f"{path}: there is no directory {target.parent}; make it first")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`. When the block ends without an error, it is fsynced and takes the place of
    `path`.

    If `path` is a symbolic link, its target is replaced. If the block fails or the process is killed, `path` stays as
    it was.

    Raises:
        DataError: the directory does not exist or cannot be written to, or `path` is a device or a pipe.
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
        ValueError: `value` holds NaN or an infinite number, for which JSON has no word.
    """
    return json.dumps(value, indent=indent, allow_nan=False)


def write_batches(path: Path, batches: Iterator[Any]) -> None:
    """Write record batches of Arrow, at least one, to `path` as parquet. A write that fails leaves `path` as it was."""
    import pyarrow.parquet as pq

    first = next(batches)
    with (
        replacing(path) as temporary,
        temporary.open("wb") as file,  # pyarrow itself opens no names that are not UTF-8
        pq.ParquetWriter(file, first.schema) as writer,
    ):
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def check_not_inputs(outputs: Iterable[Path], inputs: Iterable[Path | None]) -> None:
    """Refuse to replace a file that is read, even with `--force`. Links are followed.

    Raises:
        UsageError: an output is one of the inputs.
    """
    read = [path for path in inputs if path is not None]
    for output in outputs:
        for path in read:
            with contextlib.suppress(OSError):  # one of them does not exist
                if os.path.samefile(output, path):
                    raise UsageError(f"{output}: is {path}, which is read; give another name")


def read_yaml(path: Path | str, *, where: str) -> Any:
    """The values in a YAML file, which errors name by `where`.

    Raises:
        DataError: see `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(path, where=where), where=where)


def read_text(path: Path | str, *, where: str, kind: str = "YAML") -> str:
    """The text of a UTF-8 file, which errors name by `where`; `kind` is what it should hold, for the same errors.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not {kind}: {error}") from error


def parse_yaml(text: str, *, where: str, unique_keys: bool = True) -> Any:
    """The values in YAML text, nested in at most 100 levels, of which aliases repeat at most 10,000.

    Errors name the file by `where`. A key that stands twice in one mapping is an error with `unique_keys`; otherwise
    the last one counts.

    Raises:
        DataError: the text is not YAML, is nested too deeply, repeats too many values by aliases, has a key twice in
            one mapping, or holds an impossible date, number or tag.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Names the line of an impossible value, refuses repeated keys, and limits nesting and aliases."""

        depth = values = repeated = 0

        def __init__(self, stream: str, events: Any = None) -> None:
            super().__init__(stream)
            for name in () if events is None else ("check_event", "peek_event", "get_event"):
                setattr(self, name, getattr(events, name))
            self.sizes: dict[int, tuple[int, int]] = {}  # of each composed node: its values, its levels
            self.deepest = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            is_alias = self.check_event(yaml.AliasEvent)
            before, outside, self.deepest = self.values, self.deepest, self.depth
            if self.depth == _DEEPEST:
                raise yaml.YAMLError("is nested too deeply")
            self.depth += 1
            node: yaml.Node | None = super().compose_node(parent, index)
            self.depth -= 1
            if is_alias:
                if id(node) not in self.sizes:
                    raise yaml.composer.ComposerError(None, None, "an alias stands inside its own value", mark)
                values, levels = self.sizes[id(node)]
                self.values, self.repeated = self.values + values, self.repeated + values
                self.deepest = self.depth + levels
                if self.repeated > _MOST_REPEATED:
                    said = f"aliases repeat more than {_MOST_REPEATED} values; write them out, or leave them out"
                    raise yaml.composer.ComposerError(None, None, said, mark)
                if self.deepest >= _DEEPEST:
                    raise yaml.YAMLError("is nested too deeply")
            else:
                self.values += 1
                self.sizes[id(node)] = self.values - before, self.deepest - self.depth
            self.deepest = max(outside, self.deepest)
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set[str]()
            for key, _ in node.value:
                if unique_keys and isinstance(key, yaml.ScalarNode) and key.value in seen:
                    said = f"{key.value} is given twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, AttributeError, TypeError) as error:
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error

    if yaml.__with_libyaml__ and not re.search(r"[^\n -~]|[!?|>]", text):  # which libyaml reads in another way
        with contextlib.suppress(yaml.YAMLError):  # errors have the words of PyYAML's own parser, below
            return Loader("", yaml.CSafeLoader(text)).get_single_data()
    try:
        return Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise DataError(f"{where}: not YAML: {line}{said}") from error
    except yaml.YAMLError as error:
        raise DataError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
