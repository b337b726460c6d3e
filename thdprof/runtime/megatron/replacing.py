"""Attributes of other packages' objects that are replaced for as long as a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` another attribute `name` inside the block; AttributeError where it has no such name."""
    own = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


class Shared:
    """A change of the process that several owners may make, and end in any order: the last one takes it back."""

    def __init__(self, change: Callable[..., AbstractContextManager[Any]]) -> None:
        self._change, self._stack, self._owners = change, ExitStack(), 0

    @contextmanager
    def owned(self, *args: Any) -> Iterator[None]:
        """One more owner inside the block. The first one's `args` go to the change."""
        if self._owners == 0:
            self._stack.enter_context(self._change(*args))
        self._owners += 1
        try:
            yield
        finally:
            self._owners -= 1
            if self._owners == 0:
                self._stack.close()


@contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Give `owner` these attributes inside the block, and what it had itself before at the end."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                vars(owner)[name] = before[name]
            else:
                vars(owner).pop(name, None)


@contextmanager
def same_attributes(layer: nn.Module) -> Iterator[None]:
    """Give the layer's modules and its token dispatcher back, at the end of the block, the attributes that they had."""
    dispatcher = getattr(getattr(layer, "mlp", None), "token_dispatcher", None)
    owners = [*layer.modules(), dispatcher, getattr(dispatcher, "_comm_manager", None)]
    kept = [(vars(owner), dict(vars(owner))) for owner in owners if owner is not None]
    try:
        yield
    finally:
        for own, before in kept:
            own.clear()
            own.update(before)
