"""The report's figures: each is one finding in a sentence, in numbers and as a drawing that a notebook shows.

Every function takes the report and a cap in documents, so that a notebook can redraw all figures for another cap.
"""

from __future__ import annotations

from collections.abc import Callable

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.drawing import Figure
from thdprof.analyze.report.figures.graphs import caps, choice, memory, observed
from thdprof.analyze.report.figures.microbatches import drift, joint, parts, shapes, steps

__all__ = [
    "ALL",
    "Figure",
    "caps",
    "choice",
    "drift",
    "joint",
    "make_figures",
    "memory",
    "observed",
    "parts",
    "shapes",
    "steps",
]

ALL: tuple[Callable[[Report, int], Figure], ...] = (
    shapes,
    joint,
    caps,
    choice,
    steps,
    drift,
    parts,
    memory,
    observed,
)
"""All figures in the order of the report."""


def make_figures(report: Report, cap: int) -> tuple[Figure, ...]:
    """All figures of the report for a cap in documents."""
    return tuple(figure(report, cap) for figure in ALL)
