"""Why a micro-batch runs eagerly: the words that training counts and `thdprof compare` reads."""

from __future__ import annotations

from enum import StrEnum


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
