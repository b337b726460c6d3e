"""The one decision per micro-batch: host-side integers -> bucket, or the reason to run eagerly. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

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
    not_training = "not_training"
    disabled_by_user = "disabled_by_user"
    capture_failed = "capture_failed"
    no_cuda = "no_cuda"


BY_SHAPE = frozenset(
    {
        FallbackReason.too_many_seqs,
        FallbackReason.document_too_long,
        FallbackReason.token_count_differs,
        FallbackReason.cp_size_not_captured,
    }
)
"""Reasons that the data alone gives, which a plan therefore predicts."""

SHAPE_NOT_ASKED = frozenset(
    {
        FallbackReason.not_training,
        FallbackReason.disabled_by_user,
        FallbackReason.no_cuda,
    }
)
"""Reasons that are found before the shape is looked at, so that its own decision is not known."""


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
    max_seqlen: int
    n_tokens: int
    cp_size: int = 1


class Dispatcher:
    """Chooses among fixed buckets. Every rank that sees the same integers chooses alike."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets: Sequence[Bucket] = tuple(sorted(set(buckets)))
        """Ascending."""

    def decide(self, shape: Shape) -> Bucket | FallbackReason:
        """The first bucket that holds `shape`, or why none does.

        Where several things are wrong the reason is the first of: cp size, token count, documents, longest document.
        """
        for bucket in self.buckets:
            if (
                shape.n_seqs <= bucket.max_seqs
                and shape.max_seqlen <= bucket.max_seqlen
                and shape.n_tokens == bucket.n_tokens
                and shape.cp_size == bucket.cp_size
            ):
                return bucket
        return self._reason(shape)

    def _reason(self, shape: Shape) -> FallbackReason:
        if not self.buckets:
            return FallbackReason.disabled_by_user
        left = [b for b in self.buckets if b.cp_size == shape.cp_size]
        if not left:
            return FallbackReason.cp_size_not_captured
        left = [b for b in left if b.n_tokens == shape.n_tokens]
        if not left:
            return FallbackReason.token_count_differs
        if not any(shape.n_seqs <= b.max_seqs for b in left):
            return FallbackReason.too_many_seqs
        return FallbackReason.document_too_long


def advice(reason: FallbackReason, shape: Shape, buckets: Sequence[Bucket]) -> str:
    """One line for the first fallback of a kind: the numbers, and what would avoid it."""
    cap = max((b.max_seqs for b in buckets), default=0)
    longest = max((b.max_seqlen for b in buckets), default=0)
    match reason:
        case FallbackReason.too_many_seqs:
            detail = f"{shape.n_seqs} documents, the largest bucket holds {cap}: analyse with more data or --buckets"
        case FallbackReason.document_too_long:
            detail = (
                f"a document of {shape.max_seqlen} tokens among {shape.n_seqs}, the buckets for as many documents hold "
                f"shorter ones (the longest {longest}): analyse with more data or --buckets"
            )
        case FallbackReason.token_count_differs:
            counts = sorted({b.n_tokens for b in buckets})
            detail = (
                f"{shape.n_tokens} tokens, captured for {counts}: pad every micro-batch to one length "
                "(--pad-to-max-length, or a tail policy)"
            )
        case FallbackReason.cp_size_not_captured:
            sizes = sorted({b.cp_size for b in buckets})
            detail = f"context-parallel size {shape.cp_size}, captured for {sizes}: add it to the plan's buckets"
        case FallbackReason.no_free_slot:
            detail = "every slot waits for its backward: analyse with the run's --pipeline-parallel-size, or add slots"
        case FallbackReason.input_differs:
            detail = "an input's shape, dtype or device, or autocast, is not as captured: keep them constant"
        case FallbackReason.not_training:
            detail = "the module is in eval mode or gradients are off; this is expected of evaluation"
        case FallbackReason.disabled_by_user:
            detail = "graphs are switched off, or the plan has no bucket"
        case FallbackReason.capture_failed:
            detail = "its graph could not be captured; the first failure was logged with its cause"
        case FallbackReason.no_cuda:
            detail = "no CUDA device, or the inputs are not on it"
    return f"runs eagerly ({reason}): {detail}"
