"""The report's figures: each draws one finding and shows itself in a notebook. No number is computed here.

Every function takes the report and a cap in documents, so that a notebook can redraw all figures for another cap.
"""

from __future__ import annotations

from collections.abc import Callable

from thdprof.analyze.report import findings
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures import draw_graphs, draw_microbatches
from thdprof.analyze.report.figures.drawing import Drawing, Note

__all__ = [
    "ALL",
    "Drawing",
    "Note",
    "caps",
    "choice",
    "drift",
    "joint",
    "memory",
    "observed",
    "parts",
    "shapes",
    "steps",
]


def shapes(report: Report, cap: int) -> Drawing:
    """Histograms and cumulative curves of a micro-batch's documents and of the tokens of its longest document."""
    return draw_microbatches.shapes(findings.shapes(report, cap))


def joint(report: Report, cap: int) -> Drawing:
    """A map of micro-batches by documents and by tokens of the longest document."""
    return draw_microbatches.joint(findings.joint(report, cap))


def caps(report: Report, cap: int) -> Drawing:
    """The fallbacks and the step time under every single cap."""
    return draw_graphs.caps(findings.cap_curve(report, cap))


def choice(report: Report, cap: int) -> Drawing:
    """The plan's graphs beside their alternatives."""
    return draw_graphs.choice(findings.choice(report, cap))


def steps(report: Report, cap: int) -> Drawing:
    """Documents of a micro-batch beside those of the fullest micro-batch of a rank and of a step."""
    return draw_microbatches.steps(findings.steps(report, cap))


def drift(report: Report, cap: int) -> Drawing:
    """Percentiles of documents over the run."""
    return draw_microbatches.drift(findings.drift(report, cap))


def parts(report: Report, cap: int) -> Drawing | Note:
    """Percentiles of documents in each part of the data; a note where the profile has one part only."""
    finding = findings.parts(report, cap)
    if finding is None:
        return Note("parts", findings.NO_PARTS)
    return draw_microbatches.parts(finding)


def memory(report: Report, cap: int) -> Drawing | Note:
    """The slots of every pipeline rank, and graph memory; a note where a sentence says as much."""
    finding = findings.memory(report, cap)
    return draw_graphs.memory(finding) if finding.drawn else Note("memory", finding.title)


def observed(report: Report, cap: int) -> Drawing | Note:
    """Predicted shares beside those of a run; a note where the report has no statistics of a run."""
    finding = findings.observed(report, cap)
    if finding is None:
        return Note("observed", findings.NO_STATS)
    return draw_graphs.observed(finding)


ALL: tuple[Callable[[Report, int], Drawing | Note], ...] = (
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
