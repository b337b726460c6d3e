"""Attributes that an object has for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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
