"""Keeps results of one schedule for the next schedule of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast


class Memo:
    """Holds the last result of each kind of work. Callers share the results and must not change them."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: dict[Hashable, tuple[Hashable, Any]] = {}

    def get[R](self, kind: Hashable, key: Hashable, make: Callable[[], R]) -> R:
        """Return `make()`, or its last result for this `kind` of work if that was made for an equal `key`."""
        if not self._keeps:
            return make()
        held = self._held.get(kind)
        if held is None or held[0] != key:
            self._held.pop(kind, None)  # before `make`: memory may not hold two results
            held = self._held[kind] = (key, make())
        return cast("R", held[1])


FORGETFUL = Memo(keeps=False)
"""A memo that keeps nothing, so that a single schedule takes no more memory than it needs."""
