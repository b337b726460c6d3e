"""The settings file: a YAML mapping of options and settings, and the names by which it and a sweep know them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from thdprof.analyze.settings.limits import analysis_options
from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.training import Definition, definitions, model_definitions
from thdprof.training.settings import SHORT_NAMES
from thdprof.words import find_similar


@functools.cache
def list_settings() -> Mapping[str, Definition]:
    """Every setting that a settings file can give, by name."""
    return {**definitions(), **analysis_options(), **model_definitions()}


def load_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML mapping. Keys are names of settings, with `-` or `_`; a null counts as not given.

    Raises:
        DataError: the file cannot be read or is not a mapping.
        UsageError: a key that is no setting, or is given twice.
    """
    import yaml

    text = read_text(path, where=f"--settings {path}")
    loaded = parse_yaml(text, where=f"--settings {path}", unique_keys=False)  # the names are compared below
    node = yaml.compose(text, yaml.SafeLoader)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise DataError(f"--settings {path}: holds a {type(loaded).__name__}, not a mapping of options")
    given: dict[str, Any] = {}
    for key, _ in node.value:  # the loaded mapping has lost keys that are repeated
        name = read_name(key.value)
        if name not in list_settings():
            advice = advise_name(
                name, list_settings(), "known are those of `thdprof analyze --help` and docs/reference-cli.md"
            )
            raise UsageError(f"--settings {path}: unknown option {key.value!r}; {advice}")
        if name in given:
            raise UsageError(f"--settings {path}: option {name} is given twice")
        given[name] = None
    given.update((read_name(key), value) for key, value in loaded.items())
    return {name: value for name, value in given.items() if value is not None}


def advise_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """The known name that the user may have meant, as a question; `otherwise` where no known name is similar."""
    near = SHORT_NAMES.get(name) or find_similar(name, known)
    return otherwise if near is None else f"did you mean {near}?"


def read_name(key: Any) -> str:
    """The name of a setting that is written as an option, with `-` or with `_`."""
    return str(key).lstrip("-").replace("-", "_")
