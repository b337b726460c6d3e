"""Attributes that an object has for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
