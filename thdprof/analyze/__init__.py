"""Analysis of packed datasets: predicts the micro-batches of a run, and recommends the shapes to capture for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis
    from thdprof.analyze.api import analyze_dataset, profile_dataset
    from thdprof.analyze.planning import make_plan
    from thdprof.analyze.profile.run_profile import RunProfile, load_profile, make_profile
    from thdprof.analyze.settings.resolved_model import read_model

__all__ = [
    "Analysis",
    "RunProfile",
    "analyze_dataset",
    "load_profile",
    "make_plan",
    "make_profile",
    "profile_dataset",
    "read_model",
]
_MODULES = {
    "Analysis": "analysis",
    "RunProfile": "profile.run_profile",
    "analyze_dataset": "api",
    "load_profile": "profile.run_profile",
    "make_plan": "planning",
    "make_profile": "profile.run_profile",
    "profile_dataset": "api",
    "read_model": "settings.resolved_model",
}
"""The submodule of each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a program that only reads sources does not load the whole analysis."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"thdprof.analyze.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'thdprof.analyze' has no attribute {name!r}")
