"""The file of `--model`: a Hugging Face config.json, the directory that holds it, or a recipe as YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thdprof.analyze.settings.model.reading import ModelReading
from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.training import Model, check_model

_MOST_BYTES = 1 << 20
CONFIG = "config.json"


def read_model_file(path: Path) -> ModelReading:
    """What the file or directory says of the model. Nothing is downloaded and nothing in it is run.

    Raises:
        DataError: there is no such file, it cannot be read, is neither JSON nor YAML, or does not describe a model.
        UsageError: `path` names a file of another kind.
    """
    shown = f"--model {path}"
    file = model_file(path)
    if not file.exists():
        if file != path:
            raise DataError(f"{shown}: the directory holds no {CONFIG}; name the file that describes the model")
        raise DataError(
            f"{shown}: there is no such file; name a directory with {CONFIG}, or a file (nothing is fetched)"
        )
    if not file.is_file():
        raise DataError(f"{shown}: is not a regular file")
    kind = file.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise UsageError(f"{shown}: must be a {CONFIG} or a recipe as YAML, by its name .json, .yaml or .yml")
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{shown}: cannot be read: {error.strerror}") from error
    if size > _MOST_BYTES:
        raise DataError(f"{shown}: {size:,} bytes; a model is described in at most {_MOST_BYTES:,}")
    text = read_text(file, where=shown, kind="JSON" if kind == ".json" else "YAML")
    content = _json(text, shown) if kind == ".json" else parse_yaml(text, where=shown, unique_keys=False)
    if not isinstance(content, dict):
        raise DataError(f"{shown}: holds a {type(content).__name__}, not a mapping of names to values")
    from thdprof.analyze.settings.model.huggingface import read_config
    from thdprof.analyze.settings.model.recipes import is_recipe, read_recipe

    if is_recipe(content):
        return read_recipe(content, str(path))
    if kind != ".json":
        raise DataError(
            f"{shown}: no mapping in it has num_layers and hidden_size; write out the recipe with all its values"
        )
    return read_config(content, str(path))


def model_file(path: Path) -> Path:
    """The file that `path` names: itself, or the config.json of a directory."""
    return path / CONFIG if path.is_dir() else path


def read_model(path: str | Path, **fields: Any) -> Model:
    """The model that a file describes, as `--model` reads it.

    Args:
        path: a Hugging Face config.json or the directory that holds it, or a recipe of Megatron-Bridge or NeMo as YAML.
        fields: fields of `Model` that the file does not tell or that differ, such as `tensor_model_parallel_size=4`.

    Raises:
        DataError: the file cannot be read or does not describe a model that thdprof knows.
        UsageError: `path` names a file of another kind, or the fields make no model.
    """
    from thdprof.analyze.settings.model.resolve import read_settings, resolve_model

    own = {name: value for name, value in fields.items() if value is not None}
    unset = dict.fromkeys(name for name, value in fields.items() if value is None)
    resolved = resolve_model({**read_settings(own), **unset}, file=read_model_file(Path(path)))
    if resolved.model is None:
        raise DataError(f"--model {path}: {'; '.join(resolved.notes)}")
    check_model(resolved.model)
    return resolved.model


def _json(text: str, shown: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise DataError(f"{shown}: not JSON: line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise DataError(f"{shown}: not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"{shown}: not JSON: is nested too deeply") from error
