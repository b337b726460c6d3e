"""Reports which recipes could train by a plan: as text, a line each, and as one JSON object (`thdprof.recipes/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thdprof.files import json_text
from thdprof.megatron_limits.quantization import UNMEASURED
from thdprof.megatron_limits.recipes import HOPPER, Coverage, Verdict, counts, missing, reasons
from thdprof.words import counted

SCHEMA = "thdprof.recipes/1"
_FOOT = (
    "A plan's graphs take the place of Megatron's own (cuda_graph_impl, cuda_graph_scope). MXFP8 and NVFP4 are "
    f"accepted with {UNMEASURED}=allow alone."
)
_MEANINGS = {
    "refused": "install refuses at least one of the recipe's settings.",
    "accepted unmeasured": "install refuses nothing, but no row has one of the settings, or none ran on that type of "
    "GPU.",
    "proved": "install refuses none of the recipe's settings, each of them was run in some row of benchmarks/results, "
    "replayed beside eager training, and the recipe is for Hopper GPUs (h100, h200): all rows ran on H200s. Rows have "
    "small models, or a few layers of larger ones, on at most 4 GPUs of one host: no recipe was run whole, nor at its "
    "size. Layer graphs serve a recompute setting by keeping what they hold.",
}
"""The verdicts' meanings."""
_MOST = 12
"""Lines of a table of settings; the rest is counted."""


def described(coverage: Coverage) -> str:
    """The short report: counts for each type of GPU, what refuses recipes, and what was not measured."""
    groups = [(gpu or "no type named", coverage.of_gpu(gpu)) for gpu in coverage.gpus]
    groups += [("fine-tuning", coverage.fine_tuning), ("all", coverage.verdicts)]
    lines = [f"{coverage.bridge}: {counted(len(coverage.verdicts), 'performance recipe')}", ""]
    head = ["", "recipes", "refused", "accepted unmeasured", "proved"]
    lines += _table([head, *[[name, str(len(found)), *map(str, counts(found).values())] for name, found in groups]])
    refused = reasons(coverage.verdicts)
    if refused:
        rows = [[name, str(number), str(alone)] for name, number, alone in refused]
        lines += ["", *_table([["refused because of", "recipes", "of these nothing else"], *rows])]
    unmeasured = missing(coverage.verdicts)
    if unmeasured:
        rows = [[name, str(number)] for name, number in unmeasured[:_MOST]]
        lines += ["", *_table([["accepted, without a row on a GPU", "recipes"], *rows])]
        if len(unmeasured) > _MOST:
            lines.append(f"and {counted(len(unmeasured) - _MOST, 'more setting')} (--json)")
    return "\n".join([*lines, "", _definitions(), _FOOT, ""])


def listed(coverage: Coverage) -> str:
    """A line for each recipe, and what the verdicts mean."""
    lines = [f"{verdict.name}: {_told(verdict)}" for verdict in coverage.verdicts]
    return "\n".join([*lines, "", _definitions(), ""])


def _definitions() -> str:
    return "\n".join(f"{kind}: {_MEANINGS[kind]}" for kind in ("proved", "accepted unmeasured"))


def _told(verdict: Verdict) -> str:
    if verdict.refusals:
        return f"refused: {'; '.join(verdict.refusals)}"
    without = [*verdict.unmeasured, *verdict.unknown]
    if not verdict.is_for_hopper:
        without.append(f"no row ran on {verdict.gpu or 'an unnamed type of GPU'}")
    return f"{verdict.kind}: {'; '.join(without)}" if without else verdict.kind


def to_json(coverage: Coverage) -> str:
    """Everything as one JSON object."""
    groups = {gpu: coverage.of_gpu(gpu) for gpu in coverage.gpus}
    return json_text(
        {
            "schema": SCHEMA,
            "bridge": str(coverage.bridge),
            "meanings": _MEANINGS,
            "rows_ran_on": ["h200"],
            "proved_for": list(HOPPER),
            "counts": {
                "gpus": {gpu: _counts(found) for gpu, found in groups.items()},
                "fine_tuning": _counts(coverage.fine_tuning),
                "all": _counts(coverage.verdicts),
            },
            "refused_by": [
                {"limit": name, "recipes": number, "alone": alone} for name, number, alone in reasons(coverage.verdicts)
            ],
            "unmeasured": [{"setting": name, "recipes": number} for name, number in missing(coverage.verdicts)],
            "recipes": [_verdict(verdict) for verdict in coverage.verdicts],
        }
    )


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    found = counts(verdicts)
    return {
        "recipes": len(verdicts),
        "refused": found["refused"],
        "accepted": found["accepted unmeasured"] + found["proved"],
        "proved": found["proved"],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "gpu": verdict.gpu or None,
        "is_for_hopper": verdict.is_for_hopper,
        "fine_tuning": verdict.fine_tuning,
        "verdict": verdict.kind,
        "refusals": dict(verdict.refusals),
        "settings": {name: list(rows) for name, rows in verdict.settings.items()},
        "replaced": list(verdict.replaced),
        "unknown": list(verdict.unknown),
    }


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text; the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
