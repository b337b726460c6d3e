"""The findings that a report's figures show: pure functions of a plan, its profile and a cap in documents.

Each finding has the sentence that states it as its `title`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings import values
from thdprof.analyze.report.findings.answer import Answer, Number, answer
from thdprof.analyze.report.findings.caps import CapCurve, Choice, cap_curve, choice
from thdprof.analyze.report.findings.every_cap import COLUMNS, EveryCap, every_cap
from thdprof.analyze.report.findings.graphs import Memory, Observed, memory, observed
from thdprof.analyze.report.findings.run import Drift, Parts, Steps, drift, parts, steps
from thdprof.analyze.report.findings.shapes import Joint, Shapes, joint, shapes

__all__ = [
    "COLUMNS",
    "NO_PARTS",
    "NO_STATS",
    "Answer",
    "CapCurve",
    "Choice",
    "Drift",
    "EveryCap",
    "Joint",
    "Memory",
    "Number",
    "Observed",
    "Parts",
    "Sentence",
    "Shapes",
    "Steps",
    "answer",
    "cap_curve",
    "choice",
    "drift",
    "every_cap",
    "joint",
    "memory",
    "observed",
    "parts",
    "sentences",
    "shapes",
    "steps",
]

NO_PARTS = (
    "One part of data was profiled, so differences between shards, or between the components of a blend, are not "
    "known: profile each by itself (analyze --profile) and join them with thdprof merge."
)
NO_STATS = "No statistics of a run were given: thdprof report plan.yaml stats.jsonl compares them."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """The finding of one figure, in words and numbers."""

    id: str
    """The figure's id."""
    text: str
    """The finding in words, or why there is nothing to draw."""
    drawn: bool
    """Whether the figure has anything to draw."""
    values: dict[str, Any]
    """The finding's numbers by name; each name ends in its unit, as `findings.values` documents."""


def sentences(report: Report, cap: int) -> tuple[Sentence, ...]:
    """All findings of the report, in the order of its figures."""
    distributions, together, curve = shapes(report, cap), joint(report, cap), cap_curve(report, cap)
    alternatives, fullest, over_run = choice(report, cap), steps(report, cap), drift(report, cap)
    by_part, captured, outcome = parts(report, cap), memory(report, cap), observed(report, cap)
    findings: list[tuple[str, str | None, dict[str, Any]]] = [
        ("shapes", distributions.title, values.shapes(distributions)),
        ("joint", together.title, values.joint(together)),
        ("caps", curve.title, values.caps(curve, report)),
        ("choice", alternatives.title, values.choice(alternatives, report)),
        ("steps", fullest.title, values.steps(fullest, report)),
        ("drift", over_run.title, values.drift(over_run)),
        ("parts", None if by_part is None else by_part.title, values.parts(by_part)),
        ("memory", captured.title, values.memory(captured)),
        ("observed", None if outcome is None else outcome.title, values.observed(report)),
    ]
    notes = {"parts": NO_PARTS, "observed": NO_STATS}
    return tuple(
        Sentence(
            id=name,
            text=text or notes[name],
            drawn=text is not None and (name != "memory" or captured.drawn),
            values=numbers,
        )
        for name, text, numbers in findings
    )
