"""Reading YAML files: whatever is wrong with one is an error that names the file and, where known, the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thdprof.errors import DataError


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
