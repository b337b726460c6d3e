"""What a report's figures show and say: pure functions of plan, profile and cap. Each finding carries its sentence."""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings.caps import CapCurve, Choice, cap_curve, choice
from thdprof.analyze.report.findings.graphs import Memory, Observed, memory, observed
from thdprof.analyze.report.findings.run import Drift, Parts, Steps, drift, parts, steps
from thdprof.analyze.report.findings.shapes import Joint, Shapes, joint, shapes

__all__ = [
    "NO_PARTS",
    "NO_STATS",
    "CapCurve",
    "Choice",
    "Drift",
    "Joint",
    "Memory",
    "Observed",
    "Parts",
    "Sentence",
    "Shapes",
    "Steps",
    "cap_curve",
    "choice",
    "drift",
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
    """What one figure finds."""

    id: str
    """The figure's."""
    text: str
    drawn: bool
    """Whether there is anything to draw."""


def sentences(report: Report, cap: int) -> tuple[Sentence, ...]:
    """What the report finds, in its order."""
    by_part, seen = parts(report, cap), observed(report, cap)
    found: list[tuple[str, str | None]] = [
        ("shapes", shapes(report, cap).title),
        ("joint", joint(report, cap).title),
        ("caps", cap_curve(report, cap).title),
        ("choice", choice(report, cap).title),
        ("steps", steps(report, cap).title),
        ("drift", drift(report, cap).title),
        ("parts", None if by_part is None else by_part.title),
        ("memory", memory(report, cap).title),
        ("observed", None if seen is None else seen.title),
    ]
    notes = {"parts": NO_PARTS, "observed": NO_STATS}
    return tuple(Sentence(id=name, text=text or notes[name], drawn=text is not None) for name, text in found)
