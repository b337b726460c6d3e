"""One decision for ranks whose captured passes share collectives but whose micro-batches differ: integers alone.

Before every micro-batch each rank describes what it could do (`Proposal`), as a message of integers. `agree` takes the
largest of each integer over the ranks, so that all of them come to one answer: the bucket that holds every rank's
micro-batch and a slot that is free on all ranks, or one reason to run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What one rank could do with its micro-batch."""

    shape: Shape | None
    """The micro-batch's shape; None where it came without boundaries, so that it can only run eagerly."""
    refusal: FallbackReason | None = None
    """Why it must run eagerly whatever its shape; None where nothing is in the way."""
    captured: bool = False
    """Whether this rank has captured its graphs."""
    differs: bool = False
    """Whether its arguments are not those of the captures."""
    gradients: bool = True
    """Whether gradients are on, as a capture needs."""
    failed: Sequence[bool] = ()
    """Whether the capture of each bucket failed, one for each bucket in ascending order."""
    busy: Sequence[bool] = ()
    """Whether each slot waits for its backward; empty where there are no slots."""

    def message(self) -> list[int]:
        """The proposal as integers of which the largest over the ranks is what counts."""
        shape = self.shape or _UNKNOWN
        refusal = FallbackReason.input_differs if self.shape is None and self.refusal is None else self.refusal
        return [
            0 if refusal is None else 1 + _BEFORE_SHAPE.index(refusal),
            int(self.differs),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks do with their micro-batches; equal on all of them."""

    choice: Bucket | FallbackReason
    """The bucket that all of them replay, or why all run eagerly."""
    shape: Shape
    """The most documents, the longest document and the most tokens that any of them has."""
    slot: int | None = None
    """Index of the slot that all of them use; None where they run eagerly, or there are no slots."""
    opens: bool = False
    """Whether all of them capture their graphs now, and agree once more."""
    bucket: Bucket | None = None
    """The bucket that would hold all micro-batches, where its graphs or a slot are missing; else None."""

    @property
    def told(self) -> Bucket | FallbackReason:
        """The decision as other pipeline stages take it, whose captures and slots are their own."""
        return self.choice if self.bucket is None else self.bucket


def agree(proposal: Proposal, dispatcher: Dispatcher, largest: Largest, *, opens_at: Callable[[Shape], bool]) -> Agreed:
    """The one decision of all ranks. Each calls this for the same micro-batch of its schedule.

    Args:
        proposal: what this rank could do; as many buckets and slots as on all other ranks.
        dispatcher: chooses among the buckets, which are alike on all ranks.
        largest: returns the largest of each value over the ranks.
        opens_at: whether graphs are captured at a micro-batch of this shape although it fits no bucket.
    """
    refusal, differs, some_captured, some_not, no_gradients, n_seqs, longest, *rest = largest(proposal.message())
    tokens, fewest, cp_size, least, *flags = rest
    failed, busy = flags[: len(proposal.failed)], flags[len(proposal.failed) :]
    shape = Shape(n_seqs=n_seqs, max_seqlen=longest, n_tokens=tokens, cp_size=cp_size)
    if refusal:
        return Agreed(choice=_BEFORE_SHAPE[refusal - 1], shape=shape)
    choice = _choice(shape, dispatcher, fewest=-fewest, least=-least)
    if some_not:
        alike = tokens == -fewest and cp_size == -least
        if not isinstance(choice, Bucket) and not (alike and opens_at(shape)):
            return Agreed(choice=choice, shape=shape)
        if no_gradients:
            return Agreed(choice=FallbackReason.not_training, shape=shape)
        if some_captured and any(busy):  # a rank that has graphs must drop them first
            return Agreed(choice=FallbackReason.no_free_slot, shape=shape)
        return Agreed(choice=choice, shape=shape, opens=True)
    if not isinstance(choice, Bucket):
        return Agreed(choice=choice, shape=shape)
    if differs:
        return Agreed(choice=FallbackReason.input_differs, shape=shape)
    if failed and failed[dispatcher.buckets.index(choice)]:
        return Agreed(choice=FallbackReason.capture_failed, shape=shape, bucket=choice)
    if busy and all(busy):
        return Agreed(choice=FallbackReason.no_free_slot, shape=shape, bucket=choice)
    return Agreed(choice=choice, shape=shape, slot=busy.index(0) if busy else None)


def _choice(shape: Shape, dispatcher: Dispatcher, *, fewest: int, least: int) -> Bucket | FallbackReason:
    """The bucket that holds all micro-batches, the first reason at which none does.

    Args:
        shape: the largest of each value over the micro-batches.
        dispatcher: chooses among the buckets.
        fewest: fewest tokens of a micro-batch.
        least: least context-parallel size of a micro-batch.
    """
    choice: Bucket | FallbackReason = FallbackReason.disabled_by_user
    for n_tokens, cp_size in product({shape.n_tokens, fewest}, {shape.cp_size, least}):
        choice = dispatcher.decide(replace(shape, n_tokens=n_tokens, cp_size=cp_size))
        if not isinstance(choice, Bucket):
            break
    return choice
