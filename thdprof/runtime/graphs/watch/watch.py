"""The watch of one graphed module: which micro-batches it verifies, what it found, and which buckets it refuses."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from thdprof.dispatch import Bucket
from thdprof.runtime.graphs.gradients import GradientBuffers
from thdprof.runtime.graphs.watch.findings import Spreads, Verified
from thdprof.runtime.graphs.watch.readback import Readback
from thdprof.runtime.graphs.watch.sampling import is_sampled
from thdprof.runtime.graphs.watch.twin import Subject, Twin
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.stats import Stats

logger = logging.getLogger(__name__)

SETTLED_AFTER = 64
"""Micro-batches after a verified one at which ranks that must agree ask each other what they found. It is more than a
schedule has between a micro-batch's forward and its backward; where it is not, they agree after the next verified one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a module's ranks verify the same micro-batches and refuse the same buckets."""

    communicates: bool = False
    """Whether passes communicate with other ranks."""
    agreed: Callable[[bool], bool] | None = None
    """Returns whether its argument is true on every rank that communicates inside the module. All of them call it as
    often, in the same order. None: the ranks have no way to agree.
    """

    @property
    def possible(self) -> bool:
        """Whether the module can be watched."""
        return not self.communicates or self.agreed is not None


class Watch:
    """Verifies one in `every` micro-batches of a module, and refuses the buckets that gave wrong numbers."""

    def __init__(
        self,
        every: int,
        buckets: Sequence[Bucket],
        *,
        agreement: Agreement,
        deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled,
        stats: Callable[[], Stats],
        name: str = "",
    ) -> None:
        """A watch that has seen no micro-batch.

        Args:
            every: one in so many micro-batches is verified.
            buckets: the module's buckets, alike on all ranks that communicate inside it.
            agreement: how ranks agree.
            deterministic: returns whether a replay and an eager run must be equal bit for bit.
            stats: returns the counters to which findings are added.
            name: what is watched, such as `model chunk 0`, for messages.
        """
        self.every = every
        """One in so many micro-batches is verified."""
        self._buckets, self._agreement, self._deterministic = tuple(buckets), agreement, deterministic
        self._stats, self._name = stats, name
        self._number, self._due, self._off = -1, False, False
        self._settle: deque[int] = deque()
        self._waiting: list[tuple[Watched, Readback]] = []
        self._suspects: set[Bucket] = set()
        self._quarantined: set[Bucket] = set()
        self._told_of_memory = False
        self._last_good: int | None = None
        self.spreads = Spreads()
        """How eager runs of the module differ among themselves."""

    def next_microbatch(self) -> None:
        """Count a micro-batch that begins now, and settle what is to be settled before it."""
        self._number += 1
        if self._waiting:
            self.read(wait=False)
        while self._settle and self._settle[0] <= self._number:
            self._settle.popleft()
            self._agree()
        self._due = not self._off and is_sampled(self._number, self.every)

    def refuses(self, bucket: Bucket) -> bool:
        """Whether micro-batches of `bucket` must run eagerly."""
        return bucket in self._quarantined

    @property
    def is_due(self) -> bool:
        """Whether it is the turn of the micro-batch that runs now, and `verifies` was not asked yet."""
        return self._due

    def verifies(self, *, replays: bool, missing_bytes: int = 0) -> bool:
        """Whether to verify this micro-batch, before it runs: whether it is its turn, and all ranks replay it.

        Args:
            replays: whether this rank replays it, with gradients.
            missing_bytes: bytes of memory that this rank lacks for the eager run; it is then not verified.
        """
        if not self._due:
            return False
        self._due = False
        if missing_bytes and not self._told_of_memory:
            self._told_of_memory = True
            logger.warning(
                "%smicro-batch %d is not verified (graphs.verify): there is no room to run it eagerly beside graphs, "
                "%.1f GiB are missing; later ones are tried again, without another word",
                self._prefix,
                self._number,
                missing_bytes / 2**30,
            )
        can = replays and not missing_bytes
        if self._agreement.agreed is None:
            return can
        everywhere = self._agreement.agreed(can)
        if everywhere:
            self._settle.append(self._number + SETTLED_AFTER)
        return everywhere

    def begin(
        self, subject: Subject, tensors: Sequence[torch.Tensor], packed: PackedSequence, bucket: Bucket, slot: int
    ) -> Watched:
        """Verify the micro-batch that is about to replay `bucket` in the slot with this number.

        Args:
            subject: the module.
            tensors: the micro-batch's tensor arguments.
            packed: its metadata, padded for the bucket, in memory of its own.
            bucket: its bucket.
            slot: number of the slot.
        """
        exact = self._deterministic()
        twin = Twin(subject, tensors, packed, number=self._number, exact=exact)
        return Watched(self, twin, number=self._number, bucket=bucket, slot=slot, exact=exact)

    def await_result(self, watched: Watched, result: Readback) -> None:
        """Read `result` when it is on the host."""
        self._waiting.append((watched, result))

    def twin_failed(self, error: Exception) -> None:
        """End the watch, because an eager pass failed on this rank.

        Raises:
            RuntimeError: other ranks are in communication with that pass.
        """
        self._off = True
        if self._agreement.communicates:
            raise RuntimeError(
                f"{self._prefix}the eager run of a verified micro-batch failed on this rank ({type(error).__name__}: "
                f"{error}), while others communicate with it: training cannot go on; with graphs.verify null in the "
                "plan it could"
            ) from error
        logger.warning(
            "%sno more micro-batches are verified (graphs.verify): the eager run of one failed: %s: %s",
            self._prefix,
            type(error).__name__,
            error,
        )

    def read(self, *, wait: bool) -> None:
        """Take in the results that are on the host.

        Args:
            wait: whether to wait for those that are not.
        """
        still = []
        for watched, result in self._waiting:
            if wait or result.is_ready():
                self._take(watched.verified(result))
            else:
                still.append((watched, result))
        self._waiting = still

    def graphs_dropped(self) -> None:
        """Forget what was found of graphs that are gone: buckets that were refused are captured anew.

        Results that the GPU has not made by now are dropped unread: it may wait for a rank that has ended.
        """
        with suppress(RuntimeError):  # the GPU may be gone: whoever ends the run tells why
            self.read(wait=False)
        self._waiting.clear()
        self._suspects.clear()
        self._quarantined.clear()

    def _take(self, verified: Verified) -> None:
        self._stats().verified[verified.bucket] += 1
        if not verified.wrong:
            self._last_good = verified.number
            return
        self._stats().mismatches[verified.bucket] += 1
        since = "none before it was verified" if self._last_good is None else f"micro-batch {self._last_good} agreed"
        logger.error(
            "%swrong numbers: %s (%s). Its bucket runs eagerly %s; weights may have taken in wrong gradients since "
            "the last micro-batch that agreed: go back to a checkpoint from before it",
            self._prefix,
            verified.told(),
            since,
            "from here on" if self._agreement.agreed is None else "as soon as all ranks know",
        )
        if self._agreement.agreed is None:
            self._quarantined.add(verified.bucket)
        else:
            self._suspects.add(verified.bucket)

    def _agree(self) -> None:
        """Refuse the buckets that any rank suspects; all ranks come here at the same micro-batch."""
        assert self._agreement.agreed is not None  # only then is anything to be settled
        self.read(wait=True)
        if self._agreement.agreed(not self._suspects):
            return
        for bucket in self._buckets:
            if not self._agreement.agreed(bucket not in self._suspects):
                self._quarantined.add(bucket)
        self._suspects.clear()

    @property
    def _prefix(self) -> str:
        return f"{self._name}: " if self._name else ""


class Watched:
    """A replay that is verified: it hands what the replay does to the twin, and the result to the watch."""

    def __init__(self, watch: Watch, twin: Twin, *, number: int, bucket: Bucket, slot: int, exact: bool) -> None:
        self._watch = watch
        self._twin: Twin | None = twin  # None: it has ended, or failed
        self._number, self._bucket, self._slot, self._exact = number, bucket, slot, exact

    def forward_ended(self, outputs: Sequence[torch.Tensor]) -> None:
        """The replay of the forward has returned `outputs`.

        Raises:
            RuntimeError: as `backward_ended`.
        """
        with self._failing_alone():
            if self._twin is not None:
                self._twin.forward_ended(outputs)

    def backward_begins(
        self, gradients: GradientBuffers, touched: Sequence[bool], output_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """The replay of the backward is about to add to `gradients`.

        Raises:
            RuntimeError: as `backward_ended`.
        """
        with self._failing_alone():
            if self._twin is not None:
                self._twin.backward_begins(gradients, touched, output_grads)

    def gradients_complete(self, gradients: GradientBuffers, complete: Sequence[bool]) -> None:
        """The replay of a piece's backward has completed some of `gradients`, which hooks may change from here on.

        Raises:
            RuntimeError: as `backward_ended`.
        """
        with self._failing_alone():
            if self._twin is not None:
                self._twin.gradients_complete(gradients, complete)

    def backward_ended(self, gradients: GradientBuffers, input_grads: Sequence[torch.Tensor | None]) -> None:
        """The replay of the whole backward has added to `gradients` and made `input_grads`.

        Raises:
            RuntimeError: the eager run failed while other ranks communicated with it.
        """
        with self._failing_alone():
            if self._twin is not None:
                self._watch.await_result(self, self._twin.backward_ended(gradients, input_grads))
        self._twin = None

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Let an error inside the block, such as too little memory for a copy, end the watch and not the training."""
        try:
            yield
        except Exception as error:
            self._twin = None
            self._watch.twin_failed(error)

    def verified(self, result: Readback) -> Verified:
        """What was found."""
        return Verified(
            number=self._number,
            bucket=self._bucket,
            slot=self._slot,
            exact=self._exact,
            differences=self._watch.spreads.applied(result.differences()),
        )
