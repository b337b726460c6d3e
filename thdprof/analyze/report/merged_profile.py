"""A merged profile, as text for a terminal and as JSON, schema `thdprof.profile/1`."""

from __future__ import annotations

from thdprof.analyze.profile.file import SCHEMA
from thdprof.analyze.profile.run_profile import RunProfile
from thdprof.files import json_text
from thdprof.words import counted, printable


def describe(profile: RunProfile) -> str:
    """One line for each part: its micro-batches, steps, and percentiles of documents in a micro-batch."""
    lines = []
    for part in profile.parts:
        documents = profile.histogram(part=part.name)
        many = counted(part.microbatches, "micro-batch", "micro-batches")
        data = f"{len(part.fingerprints)} datasets added up, " if len(part.fingerprints) > 1 else ""
        lines.append(
            f"{printable(part.name)}: {data}{many} in {counted(part.steps, 'step')}, documents P50 "
            f"{documents.percentile(50.0):,}, P99 {documents.percentile(99.0):,}, max {documents.percentile(100.0):,}\n"
        )
    return "".join(lines)


def to_json(profile: RunProfile) -> str:
    """The profile without its counts as JSON text, schema `thdprof.profile/1`."""
    value = {
        "schema": SCHEMA,
        "microbatches": profile.microbatches,
        "steps": profile.steps,
        "exact": profile.exact,
        "parts": [part.model_dump(mode="json", exclude={"caps", "warnings"}) for part in profile.parts],
        "candidates": profile.curve().to_dict("records"),
    }
    return json_text(value)
