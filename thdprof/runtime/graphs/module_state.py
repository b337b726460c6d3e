"""A module's state around captures: restored buffers and generators, fresh parameters, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def unchanged_state(
    module: nn.Module,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Iterator[None]:
    """Restore generators' states, the module's buffers and the `extra` tensors after the block, so that warm-up passes
    change no number of the run.

    Tensors that `extra` returns only after the block, because the block made them, are set to zero.

    Args:
        module: the module whose buffers are restored.
        generators: CUDA generators whose states are restored.
        extra: returns further tensors that passes change.
    """
    states = [generator.get_state() for generator in generators]
    buffers = [(buffer, buffer.detach().clone()) for buffer in (*module.buffers(), *extra())]
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
            known = {id(buffer) for buffer, _ in buffers}
            for buffer in extra():
                if id(buffer) not in known:
                    buffer.zero_()


@contextmanager
def aliased_parameters(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the module's parameters, inside the block, by fresh ones over the same memory; yields id of original ->
    alias.

    Autograd remembers the stream on which a parameter's first gradient was made, and a capture on another stream then
    fails. Fresh parameters have no such memory.
    """
    originals = list(parameter_homes(module))
    aliases: dict[int, nn.Parameter] = {}
    for _, _, parameter in originals:
        if id(parameter) not in aliases:
            alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            alias.__dict__.update(parameter.__dict__)
            aliases[id(parameter)] = alias
    try:
        for home, name, parameter in originals:
            home[name] = aliases[id(parameter)]
        yield aliases
    finally:
        for home, name, parameter in originals:
            home[name] = parameter


def parameter_homes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Every place in which the module's passes look a parameter up: (table, name in the table, parameter).

    These are the modules' own tables, and the attributes of plain objects that modules hold: Megatron's mixer of
    state-space layers has such an object, which keeps the mixer's parameters.
    """
    own = {id(p) for p in module.parameters()}
    for owner in module.modules():
        held = (v.__dict__ for v in vars(owner).values() if _is_plain(v))
        for home in (owner._parameters, *held):
            for name, value in home.items():
                if isinstance(value, nn.Parameter) and id(value) in own:
                    yield home, name, value


def _is_plain(value: Any) -> bool:
    """Whether `value` is an object with attributes of its own, and neither a module nor a tensor."""
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and not isinstance(value, nn.Module | torch.Tensor)


class Placement:
    """The addresses of a module's parameters and buffers at the time when its graphs were captured."""

    def __init__(self, module: nn.Module) -> None:
        """Remember where the parameters and buffers of `module` lie now."""
        self._parameters = [
            (owner._parameters, name, p, p.data_ptr(), (p.requires_grad, bool(p._backward_hooks)))
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]
        self._buffers = [
            (owner._buffers, name, b, b.data_ptr())
            for owner in module.modules()
            for name, b in owner._buffers.items()
            if b is not None
        ]

    def check(self) -> None:
        """Make sure that every parameter and buffer is still the same object at the same address.

        Raises:
            RuntimeError: a parameter or buffer was replaced or moved since the captures, so that graphs would read
                memory that was given back; or a parameter was frozen, unfrozen, or got a gradient hook.
        """
        for home, name, parameter, pointer, marks in self._parameters:
            if (parameter.requires_grad, bool(parameter._backward_hooks)) != marks:
                raise RuntimeError(
                    f"requires_grad of a parameter of shape {tuple(parameter.shape)} changed after its graphs were "
                    "captured, or it got a gradient hook; call recapture()"
                )
            if home[name] is not parameter or parameter.data_ptr() != pointer:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} moved in memory after its graphs were captured; "
                    "load and move weights before the first micro-batch, or call recapture()"
                )
        for buffers, name, buffer, pointer in self._buffers:
            if buffers[name] is not buffer or buffer.data_ptr() != pointer:
                raise RuntimeError(
                    f"buffer {name} was replaced or moved after its graphs were captured; call recapture()"
                )


def changes_since(placement: Placement | None) -> str:
    """How parameters and buffers differ from what `placement` remembers; "" if they do not, or nothing is known."""
    if placement is None:
        return ""
    try:
        placement.check()
    except RuntimeError as error:
        return str(error)
    return ""
