"""The shape of a bucket, and the rule which bucket a micro-batch replays, or why it runs eagerly: integers alone.

Training decides on one micro-batch at a time (`Dispatcher`), analysis on whole tables (`decide_all`), both by the same
rule. This module never imports torch, and NumPy only where a table is decided on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WARMUP_PASSES = 2
"""Passes before a capture: in the first, libraries make their handles and workspaces, and kernels tune themselves."""

WATCHED_BYTES = 128 * 2**20
"""Bytes of the parameters' gradients that a verified micro-batch compares at a time; one parameter at least."""
WATCHED_COPIES = 5
"""Most copies of these gradients at a time: before, first eager run, the run that is compared with it, what all other
parameters share, and the comparison's own memory.
"""
WATCHED_HIDDEN = 5
"""Copies of the hidden states that each layer of a verified micro-batch keeps from its forward to its backward, where
graphs hold single layers: its input, and what its graph gives out.
"""

Level = Literal["microbatch", "rank_step", "step"]
"""The unit of which a fallback rate is a share: micro-batches, (rank, step) pairs with an eager one, or steps with one
on any rank."""


class FallbackReason(StrEnum):
    """Why a micro-batch runs eagerly."""

    too_many_seqs = "too_many_seqs"
    document_too_long = "document_too_long"
    token_count_differs = "token_count_differs"
    no_free_slot = "no_free_slot"
    cp_size_not_captured = "cp_size_not_captured"
    input_differs = "input_differs"
    argument_not_known = "argument_not_known"
    not_training = "not_training"
    disabled_by_user = "disabled_by_user"
    capture_failed = "capture_failed"
    quarantined = "quarantined"
    expert_overflow = "expert_overflow"
    no_cuda = "no_cuda"


SHAPE_NOT_ASKED = frozenset(
    {
        FallbackReason.argument_not_known,
        FallbackReason.not_training,
        FallbackReason.disabled_by_user,
        FallbackReason.no_cuda,
    }
)
"""Reasons that are found before the shape is looked at, so that its own decision is not known."""

WRONG_GRAPHS = frozenset({FallbackReason.capture_failed, FallbackReason.quarantined})
"""Reasons that lie in a bucket's graphs: there are none, or they gave wrong numbers."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One static shape: the key of a captured graph. Ordered as buckets are tried, the smallest first."""

    max_seqs: int
    """Documents, a dummy tail included: cu_seqlens has one entry more."""
    max_seqlen: int
    """Tokens of the longest document: a graph bakes it into its attention kernels."""
    n_tokens: int
    """Tokens of the micro-batch: the shape of its activations."""
    cp_size: int = 1
    """Context-parallel size: the communication that was captured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a micro-batch asks for, after its tail policy; host-side integers."""

    n_seqs: int
    """Number of documents, a dummy tail included."""
    max_seqlen: int
    """Tokens of the longest document."""
    n_tokens: int
    """Tokens of the micro-batch on one context-parallel rank."""
    cp_size: int = 1
    """Number of context-parallel ranks that share the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What many micro-batches ask for, as `Shape` has it for one: integer arrays.

    They broadcast together to shape [micro-batches]; a value that all share may have shape [1].
    """

    n_seqs: NDArray[np.integer]
    max_seqlen: NDArray[np.integer]
    n_tokens: NDArray[np.integer]
    cp_size: NDArray[np.integer]


_RULE: tuple[tuple[FallbackReason, Callable[[Bucket, Any], Any]], ...] = (
    (FallbackReason.cp_size_not_captured, lambda bucket, shape: shape.cp_size == bucket.cp_size),
    (FallbackReason.token_count_differs, lambda bucket, shape: shape.n_tokens == bucket.n_tokens),
    (FallbackReason.too_many_seqs, lambda bucket, shape: shape.n_seqs <= bucket.max_seqs),
    (FallbackReason.document_too_long, lambda bucket, shape: shape.max_seqlen <= bucket.max_seqlen),
)
"""A bucket holds a `Shape`, or each of some `Shapes`, where all conditions are true. A micro-batch that no bucket holds
runs eagerly for the first reason at which no bucket is left."""

BY_SHAPE = frozenset(reason for reason, _ in _RULE)
"""Reasons that the data alone gives, which a plan therefore predicts."""
_REASONS = (*(reason for reason, _ in _RULE), FallbackReason.disabled_by_user)


