"""Says that a run's data has moved on, and writes the plan that its micro-batches need beside the plan in use.

Ranks send the shapes of their latest micro-batches only once the data has moved on. All of them find that by the same
sums. The shapes go through the store of the process group, so that no rank waits for a GPU or inside a collective.
Nothing is captured while a run goes on: the revised plan is for the next start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from thdprof.compare.drift import DriftTest
from thdprof.compare.revision import Revision, revise
from thdprof.dispatch import Bucket, Shape
from thdprof.errors import DataError
from thdprof.files import write_text
from thdprof.megatron_limits.run import is_dynamic
from thdprof.plan import Plan
from thdprof.runtime.rank_totals import rank_and_size
from thdprof.runtime.stats import Stats

COMPARED_EVERY = 100
"""Steps between two comparisons of the observed shares with the plan's."""
_HEAD = "# Written by a run whose data has moved on, which replaces it only while all below has sha256:"
_WAIT = timedelta(seconds=60)
"""How long rank 0 waits for the shapes of ranks that have ended the same step."""
_NUMBERS = itertools.count()
"""Counts the watches of this process, which all ranks make in the same order, for keys of their own."""
_ANALYSE = "run `thdprof check PLAN DATA` with the data that is trained on, and analyse it again for a plan that fits"


class DriftWatch:
    """Compares a run with its plan every COMPARED_EVERY steps, on every rank; rank 0 says and writes what it finds."""

    def __init__(self, plan: Plan, *, path: Path | None, say: Callable[[str], None]) -> None:
        """A watch over a run by `plan` that begins now.

        Args:
            path: the plan's file; `NAME-revised.yaml` is written beside it. None: no file is written.
            say: writes one line to the run's log; called on rank 0 alone.
        """
        self._plan, self._path, self._say = plan, path, say
        self._rank, self._num_ranks = rank_and_size()
        self._key = f"thdprof/shapes/{next(_NUMBERS)}"
        self._test = DriftTest(plan)
        self._iteration = self._steps = 0
        self._compared = 0, 0  # the last step before a comparison, and the number of steps since the one before
        self._shapes = Counter[Shape]()  # of the micro-batches in these steps that this rank counts
        self._said: tuple[Bucket, ...] | None = None
        self._lacking: tuple[Bucket, ...] = ()

    def end_step(self, iteration: int) -> bool:
        """Count a step; returns whether the run is compared after it: `take` follows then, and `look` a step later.

        Args:
            iteration: number of the step that ended.
        """
        self._steps, self._iteration = self._steps + 1, iteration
        return iteration % COMPARED_EVERY == 0

    def take(self, own: Stats, *, counts: bool = True) -> None:
        """Take the shapes of this rank's micro-batches since the last call.

        Args:
            own: this rank's counters, whose shapes are emptied.
            counts: whether this rank counts its micro-batches for all that share them.
        """
        self._compared, self._shapes = (self._iteration, self._steps), Counter(own.shapes if counts else ())
        self._steps = 0
        own.shapes.clear()

    def look(self, totals: Stats, *, captured_bytes: Mapping[Bucket, int]) -> None:
        """Compare the counters of all ranks so far, `totals`, with the plan. Every rank calls it with the same ones.

        A line is said when the data has moved on, and again only when it needs other buckets than were said.
        """
        by_shape = totals.shape_fallbacks
        undecided = totals.dispatched - by_shape - totals.replays.total()
        moved = self._test.moved(totals.replays, by_shape=by_shape, undecided=undecided)
        seen = None if moved is None else self._gather()
        if seen is None:
            return
        iteration, steps = self._compared
        source = f"{steps} steps until step {iteration} of a run by the plan {self._plan.identity}"
        try:
            revision = revise(self._plan, seen, steps=steps, source=source, lacking=self._lacking)
        except (ArithmeticError, DataError, ValueError) as error:  # training goes on
            self._say(
                f"thdprof, step {iteration}: no plan for the data that has moved on: {error}; {moved}; {_ANALYSE}"
            )
            return
        buckets = () if revision is None else tuple(revision.plan.captured)
        if buckets == self._said:
            return
        self._said = buckets
        what = _ANALYSE
        if revision is not None:
            self._lacking = revision.lacking or self._lacking
            what = f"{revision.describe(captured_bytes)}; {self._write(revision)}"
        self._say(f"thdprof, step {iteration}: the data is not what the plan was made from: {moved}; {what}")

    def _gather(self) -> Counter[Shape] | None:
        """The latest shapes of all ranks, each micro-batch counted once; None on other ranks than rank 0."""
        seen = Counter(self._shapes)
        if self._num_ranks > 1:
            store, key = dist.distributed_c10d._get_default_store(), f"{self._key}/{self._compared[0]}"
            if self._rank != 0:
                with suppress(RuntimeError):  # rank 0 has ended
                    store.set(f"{key}/{self._rank}", json.dumps([[*astuple(shape), n] for shape, n in seen.items()]))
                return None
            try:
                for others in [f"{key}/{rank}" for rank in range(1, self._num_ranks)]:
                    store.wait([others], _WAIT)
                    seen.update({Shape(*shape): n for *shape, n in json.loads(store.get(others))})
                    store.delete_key(others)
            except RuntimeError:  # a rank has ended: without its shapes no bucket is named
                return Counter()
        if is_dynamic(self._plan):  # every rank that shares a micro-batch has counted it
            seen = Counter({shape: round(n / shape.cp_size) for shape, n in seen.items()})
        return seen

    def _write(self, revision: Revision) -> str:
        """Write the revised plan beside the plan in use, over one that a run has written and nobody has changed since.
        Returns what to do, as a part of a sentence.
        """
        if self._path is None:
            return f"the plan has no file to write a revised one beside: {_ANALYSE}"
        path, text = self._path.with_name(f"{self._path.stem}-revised.yaml"), revision.plan.to_yaml()
        try:
            if os.path.lexists(path) and not _is_of_a_run(path.read_text(encoding="utf-8")):
                return f"{path} is not of a run, and was left as it is: move it away for a revised plan"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{_HEAD}{_digest(text)}\n{text}", force=True)
        except (DataError, OSError, ValueError) as error:  # training goes on
            return f"the revised plan could not be written: {error}"
        return f"start next by the revised plan, {path}"


def _is_of_a_run(text: str) -> bool:
    head, _, rest = text.partition("\n")
    return head == _HEAD + _digest(rest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
