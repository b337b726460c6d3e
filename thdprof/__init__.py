"""thdprof: CUDA-graph caps for packed-sequence training, chosen from the data and proved at train time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from thdprof.plan import Plan, load_plan

    analyze_dataset: Callable[..., Any]

__version__ = "0.1.0"
__all__ = ["Plan", "__version__", "analyze_dataset", "load_plan"]
_HOMES = {"Plan": "thdprof.plan", "load_plan": "thdprof.plan", "analyze_dataset": "thdprof.analyze"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `thdprof --help` stays fast."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'thdprof' has no attribute {name!r}")
