"""Puts our function in the place of another package's, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give the module or class `owner` another `name` inside the block.

    Raises:
        AttributeError: `owner` has no such name.
    """
    own = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)
