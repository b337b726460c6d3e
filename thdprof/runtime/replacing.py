"""Attributes of objects, most of them of other packages, that are replaced for as long as a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
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


def shared[**Args](change: Callable[Args, AbstractContextManager[Any]]) -> Callable[Args, AbstractContextManager[None]]:
    """Decorates a change of the process, so that several blocks may make it and end in any order.

    The arguments of the first one count, and the last one takes the change back.
    """
    stack, owners = ExitStack(), 0

    @wraps(change)
    @contextmanager
    def owned(*args: Args.args, **kwargs: Args.kwargs) -> Iterator[None]:
        nonlocal owners
        if owners == 0:
            stack.enter_context(change(*args, **kwargs))
        owners += 1
        try:
            yield
        finally:
            owners -= 1
            if owners == 0:
                stack.close()

    return owned


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
