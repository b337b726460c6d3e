"""Boundaries that a loop keeps on the host are found again by their own micro-batch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams

from thdprof.runtime.megatron.decoder import packed_seq_params


def kept(*boundaries: int) -> torch.Tensor:
    """Boundaries on the device, a row of a larger tensor, that are kept."""
    device = torch.tensor([[*boundaries, 99, 99]], dtype=torch.int32)
    packed_seq_params.keep_on_host(device, np.array(boundaries, dtype=np.int32))
    return device[0, : len(boundaries)]


def params(valid: torch.Tensor, padded: torch.Tensor | None = None) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=valid,
        cu_seqlens_kv=valid,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=8,
        max_seqlen_kv=8,
    )


def host(of: PackedSeqParams):
    return packed_seq_params.read(of, cp_size=1, tail="none").host


def test_the_micro_batch_that_was_kept_is_known_in_every_later_pass_over_it():
    first = params(kept(0, 4, 8))
    np.testing.assert_array_equal(host(first), [0, 4, 8])
    second = params(kept(0, 2, 8))
    np.testing.assert_array_equal(host(first), [0, 4, 8])
    np.testing.assert_array_equal(host(second), [0, 2, 8])


def test_an_earlier_micro_batch_that_nobody_looked_at_is_not_taken_for_the_last_one():
    first = params(kept(0, 4, 8))
    kept(0, 2, 8)
    assert host(first) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda same: same[:2],
        lambda same: same[1:],
        lambda same: same.clone(),
        lambda same: same.as_strided((3,), (2,)),
        lambda same: same.add_(1),
    ],
    ids=["fewer", "later", "copied", "strided", "changed in place"],
)
def test_other_tensors_are_not_taken_for_the_kept_one(other):
    assert host(params(other(kept(0, 4, 8)))) is None


def test_padded_boundaries_must_have_been_kept_too():
    same = kept(0, 4, 8)
    assert host(params(same, padded=same.clone())) is None
