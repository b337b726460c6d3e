"""The report's figures: each draws one finding and shows itself in a notebook. Nothing is computed here.

Every function takes the report and a cap, so that a notebook which changes the cap redraws all.
"""

from __future__ import annotations

from collections.abc import Callable

from thdprof.analyze.report import findings
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures import draw
from thdprof.analyze.report.figures.canvas import Drawing, Note

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
    """Histogram and cumulative curve of documents and of the longest document."""
    return draw.shapes(findings.shapes(report, cap))


def joint(report: Report, cap: int) -> Drawing:
    """Documents and longest document together."""
    return draw.joint(findings.joint(report, cap))


def caps(report: Report, cap: int) -> Drawing:
    """What every single cap costs."""
    return draw.caps(findings.cap_curve(report, cap))


def choice(report: Report, cap: int) -> Drawing:
    """What was chosen, beside its alternatives."""
    return draw.choice(findings.choice(report, cap))


def steps(report: Report, cap: int) -> Drawing:
    """The fullest micro-batch of ranks and steps."""
    return draw.steps(findings.steps(report, cap))


def drift(report: Report, cap: int) -> Drawing:
    """Documents over the run."""
    return draw.drift(findings.drift(report, cap))


def parts(report: Report, cap: int) -> Drawing | Note:
    """Parts of the data beside one another."""
    found = findings.parts(report, cap)
    if found is None:
        return Note("parts", findings.NO_PARTS)
    return draw.parts(found)


def memory(report: Report, cap: int) -> Drawing:
    """Slots and graph memory."""
    return draw.memory(findings.memory(report, cap))


def observed(report: Report, cap: int) -> Drawing | Note:
    """The prediction beside what happened."""
    found = findings.observed(report, cap)
    if found is None:
        return Note("observed", findings.NO_STATS)
    return draw.observed(found)


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
"""In the order of the report."""
