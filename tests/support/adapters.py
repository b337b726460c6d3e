"""Megatron-Bridge's adapters (LoRA, DoRA, canonical LoRA) without the rest of Bridge, whose dependencies are many."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KINDS = {"lora": ("lora", "LoRA"), "dora": ("dora", "DoRA"), "canonical": ("canonical_lora", "CanonicalLoRA")}
"""Module and class by the name of a kind of adapters."""
_PARENTS = ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.utils")
"""Packages whose own initialisation imports all of Bridge."""


def adapters(kind: str, **options: Any) -> Any:
    """Bridge's PEFT object: called with the list of a rank's model chunks, it freezes them and adds adapters.

    Args:
        kind: a key of KINDS.
        options: arguments of the class.
    """
    module, name = KINDS[kind]
    for parent in _PARENTS:
        if parent not in sys.modules:
            sys.modules[parent] = bare(parent)
    return getattr(importlib.import_module(f"megatron.bridge.peft.{module}"), name)(**options)


def bare(name: str) -> ModuleType:
    """The package without its own initialisation."""
    head, _, tail = name.rpartition(".")
    parent = importlib.import_module(head)
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [f"{folder}/{tail}" for folder in parent.__path__]
    package = importlib.util.module_from_spec(spec)
    setattr(parent, tail, package)
    return package
