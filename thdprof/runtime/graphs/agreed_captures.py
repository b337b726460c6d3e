"""Captures that succeed on every rank that shares their collectives, or on none; and what is told of each.

A rank that replays while a peer runs eagerly would hold its group back, or replay other collectives than its peer: so
ranks that communicate inside captured passes agree about every capture, in the order in which all of them make them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch

from thdprof.dispatch import Bucket
from thdprof.runtime.captured import Captured
from thdprof.runtime.graphs.failed_captures import refuse_lost_state
from thdprof.runtime.graphs.slots import SlotMemory
from thdprof.runtime.graphs.surroundings import (
    Surroundings,
    cause_of_warmup,
    is_programming_error,
    refuse_half_a_pass,
)

logger = logging.getLogger(__name__)

ELSEWHERE = "it failed on another rank, which shares its collectives; that rank's log says why"
"""The reason of a capture that this rank has dropped although it succeeded here."""


class AgreedCaptures[SomeSlot: SlotMemory]:
    """Captures buckets in slots, on all peers alike."""

    def __init__(
        self,
        make: Callable[[SomeSlot, Bucket], int],
        *,
        agreed: Callable[[bool], bool],
        surroundings: Surroundings,
        on_capture: Callable[[Captured], None],
        judged: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        """No captures yet.

        Args:
            make: captures a bucket in a slot, and returns the bytes by which the slot's pool grew.
            agreed: whether what succeeded here has succeeded on every peer; all peers call it together.
            surroundings: tells whether passes communicate.
            on_capture: called after every capture that succeeded.
            judged: the error as which a failure is judged: a WarmupError may be fatal.
        """
        self._make, self._agreed, self._surroundings = make, agreed, surroundings
        self._on_capture, self._judged = on_capture, judged
        self.failures: dict[Bucket, str] = {}
        """Buckets that could not be captured, and the reason of each."""

    def has(self, slot: SomeSlot, bucket: Bucket) -> bool:
        """Whether `slot` has graphs of `bucket`, as on all peers; they are captured now if they were not before.

        If a capture fails here or on a peer, the slot begins anew on all of them: the memory that the failed capture
        took is given back, and the buckets that the slot had are captured again.

        Raises:
            RuntimeError: a pass before the capture failed while peers communicate with it, a failed capture left torch
                in a state that could not be put right, or a peer met a programming error.
            Exception: a programming error, as it was raised here.
        """
        if bucket in slot.held():
            return True
        if bucket in self.failures:
            return False
        reason, grown, begun = "", 0, perf_counter()
        bug: BaseException | None = None  # no other error is kept: its traceback holds memory of the failed capture
        try:
            grown = self._make(slot, bucket)
        except Exception as error:
            refuse_lost_state(error)
            refuse_half_a_pass(self._judged(error), self._surroundings)
            reason = f"{type(error).__name__}: {error}"
            bug = cause_of_warmup(error) if is_programming_error(error) else None
        if self._agreed(not reason):
            self._on_capture(Captured(bucket=bucket, seconds=perf_counter() - begun, pool_bytes=grown))
            return True
        self.failures[bucket] = reason or ELSEWHERE
        if not self._agreed(bug is None):  # peers, too, are here only after a failure: all of them end together
            raise bug or RuntimeError(f"capture of {bucket} met a bug on another rank; that rank's log says which")
        logger.warning("capture of %s failed, its micro-batches run eagerly: %s", bucket, self.failures[bucket])
        again = [other for other in slot.held() if other != bucket]
        slot.begin_anew()
        gc.collect()  # tensors of the failed capture may be in cycles
        torch.cuda.empty_cache()
        for other in again:
            self.has(slot, other)
        return False

    def all_of(self, slots: Sequence[SomeSlot], buckets: Sequence[Bucket]) -> Iterator[tuple[SomeSlot, Bucket]]:
        """Capture every bucket in every slot, and yield each pair before its capture.

        The largest bucket comes first, so that the others fit into its memory; the order is that of all peers.
        """
        for slot in slots:
            for bucket in sorted(buckets, reverse=True):
                yield slot, bucket
                self.has(slot, bucket)
