"""What a run by a plan tells while it trains: counters for logs and writers, and how they compare with the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.install import Installation

COMPARED_EVERY = 100
"""Steps between two comparisons of the observed shares with the plan's."""


class Observer:
    """Counts what an installation did, for one rank of a run."""

    def __init__(
        self, installation: Installation, plan: Plan, *, stats: Path | None, say: Callable[[str], None]
    ) -> None:
        """An observer of a run that begins now.

        Args:
            installation: what `install` returned.
            plan: the plan that the run follows.
            stats: the file that `finish` appends one line of counters to; None for none.
            say: writes one line to the run's log; called on one rank alone.
        """
        self._installation, self._plan, self._stats, self._say = installation, plan, stats, say

    def scalars(self) -> dict[str, float]:
        """The counters so far by their names in TensorBoard and W&B, such as `thdprof/replayed`."""
        return {}

    def log_text(self) -> str:
        """The counters since the last call as a part of Megatron's log line, which separates its parts by ` |`."""
        return ""

    def after_step(self, iteration: int) -> None:
        """Compare the observed shares with the plan's after every COMPARED_EVERY steps, and say how they differ.

        Call it on every rank: the ranks' counters are added up.

        Args:
            iteration: number of the step that ended, from 1.
        """

    def finish(self, *, together: bool) -> None:
        """Append the run's counters to the statistics file.

        Args:
            together: whether all ranks end here, so that their counters can be added up; after an error on this rank
                alone nothing is sent to others.
        """
