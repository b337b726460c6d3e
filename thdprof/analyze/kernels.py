"""Sequential loops over arrays: plain Python for little work, compiled by numba (and cached) for much."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

_WORTH_COMPILING = 200_000
"""Loop turns from which loading numba (0.4 s) pays."""


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    return cast("Callable[..., Any]", numba.njit(cache=True, nogil=True)(function))


def run[R](function: Callable[..., R], work: int, /, *args: Any) -> R:
    """`function(*args)`, compiled if `work`, its loop turns, is large. The result is the same either way."""
    chosen = _compiled(function) if work >= _WORTH_COMPILING else function
    return cast("R", chosen(*args))
