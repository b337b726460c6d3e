"""The boundaries of a micro-batch, as a collator's batch tells them on the host."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from thdprof.transformers.boundaries import host_boundaries

ROW = torch.arange(6)[None]


@pytest.mark.parametrize("mask", [[1] * 6, [1, 1, 1, 1, 0, 0], [0] * 6])
def test_a_row_that_is_padded_at_its_end_is_one_document(mask):
    found = host_boundaries({"input_ids": ROW, "attention_mask": torch.tensor([mask])})
    assert found is not None
    assert found.cu_seqlens.tolist() == [0, 6]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
def test_a_row_with_padding_before_tokens_tells_no_boundaries(mask):
    batch = {"input_ids": ROW, "attention_mask": torch.tensor([mask])}
    assert host_boundaries(batch) is None
    assert host_boundaries({**batch, "position_ids": ROW}) is None
