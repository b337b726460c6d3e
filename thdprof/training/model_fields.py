"""The fields of `Model` as settings: their definitions, and the values that they take in settings files and sweeps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from thdprof.errors import UsageError
from thdprof.training.definition import Definition, definitions_of
from thdprof.training.model import Model

NONE = "none"
"""The value that says outright that a field is null, such as `fp8_recipe: none`; a null counts as not given."""
_LARGE = 1e9
_PARTS = {"hidden_dropout": "at least 0 and less than 1", "attention_dropout": "at least 0 and less than 1"}
_PARTS["lora_dropout"] = _PARTS["hidden_dropout"]


@functools.cache
def model_definitions() -> Mapping[str, Definition]:
    """The definition of every field of `Model`, by name, in their order."""
    return definitions_of(Model)


@functools.cache
def _nullable() -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(Model) if f.default is None)


def read_field(name: str, value: object) -> Any:
    """The value of the field `name` of `Model` that a settings file's `value` says; "none" stands for null.

    Raises:
        UsageError: `value` is of a wrong type or out of bounds; the message names the field as it is given.
    """
    definition = model_definitions()[name]
    if value == NONE and name in _nullable():
        return None
    if definition.type is float:
        return _number(definition, value)
    if definition.type is tuple:
        return _names(definition, value)
    if definition.type is str and not isinstance(value, str):
        raise UsageError(f"{definition.shown(repr(value))}: must be text")
    definition.check(value)
    return value


def _number(definition: Definition, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGE < value < _LARGE:  # or NaN
        raise UsageError(f"{definition.shown(repr(value))}: must be a number")
    if definition.name in _PARTS and not 0 <= value < 1:
        raise UsageError(f"{definition.shown(value)}: must be {_PARTS[definition.name]}")
    if definition.name not in _PARTS and value <= 0:
        raise UsageError(f"{definition.shown(value)}: must be over 0")
    return float(value)


def _names(definition: Definition, value: object) -> tuple[str, ...]:
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{definition.shown(repr(value))}: must be a list of names, such as [core_attn]")
    return tuple(names)
