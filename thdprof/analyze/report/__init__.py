"""Reporters: they show the results of an analysis. Only `figures` computes anything: sentences and curves.

from thdprof.analyze.report import figures, open_report

report = open_report("plan.yaml")
figures.caps(report, cap=64)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.analyze.report import figures, plots
    from thdprof.analyze.report.contents import Report, open_report

__all__ = ["Report", "figures", "open_report", "plots"]


def __getattr__(name: str) -> Any:
    """Import a name on its first use: the report for a terminal needs no figures."""
    from importlib import import_module

    if name in ("figures", "plots"):
        return import_module(f"thdprof.analyze.report.{name}")
    if name in __all__:
        return getattr(import_module("thdprof.analyze.report.contents"), name)
    raise AttributeError(f"module 'thdprof.analyze.report' has no attribute {name!r}")
