"""The model of a run: what settings, the file of `--model` and a launch say together, the first of them strongest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thdprof.analyze.settings.model_reading import (
    ARCHITECTURE,
    OF_COMMUNICATION,
    OF_THE_RUN,
    REQUIRED,
    VOCAB_MULTIPLE,
    ModelReading,
    Vocabulary,
)
from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.training import Experts, Model, check_model, model_definitions
from thdprof.training.model import describe_field, find_problems, read_field
from thdprof.words import join_words

_BUCKETS = ("ddp_bucket_size", "ddp_num_buckets")
"""Fields of which a source gives one at most: each says how large data-parallel buckets are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model of a run."""

    model: Model | None
    """The model; None where it is not known."""
    source: str | None
    """Where the model was read, strongest first; None where it is not known."""
    notes: tuple[str, ...]
    """Remarks for the user."""


def resolve_model(
    own: Mapping[str, Any], *, file: ModelReading | None = None, script: ModelReading | None = None
) -> ResolvedModel:
    """The model that settings, a model file and a launch script describe together.

    Settings (`own`, each as `read_field` gives it) win over the file of `--model`, and the file over the script of
    `--megatron-args`. The file's architecture replaces the script's as a whole.

    Raises:
        UsageError: the model that they describe cannot be; the message names the field where it was given.
    """
    values, origins = _merge(own, file, script)
    notes = [*(file.notes if file else ()), *(script.notes if script and values else ())]
    unsettled = _find_unsettled(own, file, script)
    lost_vocabulary = unsettled.pop("vocab_size", None)
    of_communication = [unsettled.pop(name) for name in sorted(OF_COMMUNICATION & unsettled.keys())]
    if unsettled:
        notes.append(f"{_join_reasons(list(unsettled.values()))}; without it the model is not known")
        return ResolvedModel(model=None, source=None, notes=tuple(notes))
    pattern = values.get("hybrid_layer_pattern")
    if pattern:
        values.setdefault("num_layers", len(pattern))
        values.setdefault("num_moe_layers", pattern.count("E"))
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        if len(missing) < len(REQUIRED):
            notes.append(_note_missing(missing, file, script))
        return ResolvedModel(model=None, source=None, notes=tuple(notes))
    _complete(values, file, script)
    model = Model(**values)
    for field, text in find_problems(model):
        raise UsageError(f"{origins.get(field) or describe_field(model, field)}: {text}")
    if file is not None:
        notes += _note_assumed(file, script, own)
        notes += _note_contradictions(file, script, own)
    if of_communication:
        taken = "its default is" if len(of_communication) == 1 else "their defaults are"
        notes.append(f"{_join_reasons(of_communication)}; {taken} taken")
    if lost_vocabulary is not None:
        notes.append(lost_vocabulary)
    sources = [
        "settings" if own else "",
        file.source if file else "",
        script.source if script and script.values else "",
    ]
    return ResolvedModel(model=model, source=", ".join(filter(None, sources)), notes=tuple(notes))


def experts_of(model: Model) -> Experts:
    """How the model's experts take tokens: as the setting `experts` says it."""
    if model.num_experts is None:
        return "none"
    return "dropless" if model.moe_expert_capacity_factor is None else "padded"


