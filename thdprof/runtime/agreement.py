"""The one decision about a micro-batch, of one rank or of all ranks whose captured passes share collectives.

Before every micro-batch each rank describes what it could do (`Proposal`). Ranks that share collectives send that as a
message of integers, of which the largest over the ranks count, so that all of them come to one answer (`agree`): the
bucket that holds every rank's micro-batch and a slot that is free on all ranks, or one reason to run eagerly. A rank
that decides alone takes its own proposal for that of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

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
    """Whether this rank has captured its graphs."""
    differs: Callable[[], bool] = lambda: False
    """Returns whether its arguments are not those of the captures; called at most once."""
    gradients: bool = True
    """Whether gradients are on, as a capture needs."""
    failed: Sequence[bool] = ()
    """Whether the capture of each bucket failed, one for each bucket in ascending order; empty: a lease shows it."""
    busy: Sequence[bool] = ()
    """Whether each slot waits for its backward; empty where there are no slots, or a lease shows it."""

    def message(self) -> list[int]:
        """The proposal as integers of which the largest over the ranks is what counts."""
        shape = self.shape or _UNKNOWN
        refusal = FallbackReason.input_differs if self.shape is None and self.refusal is None else self.refusal
        return [
            0 if refusal is None else 1 + _BEFORE_SHAPE.index(refusal),
            int(refusal is None and self.captured and self.differs()),
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


class _Joint(NamedTuple):
    """The proposals of all ranks as one, without the shape."""

    refusal: FallbackReason | None
    differs: Callable[[], bool]
    some_captured: bool
    all_captured: bool
    gradients: bool
    shape: Shape
    fewest_tokens: int
    least_cp_size: int
    failed: Sequence[bool | int]
    busy: Sequence[bool | int]


def _join(proposal: Proposal, largest: Largest) -> _Joint:
    """The proposals of all ranks, each of which calls this."""
    refusal, differs, some_captured, some_not, no_gradients, n_seqs, longest, *rest = largest(proposal.message())
    tokens, fewest, cp_size, least, *flags = rest
    return _Joint(
        refusal=_BEFORE_SHAPE[refusal - 1] if refusal else None,
        differs=lambda: bool(differs),
        some_captured=bool(some_captured),
        all_captured=not some_not,
        gradients=not no_gradients,
        shape=Shape(n_seqs=n_seqs, max_seqlen=longest, n_tokens=tokens, cp_size=cp_size),
        fewest_tokens=-fewest,
        least_cp_size=-least,
        failed=flags[: len(proposal.failed)],
        busy=flags[len(proposal.failed) :],
    )


def _take_own(own: Proposal) -> _Joint:
    """The proposal of a rank that decides alone, as that of all."""
    shape = own.shape or _UNKNOWN
    refusal = FallbackReason.input_differs if own.shape is None and own.refusal is None else own.refusal
    return _Joint(
        refusal, own.differs, own.captured, own.captured, own.gradients, shape, shape.n_tokens, shape.cp_size,
        own.failed, own.busy,
    )  # fmt: skip


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

    Args:
        proposal: what this rank could do; as many buckets and slots as on all other ranks.
        dispatcher: chooses among the buckets, which are the same on all ranks.
        largest: returns the largest of each value over the ranks; None: this rank decides alone.
        opens_at: whether graphs are captured at a micro-batch of this shape although it fits no bucket.
    """
    joint = _take_own(proposal) if largest is None else _join(proposal, largest)
    shape = joint.shape
    if joint.refusal is not None:
        return Agreed(choice=joint.refusal, shape=shape)
    is_one_size = shape.n_tokens == joint.fewest_tokens and shape.cp_size == joint.least_cp_size
    choice = dispatcher.decide(shape) if is_one_size else _refuse_sizes(joint, dispatcher)
    if not joint.all_captured:
        if not isinstance(choice, Bucket) and not (is_one_size and opens_at(shape)):
            return Agreed(choice=choice, shape=shape)
        if not joint.gradients:
            return Agreed(choice=FallbackReason.not_training, shape=shape)
        if joint.some_captured and any(joint.busy):  # a rank that has graphs must drop them first
            return Agreed(choice=FallbackReason.no_free_slot, shape=shape)
        return Agreed(choice=choice, shape=shape, opens=True)
    if not isinstance(choice, Bucket):
        return Agreed(choice=choice, shape=shape)
    if joint.differs():
        return Agreed(choice=FallbackReason.input_differs, shape=shape)
    if joint.failed and joint.failed[dispatcher.buckets.index(choice)]:
        return Agreed(choice=FallbackReason.capture_failed, shape=shape, bucket=choice)
    if joint.busy and all(joint.busy):
        return Agreed(choice=FallbackReason.no_free_slot, shape=shape, bucket=choice)
    return Agreed(choice=choice, shape=shape, slot=joint.busy.index(False) if joint.busy else None)


def _refuse_sizes(joint: _Joint, dispatcher: Dispatcher) -> Bucket | FallbackReason:
    """What the buckets decide where micro-batches differ in tokens or context-parallel size: the first reason at which
    one of the sizes fits none.
    """
    shape = joint.shape
    choice: Bucket | FallbackReason = FallbackReason.disabled_by_user
    for n_tokens, cp_size in product({shape.n_tokens, joint.fewest_tokens}, {shape.cp_size, joint.least_cp_size}):
        choice = dispatcher.decide(replace(shape, n_tokens=n_tokens, cp_size=cp_size))
        if not isinstance(choice, Bucket):
            break
    return choice
