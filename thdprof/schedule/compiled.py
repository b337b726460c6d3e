"""Runs sequential loops over arrays: as plain Python if they are short, else compiled by numba.

numba keeps the machine code in its cache on disk, so that a loop compiles once per machine.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

_WORTH_COMPILING = 200_000
"""Number of loop turns, those of earlier runs among them, from which loading numba (0.4 s) pays."""
_turns: Counter[Callable[..., Any]] = Counter()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    called = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    helpers = {name: _compiled(helper) for name, helper in called.items() if isinstance(helper, types.FunctionType)}
    function = types.FunctionType(function.__code__, function.__globals__ | helpers)  # numba compiles no helper itself
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no writable directory for its cache
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[..., Any]", compiled)


def run[R](function: Callable[..., R], work: int, /, *args: Any) -> R:
    """Return `function(*args)`, compiled if `work`, the number of its loop turns, is large with those of earlier runs.

    The result does not depend on whether it was compiled. Functions of its module that it calls are compiled with it.
    """
    _turns[function] += work
    chosen = _compiled(function) if _turns[function] >= _WORTH_COMPILING else function
    return cast("R", chosen(*args))