def _merge(
    own: Mapping[str, Any], file: ModelReading | None, script: ModelReading | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by field, the strongest for each, and where files give them."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    readings = [reading for reading in (script, file) if reading is not None]
    if file is not None and not file.of_a_run:
        readings.reverse()  # the script's run, with the file's architecture
    for reading in readings:
        taken = {*reading.values} if file is None or reading is file else OF_THE_RUN
        _put(values, {name: value for name, value in reading.values.items() if name in taken})
        origins.update({name: place for name, place in reading.origins.items() if name in taken})
    _put(values, own)
    return values, {name: place for name, place in origins.items() if name not in own}


def _put(values: dict[str, Any], stronger: Mapping[str, Any]) -> None:
    """Overwrite values by those of a stronger source: a size of buckets also replaces their number, and the reverse."""
    if any(name in stronger for name in _BUCKETS):
        for name in _BUCKETS:
            values.pop(name, None)
    values.update(stronger)


def _find_unsettled(own: Mapping[str, Any], file: ModelReading | None, script: ModelReading | None) -> dict[str, str]:
    """Fields that are given but not settled, where nothing stronger gives them."""
    found: dict[str, str] = {}
    if script is not None:
        strong = {*own} if file is None else {*own, *file.values, *ARCHITECTURE}
        if file is not None or own.keys() >= {*REQUIRED}:
            # reasons that are of no field: another architecture, which a file or settings replace
            strong.update(n for n in script.unsettled if n not in model_definitions() and n != "--fp4-format")
        found.update({name: reason for name, reason in script.unsettled.items() if name not in strong})
    if file is not None:
        found.update({name: reason for name, reason in file.unsettled.items() if name not in own})
    return found


def _complete(values: dict[str, Any], file: ModelReading | None, script: ModelReading | None) -> None:
    """Add what follows from other fields: the padded vocabulary, and no sequence parallelism on one rank."""
    ranks = values.get("tensor_model_parallel_size", 1)
    if ranks == 1:
        values["sequence_parallel"] = False  # Megatron switches it off as well
    vocabulary, given = (None if one is None else one.vocabulary for one in (file or script, script))
    if "vocab_size" in values or vocabulary is None:
        return
    if given is not None and vocabulary.multiple == VOCAB_MULTIPLE:
        vocabulary = Vocabulary(tokens=vocabulary.tokens, multiple=given.multiple)
    values["vocab_size"] = vocabulary.rows(ranks)


def _note_missing(missing: list[str], file: ModelReading | None, script: ModelReading | None) -> str:
    where = f"{script.source}: " if file is None and script is not None else ""
    verb = "is" if len(missing) == 1 else "are"
    names = join_words(missing)
    return f"{where}the model is not known: {names} {verb} not given; give --model, or {names} in --settings"


def _note_assumed(file: ModelReading, script: ModelReading | None, own: Mapping[str, Any]) -> list[str]:
    """A note where nobody says how the model of the file is trained."""
    if script is not None and script.values:
        return []
    taken = {"precision": "precision bf16", "tensor_model_parallel_size": "tensor_model_parallel_size 1"}
    silent = [text for name, text in taken.items() if name not in own and name not in file.values]
    if not silent:
        return []
    return [f"--model {file.source}: does not say how it is trained; {' and '.join(silent)} taken"]


def _note_contradictions(file: ModelReading, script: ModelReading | None, own: Mapping[str, Any]) -> list[str]:
    """A note where the script's flags say another architecture than the file, whose is taken."""
    if script is None:
        return []
    ours = {name: definition.default for name, definition in model_definitions().items()} | {**file.values}
    places = [
        place
        for name, place in script.origins.items()
        if name in ARCHITECTURE and name not in own and script.values[name] != ours[name]
    ]
    theirs, vocabulary = script.vocabulary, file.vocabulary
    is_given = theirs and not theirs.is_counted and "vocab_size" not in own
    if theirs and vocabulary and is_given and theirs.tokens != vocabulary.tokens:
        places.append(f"{script.source}: --vocab-size {theirs.tokens}")
    if not places:
        return []
    more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return [f"{places[0]}{more}: contradicts --model {file.source}, whose architecture is taken"]


def _join_reasons(reasons: list[str]) -> str:
    more = len(reasons) - 1
    return reasons[0] if not more else f"{reasons[0]} (and {more} more {'flag' if more == 1 else 'flags'})"


# --- the file of --model ----------------------------------------------------------------------------------------------


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
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise DataError(f"{shown}: {size:,} bytes; a model is described in at most {_MOST_BYTES:,}")
    text = read_text(file, where=shown, kind="JSON" if kind == ".json" else "YAML")
    content = _json(text, shown) if kind == ".json" else parse_yaml(text, where=shown, unique_keys=False)
    if not isinstance(content, dict):
        raise DataError(f"{shown}: holds a {type(content).__name__}, not a mapping of names to values")
    from thdprof.analyze.settings.huggingface import read_config
    from thdprof.analyze.settings.recipe import read_recipe

    recipe = read_recipe(content, str(path))
    if recipe is not None:
        return recipe
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
    own = {name: None if value is None else read_field(name, value) for name, value in fields.items()}
    resolved = resolve_model(own, file=read_model_file(Path(path)))
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
