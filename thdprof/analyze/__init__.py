"""The analysis half: what micro-batches training will see, and which static shapes to capture for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis, make_plan
    from thdprof.analyze.api import analyze_dataset

__all__ = ["Analysis", "analyze_dataset", "make_plan"]


def __getattr__(name: str) -> Any:
    """Import on first use: a source alone need not load the whole analysis."""
    if name == "analyze_dataset":
        from thdprof.analyze import api

        return api.analyze_dataset
    if name in __all__:
        from thdprof.analyze import analysis

        return getattr(analysis, name)
    raise AttributeError(f"module 'thdprof.analyze' has no attribute {name!r}")
