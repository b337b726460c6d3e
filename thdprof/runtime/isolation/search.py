"""Looks for the first leak in a mode, and halves what was perturbed until it has a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.runtime.isolation.compare import Baseline, Movement
from thdprof.runtime.isolation.passes import Passes
from thdprof.runtime.isolation.regions import Region, rounds
from thdprof.runtime.isolation.result import Leak, Mode, ModeCheck
from thdprof.runtime.isolation.subject import ModeRun

_REPEATS = 4
"""Unperturbed passes, besides the first, before a leak is told or a spread is believed. One is enough for a module that
repeats itself and has no leak.
"""


@dataclass(kw_only=True)
class Search:
    """Looks for the first leak in one mode after the other."""

    regions: Sequence[Region]
    """What is perturbed."""
    documents: Sequence[Region]
    """What is watched."""
    n_tokens: int
    """Tokens of the micro-batch."""
    tolerance: float
    """Largest difference that counts as none, as a share of a tensor's largest absolute value."""
    eager: Baseline | None = None
    """The unperturbed passes of the mode `eager`."""

    def check(self, way: ModeRun, passes: Passes) -> tuple[ModeCheck, Leak | None]:
        """What was compared in one mode, and the first leak in it."""
        baseline = Baseline(passes.perturbed(()), self.documents, self.n_tokens, self.tolerance)
        distance = None if self.eager is None else baseline.distance(self.eager)
        if way.mode == "eager":
            self.eager = baseline
        self._repeat(baseline, passes, 1)
        if not baseline.deterministic():
            self._repeat(baseline, passes, _REPEATS - 1)
        first: tuple[Sequence[Region], Movement] | None = None
        unseen = set[int]()
        for together in rounds(self.regions):
            moved, unmoved = self._perturb(baseline, passes, together)
            if moved is not None and baseline.deterministic():  # is it the module itself that does not repeat?
                self._repeat(baseline, passes, _REPEATS - 1)
                if not baseline.deterministic():
                    moved, unmoved = self._perturb(baseline, passes, together)
            unseen |= unmoved
            if moved is not None and (first is None or moved.tensor.what == "output"):
                first = together, moved
                if moved.tensor.what == "output":  # told rather than its mirror image among gradients
                    break
        found = None if first is None else self._named(baseline, passes, *first)
        of = [tensor.what for tensor in baseline.tensors]
        check = ModeCheck(
            mode=way.mode,
            bucket=way.bucket,
            outputs=of.count("output"),
            gradients=of.count("gradient"),
            deterministic=baseline.deterministic(),
            spread=max(baseline.spreads),
            passes=passes.count,
            unseen=tuple(sorted(unseen)),
            distance_from_eager=distance,
        )
        return check, None if found is None else _leak(way.mode, *found)

    def _repeat(self, baseline: Baseline, passes: Passes, times: int) -> None:
        for _ in range(times):
            baseline.repeat(passes.perturbed(()))

    def _perturb(
        self, baseline: Baseline, passes: Passes, together: Sequence[Region]
    ) -> tuple[Movement | None, set[int]]:
        """The first movement of a document outside `together` when those are perturbed, and the documents inside that
        did not move.
        """
        now = passes.perturbed(together)
        watch = [document for document in self.documents if document not in together]
        return baseline.first_moved(now, watch), baseline.unmoved(now, together)

    def _named(
        self, baseline: Baseline, passes: Passes, together: Sequence[Region], moved: Movement
    ) -> tuple[tuple[Region, ...], Movement]:
        """The fewest of `together` that still move the document of `moved`, by halving; and what they move."""
        suspects = tuple(together)
        while len(suspects) > 1:
            middle = len(suspects) // 2
            for half in (suspects[:middle], suspects[middle:]):
                again = baseline.first_moved(passes.perturbed(half), [moved.region])
                if again is not None:
                    suspects, moved = half, again
                    break
            else:
                break
        now = passes.perturbed(suspects)
        watch = [document for document in self.documents if document not in suspects]
        return suspects, baseline.first_moved(now, watch) or moved


def _leak(mode: Mode, sources: tuple[Region, ...], moved: Movement) -> Leak:
    return Leak(
        mode=mode,
        what=moved.tensor.what,
        name=moved.tensor.name,
        sources=sources,
        document=moved.region.number,
        token=moved.token,
        token_in_document=moved.token - moved.region.begin,
        tokens_moved=moved.tokens_moved,
        moved=moved.moved,
        limit=moved.limit,
    )
