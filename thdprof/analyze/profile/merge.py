"""Joins profiles of several datasets or shards into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.profile.file import COLUMNS, PartOfRun
from thdprof.analyze.profile.run_profile import RunProfile, combine_caps
from thdprof.errors import DataError, UsageError
from thdprof.training import TrainingSettings

_OF_THE_DATA = ("train_samples", "weights")
"""Training settings that may differ between parts: they say how much data a run takes, not how its steps are formed."""


def merge_profiles(profiles: Sequence[RunProfile], *, names: Sequence[str]) -> RunProfile:
    """Join profiles into one that has the parts of all; the counts of parts that share a name are added up.

    Args:
        names: name of each profile in error messages.

    Raises:
        UsageError: fewer than two profiles are given.
        DataError: two profiles have different settings or cost tables, or count the same data.
    """
    import pandas as pd

    if len(profiles) < 2:
        raise UsageError("merge: give at least two profiles")
    first = profiles[0]
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        _check_alike(first, profile, names[0], name)
    by_name: dict[str, list[PartOfRun]] = {}
    seen: dict[str, str] = {}
    for profile, name in zip(profiles, names, strict=True):
        for part in profile.parts:
            for fingerprint in part.fingerprints:
                if fingerprint in seen:
                    where = "given twice" if seen[fingerprint] == name else f"in {seen[fingerprint]}"
                    raise DataError(f"{name}: part {part.name}: the same data is {where}; leave one out")
                seen[fingerprint] = name
            by_name.setdefault(part.name, []).append(part)
    keys = [name for name in COLUMNS if name != "count"]
    together = pd.concat([p.cells for p in profiles], ignore_index=True)
    cells = together.groupby(keys, sort=False, as_index=False, observed=True).agg({"count": "sum"})
    training = first.training
    if any(p.training.train_samples != training.train_samples for p in profiles):
        training = replace(training, train_samples=None)
    if any(p.training.weights != training.weights for p in profiles):
        training = replace(training, weights=None)
    parts = [
        of_name[0] if len(of_name) == 1 else _added(of_name, first.costs, training) for of_name in by_name.values()
    ]
    return RunProfile(cells.astype(COLUMNS), training=training, costs=first.costs, parts=parts)


def same_settings(one: TrainingSettings, other: TrainingSettings) -> tuple[str, Any, Any] | None:
    """The first setting that would form steps in another way, with both values; None where all are equal."""
    for name in (field.name for field in fields(TrainingSettings)):
        if name not in _OF_THE_DATA and getattr(one, name) != getattr(other, name):
            return name, getattr(one, name), getattr(other, name)
    return None


def _check_alike(one: RunProfile, other: RunProfile, name: str, other_name: str) -> None:
    differs = same_settings(one.training, other.training)
    if differs is not None:
        setting, here, there = differs
        raise DataError(f"{other_name}: {setting} is {there}, but {here} in {name}: profile both with the same")
    for field in CostTable.model_fields:
        if getattr(one.costs, field) != getattr(other.costs, field):
            raise DataError(
                f"{other_name}: another cost table than that of {name} ({field} differs: {other.costs.name} on "
                f"{other.costs.hardware}, {one.costs.name} on {one.costs.hardware}): profile both with the same"
            )


def _added(parts: Sequence[PartOfRun], costs: CostTable, training: TrainingSettings) -> PartOfRun:
    """Add up parts that share a name."""
    caps = combine_caps(list(parts), costs, training)
    if not caps:
        raise DataError(f"part {parts[0].name}: its profiles have no cap in common; give each a --part name of its own")
    steps = sum(p.steps for p in parts)
    return PartOfRun(
        name=parts[0].name,
        format=parts[0].format,
        uris=[uri for p in parts for uri in p.uris],
        fingerprints=[f for p in parts for f in p.fingerprints],
        exact=all(p.exact for p in parts),
        microbatches=sum(p.microbatches for p in parts),
        steps=steps,
        eager_step_ms=sum(p.eager_step_ms * p.steps for p in parts) / steps,
        caps=caps,
        warnings=list(dict.fromkeys(w for p in parts for w in p.warnings)),
    )