class Dispatcher:
    """Chooses among fixed buckets. Every rank that sees the same integers makes the same choice."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets: Sequence[Bucket] = tuple(sorted(set(buckets)))
        """Ascending."""

    def decide(self, shape: Shape) -> Bucket | FallbackReason:
        """The first bucket that holds `shape`, or why none does.

        Where several things are wrong the reason is the first of: cp size, token count, documents, longest document.
        """
        left = self.buckets
        if not left:
            return FallbackReason.disabled_by_user
        for reason, fits in _RULE:
            left = [bucket for bucket in left if fits(bucket, shape)]
            if not left:
                return reason
        return left[0]


def holds(bucket: Bucket, shapes: Shapes) -> NDArray[np.bool_]:
    """Which of `shapes` the bucket holds, shape [micro-batches]."""
    held: NDArray[np.bool_] | bool = True
    for _, fits in _RULE:
        held = held & fits(bucket, shapes)
    assert not isinstance(held, bool)
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a `Dispatcher` over some buckets decides about every micro-batch of a table."""

    buckets: tuple[Bucket, ...]
    """Ascending, each once."""
    choice: NDArray[np.int32]
    """Index into `buckets` that each micro-batch replays, or -1: it runs eagerly; shape [micro-batches]."""
    eager: NDArray[np.int64]
    """Micro-batches that run eagerly, ascending; shape [eager micro-batches]."""
    reason: NDArray[np.int8]
    """Index into all reasons of this rule for each of them; shape [eager micro-batches]."""

    def reasons(self) -> dict[FallbackReason, int]:
        """How many micro-batches run eagerly for each reason that occurs."""
        import numpy as np

        counts = np.bincount(self.reason, minlength=len(_REASONS))
        return {name: int(n) for name, n in zip(_REASONS, counts, strict=True) if n}

    def reason_of(self, index: int) -> FallbackReason:
        """Why the eager micro-batch `index` of the table runs eagerly."""
        import numpy as np

        return _REASONS[int(self.reason[np.searchsorted(self.eager, index)])]


def decide_all(buckets: Iterable[Bucket], shapes: Shapes) -> Decisions:
    """What `Dispatcher(buckets).decide` says of each of `shapes`."""
    import numpy as np

    ordered = tuple(sorted(set(buckets)))
    choice = np.full(len(shapes.n_seqs), -1, dtype=np.int32)
    for index in reversed(range(len(ordered))):  # the smallest bucket that fits is written last
        choice[holds(ordered[index], shapes)] = index
    eager = np.flatnonzero(choice < 0)
    eager_shapes = Shapes(
        n_seqs=shapes.n_seqs[eager],
        max_seqlen=shapes.max_seqlen[eager],
        n_tokens=np.broadcast_to(shapes.n_tokens, len(choice))[eager],
        cp_size=np.broadcast_to(shapes.cp_size, len(choice))[eager],
    )
    left = np.ones((len(ordered), len(eager)), dtype=np.bool_)  # buckets that are left after some conditions
    first = 0 if ordered else _REASONS.index(FallbackReason.disabled_by_user)
    reason = np.full(len(eager), first, dtype=np.int8)
    for _, fits in _RULE:
        for row, bucket in zip(left, ordered, strict=True):
            row &= fits(bucket, eager_shapes)
        reason += left.any(axis=0)  # once no bucket is left, none comes back
    return Decisions(buckets=ordered, choice=choice, eager=eager, reason=reason)


_ADVICE = {
    FallbackReason.too_many_seqs: "{shape.n_seqs} documents, the largest bucket holds {cap}: analyse with more data or "
    "--buckets",
    FallbackReason.document_too_long: "a document of {shape.max_seqlen} tokens among {shape.n_seqs}, the buckets for "
    "as many documents hold shorter ones (the longest {longest}): analyse with more data or --buckets",
    FallbackReason.token_count_differs: "{shape.n_tokens} tokens, captured for {n_tokens}: pad every micro-batch to "
    "one length (--pad-to-max-length, or a tail policy)",
    FallbackReason.cp_size_not_captured: "context-parallel size {shape.cp_size}, captured for {cp_sizes}: add it to "
    "the plan's buckets",
    FallbackReason.no_free_slot: "every slot waits for its backward: analyse with the run's --pipeline-parallel-size, "
    "or add slots",
    FallbackReason.input_differs: "an input's shape, dtype or device, or autocast, is not as captured: keep them "
    "constant",
    FallbackReason.argument_not_known: "the decoder got an argument that was not checked in a graph; the log names it: "
    "leave it out, or at its default",
    FallbackReason.not_training: "the module is in eval mode or gradients are off; this is expected of evaluation",
    FallbackReason.disabled_by_user: "graphs are switched off, or the plan has no bucket",
    FallbackReason.capture_failed: "its graph could not be captured; the first failure was logged with its cause",
    FallbackReason.quarantined: "a replay of its bucket gave other numbers than the eager run; the mismatch was logged",
    FallbackReason.expert_overflow: "a rank's experts get more rows of its tokens than graphs have room for: give more "
    "with graphs.expert_room, which costs memory",
    FallbackReason.no_cuda: "no CUDA device, or the inputs are not on it",
}


def advice(reason: FallbackReason, shape: Shape, buckets: Sequence[Bucket]) -> str:
    """One line for the first fallback of a kind: the numbers, and what would avoid it."""
    detail = _ADVICE[reason].format(
        shape=shape,
        cap=max((b.max_seqs for b in buckets), default=0),
        longest=max((b.max_seqlen for b in buckets), default=0),
        n_tokens=sorted({b.n_tokens for b in buckets}),
        cp_sizes=sorted({b.cp_size for b in buckets}),
    )
    return f"runs eagerly ({reason}): {detail}"
