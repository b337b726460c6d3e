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

    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no directory for the cache can be written
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[..., Any]", compiled)


def run[R](function: Callable[..., R], work: int, /, *args: Any) -> R:
    """`function(*args)`, compiled if `work`, its loop turns, is large. The result is the same either way."""
    chosen = _compiled(function) if work >= _WORTH_COMPILING else function
    return cast("R", chosen(*args))
