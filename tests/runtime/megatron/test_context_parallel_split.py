"""How Megatron-LM's scripts split packed rows among context-parallel ranks, beside what attention takes them for."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402
from support.megatron_ranks import ranks  # noqa: E402

from thdprof.runtime.megatron import lay_out  # noqa: E402


def split_under_inter_document_masking(lengths, rank: int) -> list[int]:
    """Which tokens of a row pretrain_gpt.py gives to a rank of two."""
    bounds = torch.tensor([np.cumsum([0, *lengths])], dtype=torch.int32)
    row = torch.arange(sum(lengths))[None]
    with ranks(2, rank, hybrid=False):
        batch = get_batch_on_this_cp_rank(
            {"tokens": row, "cu_seqlens": bounds, "cu_seqlens_padded": None},
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=True,
        )
    return batch["tokens"][0].tolist()


@pytest.mark.referee
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("lengths", "alike"), [([16], True), ([8, 8], False), ([4, 12], False)])
def test_a_row_of_several_documents_is_not_split_as_attention_takes_it(lengths, alike, rank):
    of_documents = lay_out(lengths, cp_size=2, max_seqlen_per_rank=8).tokens_of(rank).tolist()
    assert sorted(of_documents) == sorted(set(of_documents))
    assert (split_under_inter_document_masking(lengths, rank) == of_documents) is alike
