"""The watch of one graphed module: which micro-batches it verifies, what it found, and which buckets it refuses."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thdprof.dispatch import Bucket
from thdprof.runtime.graphs.failed_captures import is_programming_error
from thdprof.runtime.graphs.module_state import GradientBuffers
from thdprof.runtime.graphs.watch.findings import ROUNDS, Evidence, Finding
from thdprof.runtime.graphs.watch.twin import Replayable, Rotation, Run, Subject, Twin
from thdprof.runtime.options import GraphOptions
from thdprof.runtime.padding import Boundaries, PackedSequence
from thdprof.runtime.stats import Stats

logger = logging.getLogger(__name__)

EARLY = 64
"""Up to this number, micro-batches whose number is 0 or a power of two are verified, whatever the rate."""
_WORD = (1 << 64) - 1


def is_sampled(number: int, every: int) -> bool:
    """Whether micro-batch `number`, from 0, is verified: one of each block of `every`, and some early ones.

    The place in the block is scattered, because a fixed one would always meet the same place in the step, and with it
    the same slot.
    """
    if number <= EARLY and number & (number - 1) == 0:
        return True
    block, place = divmod(number, every)
    mixed = (block + 1) * 0x9E3779B97F4A7C15 & _WORD  # SplitMix64: 64 bits that look random
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
    return place == (mixed ^ (mixed >> 31)) % every


ADVICE = (
    "Load a checkpoint from before that, and set graphs.impl to none in the plan to train without graphs. Please "
    "report this line together with the plan and the model's settings"
)
"""What to do after a confirmed mismatch."""


class Watch:
    """Verifies one in `every` micro-batches of a module, and refuses the buckets that gave wrong numbers."""

    def __init__(self, options: GraphOptions, stats: Callable[[], Stats]) -> None:
        """A watch of a module that is run by `options`; it adds findings to the counters that `stats` returns."""
        self.every = options.verify_every
        self.has_ended = False
        """Whether an eager pass failed on this rank, so that nothing more is verified."""
        self._surroundings, self._stats, self._is_in_pieces = options.surroundings, stats, bool(options.cuts)
        self._prefix = f"{options.name}: " if options.name else ""
        self.number = -1
        self.is_due = False
        """Whether it is the turn of the micro-batch that runs now, and `verifies` was not called yet."""
        self._quarantined: set[Bucket] = set()
        self._has_warned_of_memory = False
        self._agreed_in: dict[tuple[Bucket, str], int] = {}  # last micro-batch in which a tensor agreed
        self._rotations: defaultdict[str, Rotation] = defaultdict(Rotation)

    def _is_true_everywhere(self, here: bool) -> bool:
        """Whether `here` is true on every rank that communicates inside the module; all of them ask together."""
        around = self._surroundings
        return around.agreed(here) if around.communicates and around.agreed is not None else here

    def next_microbatch(self) -> None:
        """Count a micro-batch that begins now."""
        self.number += 1
        self.is_due = not self.has_ended and is_sampled(self.number, self.every)

    def refuses(self, bucket: Bucket) -> bool:
        """Whether micro-batches of `bucket` must run eagerly."""
        return bucket in self._quarantined

    def verifies(self, *, replays: bool, missing_bytes: int = 0) -> bool:
        """Whether to verify the micro-batch that is about to run: it is its turn, and all ranks replay it, with
        gradients, and lack no memory for the eager run.
        """
        if not self.is_due:
            return False
        self.is_due = False
        if missing_bytes and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            logger.warning(
                "%smicro-batch %d is not verified (graphs.verify): there is no room to run it eagerly beside graphs, "
                "%.1f GiB are missing; later ones are tried again, without another word",
                self._prefix,
                self.number,
                missing_bytes / 2**30,
            )
        return self._is_true_everywhere(replays and not missing_bytes)

    def begin(
        self,
        subject: Subject,
        lease: Replayable,
        tensors: Sequence[torch.Tensor],
        packed: PackedSequence,
        boundaries: Boundaries,
        slot: int,
        *,
        finding: Finding | None = None,
        name: str = "",
    ) -> Watched:
        """Verify the micro-batch that is about to be replayed, or its part `name`, as `Twin` does."""
        exact = self._surroundings.deterministic()
        twin = Twin(subject, lease, tensors, packed, boundaries, rotation=self._rotations[name], exact=exact)
        return Watched(self, twin, finding or Finding(number=self.number, bucket=lease.bucket, slot=slot), name)

    def end(self, error: Exception) -> None:
        """End the watch, because an eager pass failed on this rank.

        Raises:
            RuntimeError: other ranks are in communication with that pass.
            Exception: `error` itself, where it is a bug and not too little memory or the like.
        """
        self.has_ended = True
        if self._surroundings.communicates:
            raise RuntimeError(
                f"{self._prefix}the eager run of a verified micro-batch failed on this rank ({type(error).__name__}: "
                f"{error}), while others communicate with it: training cannot go on; with graphs.verify null in the "
                "plan it could"
            ) from error
        if is_programming_error(error):
            raise error
        logger.warning(
            "%sno more micro-batches are verified (graphs.verify): the eager run of one failed: %s: %s",
            self._prefix,
            type(error).__name__,
            error,
        )

    def graphs_dropped(self) -> None:
        """Forget what was found of graphs that are gone: buckets that were refused are captured anew."""
        self._quarantined.clear()

    def judge(
        self, replay: Run, eager: Run, twin: Twin, run_eagerly: Callable[[], Run], run_again: Callable[[], Run]
    ) -> tuple[Sequence[str], list[Evidence], bool]:
        """Compare a replay with an eager run; where it looks wrong, run the micro-batch again until that is explained.

        Ranks that communicate inside the module make the same passes: they go on while one of them has to. `twin` names
        what is compared, `run_eagerly` and `run_again` run the micro-batch once more, eagerly or by its graphs. Returns
        the names of the compared tensors, the tensors that are wrong, and whether any was suspicious.
        """
        compared, suspects = twin.examine(replay, eager)
        if self._is_true_everywhere(not suspects):
            return compared, [], False
        replays_again = not (self._is_in_pieces and self._surroundings.reducing())
        for _ in range(ROUNDS - 1):
            names = [one.name for one in suspects]
            for one, distance in zip(suspects, twin.measure(names, run_eagerly(), eager), strict=True):
                one.eager.append(distance)
            if replays_again:
                for one, distance in zip(suspects, twin.measure(names, run_again(), eager), strict=True):
                    one.replayed.append(distance)
            suspects = [one for one in suspects if one.is_open]
            if self._is_true_everywhere(not suspects):
                break
        return compared, suspects, True

    def note(self, finding: Finding) -> None:
        """Count a verified micro-batch, log a mismatch, and refuse its bucket on all ranks."""
        stats, bucket = self._stats(), finding.bucket
        stats.verified[bucket] += 1
        if finding.was_suspicious and not self._is_true_everywhere(not finding.wrong):
            self._quarantined.add(bucket)
        elif finding.was_suspicious:
            stats.suspicions[bucket] += 1
        wrong = [one.name for one in finding.wrong]
        self._agreed_in |= {(bucket, name): finding.number for name in finding.compared if name not in wrong}
        if not wrong:
            return
        stats.mismatches[bucket] += 1
        last = min(self._agreed_in.get((bucket, name), -1) for name in wrong)
        agreed = f"micro-batch {last}, the last one of this bucket in which these tensors agreed"
        since = agreed if last >= 0 else "the start"
        logger.error(
            "%swrong numbers: %s. Its bucket runs eagerly from here on. Wrong gradients may be in the weights since "
            "%s. %s",
            self._prefix,
            finding.describe(),
            since,
            ADVICE,
        )


class Watched:
    """A replay that is verified: it hands what the replay does to the twin, and what was found to the watch."""

    def __init__(self, watch: Watch, twin: Twin, finding: Finding, name: str) -> None:
        self._watch, self._finding, self._name = watch, finding, name
        self._own: Twin | None = twin  # None: it has ended, or failed

    @property
    def _twin(self) -> Twin | None:
        return None if self._watch.has_ended else self._own

    def forward_ended(self, outputs: Sequence[torch.Tensor]) -> None:
        """The replay of the forward has returned `outputs`. It raises what `Watch.end` does, as the others do."""
        self._hand_on(Twin.forward_ended, outputs)

    def backward_begins(self, gradients: GradientBuffers, output_grads: Sequence[torch.Tensor | None]) -> None:
        """The replay of the backward is about to add to `gradients`."""
        self._hand_on(Twin.backward_begins, gradients, output_grads)

    def gradients_complete(self, gradients: GradientBuffers, complete: Sequence[bool]) -> None:
        """The replay of a piece's backward has completed some of `gradients`, which hooks may change from here on."""
        self._hand_on(Twin.gradients_complete, gradients, complete)

    def _hand_on(self, method: Callable[..., None], *args: Any) -> None:
        with self.failing_alone():
            if self._twin is not None:
                method(self._twin, *args)

    def backward_ended(self, gradients: GradientBuffers, input_grads: Sequence[torch.Tensor | None]) -> None:
        """The replay of the whole backward has added to `gradients` and made `input_grads`."""
        with self.failing_alone():
            finding = self._finding
            if self._twin is None:
                return
            with self._twin.repeated(gradients, input_grads) as (replay, run_eagerly, run_again):
                compared, wrong, is_suspicious = self._watch.judge(
                    replay, run_eagerly(), self._twin, run_eagerly, run_again
                )
            for one in wrong:
                one.name = self._name + one.name
            finding.compared += (self._name + name for name in compared)
            finding.wrong[:0], finding.was_suspicious = wrong, finding.was_suspicious or is_suspicious
            finding.left -= 1
            if finding.left == 0:
                self._watch.note(finding)
        self._own = None

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Let an error inside the block, such as too little memory for a copy, end the watch and not the training."""
        try:
            yield
        except Exception as error:
            self._own = None
            self._watch.end(error)


def make_watch(options: GraphOptions, stats: Callable[[], Stats]) -> Watch | None:
    """The watch of a module that is run by `options`; None where none is wanted, or ranks cannot agree."""
    if not options.verify_every:
        return None
    if options.surroundings.communicates and options.surroundings.agreed is None:
        logger.warning(
            "no micro-batch is verified (graphs.verify): ranks communicate inside the module, and have no way to agree "
            "on which ones"
        )
        return None
    return Watch(options, stats)
