"""The settings file of `--settings`: a YAML mapping of settings to values."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text


def load_settings_file(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The settings of a YAML mapping. Keys are names of settings, with `-` or `_`; a null counts as not given.

    Raises:
        DataError: the file cannot be read or is not a mapping.
        UsageError: a key that is not one of `names`, or is given twice.
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
        name = _name(key.value)
        if name not in names:
            raise UsageError(f"--settings {path}: unknown option {key.value!r}; known are {', '.join(sorted(names))}")
        if name in given:
            raise UsageError(f"--settings {path}: option {name} is given twice")
        given[name] = None
    given.update((_name(key), value) for key, value in loaded.items())
    return {name: value for name, value in given.items() if value is not None}


def _name(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")
