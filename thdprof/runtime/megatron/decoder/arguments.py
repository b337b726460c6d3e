"""The arguments with which a model calls its decoder: those that graphs take, and those that no graph does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

KNOWN_ARGUMENTS = frozenset({"hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask"})
"""Arguments of a decoder's forward that graphs take: their tensors are copied into static ones."""
FOR_INFERENCE = frozenset({"inference_context", "inference_params"})
"""With one of these the decoder's own forward runs, past everything else."""


def not_known(
    arguments: Mapping[str, Any], signature: inspect.Signature, known: frozenset[str] = KNOWN_ARGUMENTS
) -> set[str]:
    """Names of arguments that graphs do not take, and that are not at their default.

    Args:
        arguments: what a decoder's forward was called with, as `signature` binds it.
        signature: of that forward.
        known: names of those that graphs take.
    """
    names = {name for name, value in further(arguments, signature).items() if value is not None}
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        taken = name in known | FOR_INFERENCE or parameter.kind is parameter.VAR_KEYWORD
        if not taken and not _is_default(value, parameter.default):
            names.add(name)
    return names


def further(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """The keyword arguments that a forward takes without naming them (`**kwargs`), of `arguments` as `not_known` has
    them.
    """
    names = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    return {key: value for name in names for key, value in arguments.get(name, {}).items()}


def _is_default(value: Any, default: Any) -> bool:
    """Whether an argument says nothing: None, its own default, or an empty collection in place of None."""
    if value is None or value is default:
        return True
    if isinstance(value, set | frozenset | list | tuple | dict):
        return not value and not default
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default
