"""The one decision about a micro-batch, of one rank or of all ranks whose captured passes share collectives.

Before every micro-batch each rank describes what it could do (`Proposal`). Ranks that share collectives send that as a
message of integers, of which the largest over the ranks count, so that all of them come to one answer (`agree`): the
bucket that holds every rank's micro-batch and a slot that is free on all ranks, or one reason to run eagerly. A rank
that decides alone takes its own proposal for that of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape

Largest = Callable[[Sequence[int]], Sequence[int]]
"""The type of a function that returns the largest of each value over the ranks; every rank calls it together."""


def alone(succeeded: bool) -> bool:
    """Whether a capture succeeded on every rank, for a rank that shares its collectives with no other."""
    return succeeded


_BEFORE_SHAPE = (
    FallbackReason.not_training,
    FallbackReason.argument_not_known,
    FallbackReason.input_differs,
    FallbackReason.no_cuda,
    FallbackReason.disabled_by_user,
)
"""Reasons that are found before a shape is looked at; where ranks have several, the last of them counts."""
_UNKNOWN = Shape(n_seqs=0, max_seqlen=0, n_tokens=0)


@dataclass(slots=True, kw_only=True)
class Proposal:
    """What one rank could do with its micro-batch."""

    shape: Shape | None
    """The micro-batch's shape; None where it came without boundaries, so that it can only run eagerly."""
    refusal: FallbackReason | None = None
    """Why it must run eagerly whatever its shape; None where nothing is in the way."""
    captured: bool = False
    differs: Callable[[], bool] = lambda: False
    """Returns whether its arguments are not those of the captures; called at most once."""
    gradients: bool = True
    failed: Sequence[bool] = ()
    """Whether the capture of each bucket failed, one for each bucket in ascending order; empty: a lease shows it."""
    busy: Sequence[bool] = ()
    """Whether each slot waits for its backward; empty where there are no slots, or a lease shows it."""

    def message(self, *, is_alone: bool = False) -> list[int]:
        """The integers of which the largest over ranks counts. A rank that `is_alone` compares arguments last."""
        shape = self.shape or _UNKNOWN
        refusal = FallbackReason.input_differs if self.shape is None and self.refusal is None else self.refusal
        return [
            0 if refusal is None else 1 + _BEFORE_SHAPE.index(refusal),
            int(not is_alone and refusal is None and self.captured and self.differs()),
            int(self.captured),
            int(not self.captured),
            int(not self.gradients),
            shape.n_seqs,
            shape.max_seqlen,
            shape.n_tokens,
            -shape.n_tokens,
            shape.cp_size,
            -shape.cp_size,
            *map(int, self.failed),
            *map(int, self.busy),
        ]


@dataclass(slots=True, kw_only=True)
class Agreed:
    """What all ranks do with their micro-batches; equal on all of them."""

    choice: Bucket | FallbackReason
    """The bucket that all of them replay, or why all run eagerly."""
    shape: Shape
    """The most documents, the longest document and the most tokens that any of them has."""
    slot: int | None = None
    """Index of the slot that all of them use; None where they run eagerly, or a lease finds it."""
    opens: bool = False
    """Whether all of them capture their graphs now. Ranks that share collectives then agree once more."""
    bucket: Bucket | None = None
    """The bucket that would hold all micro-batches, where its graphs or a slot are missing; else None."""

    @property
    def reported(self) -> Bucket | FallbackReason:
        """The decision as other pipeline stages take it, whose captures and slots are their own."""
        return self.choice if self.bucket is None else self.bucket


def agree(
    proposal: Proposal, dispatcher: Dispatcher, largest: Largest | None = None, *, opens_at: Callable[[Shape], bool]
) -> Agreed:
    """The one decision of all ranks. Each calls this for the same micro-batch of its schedule.

    Buckets and the number of slots are the same on all ranks. Without `largest` this rank decides alone. `opens_at`
    says whether graphs are captured at a micro-batch of this shape although it fits no bucket.
    """
    own = proposal.message(is_alone=largest is None)
    refusal, differs, some_captured, some_not, no_gradients, n_seqs, longest, *rest = largest(own) if largest else own
    n_tokens, fewest, cp_size, least, *flags = rest
    failed, busy = flags[: len(proposal.failed)], flags[len(proposal.failed) :]
    shape = Shape(n_seqs=n_seqs, max_seqlen=longest, n_tokens=n_tokens, cp_size=cp_size)
    if refusal:
        return Agreed(choice=_BEFORE_SHAPE[refusal - 1], shape=shape)
    sizes = {n_tokens, -fewest}, {cp_size, -least}
    choice, is_one_size = _decide_sizes(shape, *sizes, dispatcher), all(len(size) == 1 for size in sizes)
    if some_not:
        if not isinstance(choice, Bucket) and not (is_one_size and opens_at(shape)):
            return Agreed(choice=choice, shape=shape)
        if no_gradients:
            return Agreed(choice=FallbackReason.not_training, shape=shape)
        if some_captured and any(busy):  # a rank that has graphs must drop them first
            return Agreed(choice=FallbackReason.no_free_slot, shape=shape)
        return Agreed(choice=choice, shape=shape, opens=True)
    if not isinstance(choice, Bucket):
        return Agreed(choice=choice, shape=shape)
    if proposal.differs() if largest is None else differs:
        return Agreed(choice=FallbackReason.input_differs, shape=shape)
    if failed and failed[dispatcher.buckets.index(choice)]:
        return Agreed(choice=FallbackReason.capture_failed, shape=shape, bucket=choice)
    if busy and all(busy):
        return Agreed(choice=FallbackReason.no_free_slot, shape=shape, bucket=choice)
    return Agreed(choice=choice, shape=shape, slot=busy.index(False) if busy else None)


def _decide_sizes(
    shape: Shape, n_tokens: Iterable[int], cp_sizes: Iterable[int], dispatcher: Dispatcher
) -> Bucket | FallbackReason:
    """What the buckets decide about `shape` in every size: the first reason at which one of the sizes fits none."""
    choice: Bucket | FallbackReason = FallbackReason.disabled_by_user
    for tokens, cp_size in product(n_tokens, cp_sizes):
        choice = dispatcher.decide(replace(shape, n_tokens=tokens, cp_size=cp_size))
        if not isinstance(choice, Bucket):
            break
    return choice
