"""A model's decoder layers as one module, which can be captured, and what its calls hold besides tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thdprof.runtime.padding import PackedSequence

NOT_FOR_LAYERS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch"}
)
"""Keyword arguments of a model that its layers do not need: boundaries, which the stack gives them, and the loss's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a tensor among the arguments of a layer."""

    index: int
    """Which of the tensors of the call it is, from 0."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The keyword arguments of all layers, with `Place` for every tensor."""

    of_layers: tuple[tuple[tuple[str, Any], ...], ...]
    """The names and values of each distinct set of arguments."""
    sets: tuple[int, ...]
    """Which set each layer is called with."""


class UnknownArgument(Exception):
    """A layer was called with an argument that a capture could not follow."""


def gathered(calls: Sequence[dict[str, Any]]) -> tuple[Arguments, list[torch.Tensor]]:
    """The arguments of all layers, and the distinct tensors among them in order.

    Args:
        calls: the keyword arguments of each layer.

    Raises:
        UnknownArgument: an argument is neither a tensor, nor a tuple of tensors, nor a constant.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, Place] = {}
    distinct: list[dict[str, Any]] = []
    described: list[tuple[tuple[str, Any], ...]] = []
    sets: list[int] = []

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in places:
                places[id(value)] = Place(len(tensors))
                tensors.append(value)
            return places[id(value)]
        if isinstance(value, tuple | list):
            return tuple(replaced(name, part) for part in value)
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return value
        raise UnknownArgument(f"{name} is a {type(value).__name__}")

    for call in calls:
        same = (
            n for n, known in enumerate(distinct)
            if known.keys() == call.keys() and all(known[name] is value for name, value in call.items())
        )  # fmt: skip
        known = next(same, None)
        if known is None:
            known = len(distinct)
            distinct.append(call)
            described.append(tuple((name, replaced(name, value)) for name, value in call.items()))
        sets.append(known)
    return Arguments(tuple(described), tuple(sets)), tensors


@dataclass(slots=True)
class KnownArguments:
    """Every form of arguments that was seen, by a short name: calls with one name can share captured graphs."""

    names: dict[Arguments, str] = field(default_factory=dict)
    """The name of each form."""
    forms: dict[str, Arguments] = field(default_factory=dict)
    """The form of each name."""

    def name(self, arguments: Arguments) -> str:
        """The name of `arguments`."""
        if arguments not in self.names:
            name = f"form {len(self.names)}"
            self.names[arguments], self.forms[name] = name, arguments
        return self.names[arguments]


class LayerStack(nn.Module):
    """All decoder layers of a model, one after the other. The layers stay the model's own.

    Call it with hidden states [1, tokens, hidden], the boundaries, the name of a form of arguments, and its tensors.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        """The stack of `layers`, each called with hidden states and keyword arguments, and returning hidden states."""
        super().__init__()
        self.layers = layers
        self.known = KnownArguments()

    def forward(
        self, hidden_states: torch.Tensor, packed: PackedSequence, form: str, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states after all layers, shape [1, tokens, hidden]."""
        arguments = self.known.forms[form]
        boundaries = {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }
        calls = [{name: _restored(value, tensors) for name, value in one} for one in arguments.of_layers]
        for layer, number in zip(self.layers, arguments.sets, strict=True):
            result = layer(hidden_states, **calls[number], **boundaries)
            hidden_states = result[0] if isinstance(result, tuple) else result
        return hidden_states


def _restored(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Place):
        return tensors[value.index]
    return tuple(_restored(part, tensors) for part in value) if isinstance(value, tuple) else value
