"""What a report's figures show and say: pure functions of plan, profile and cap. Each finding carries its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.findings import values
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
    values: dict[str, Any]
    """The numbers, by names that tell the unit; `findings.values` documents them."""


def sentences(report: Report, cap: int) -> tuple[Sentence, ...]:
    """What the report finds, in its order."""
    spread, map_, curve = shapes(report, cap), joint(report, cap), cap_curve(report, cap)
    chosen, fullest, over_run = choice(report, cap), steps(report, cap), drift(report, cap)
    by_part, held, seen = parts(report, cap), memory(report, cap), observed(report, cap)
    found: list[tuple[str, str | None, dict[str, Any]]] = [
        ("shapes", spread.title, values.shapes(spread)),
        ("joint", map_.title, values.joint(map_)),
        ("caps", curve.title, values.caps(curve, report)),
        ("choice", chosen.title, values.choice(chosen, report)),
        ("steps", fullest.title, values.steps(fullest, report)),
        ("drift", over_run.title, values.drift(over_run)),
        ("parts", None if by_part is None else by_part.title, values.parts(by_part)),
        ("memory", held.title, values.memory(held)),
        ("observed", None if seen is None else seen.title, values.observed(report)),
    ]
    notes = {"parts": NO_PARTS, "observed": NO_STATS}
    return tuple(
        Sentence(id=name, text=text or notes[name], drawn=text is not None, values=numbers)
        for name, text, numbers in found
    )
