"""What one schedule worked out, kept for the next one of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast


class Memo:
    """The last result of each kind of work. Results are shared: nobody may change them."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: dict[Hashable, tuple[Hashable, Any]] = {}

    def get[R](self, kind: Hashable, key: Hashable, make: Callable[[], R]) -> R:
        """What `make` gives, or gave when it was last asked for `kind` with an equal `key`."""
        if not self._keeps:
            return make()
        held = self._held.get(kind)
        if held is None or held[0] != key:
            self._held.pop(kind, None)  # first: two results may not fit into memory
            held = self._held[kind] = (key, make())
        return cast("R", held[1])


FORGETFUL = Memo(keeps=False)
"""Keeps nothing, so that one schedule takes no more memory than it needs."""
