"""Tokens of packed documents, shifted together, beside megatron-core's own way document by document."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import shifting_ranks
from support.rank_processes import printed_by_ranks


@pytest.mark.parametrize("world", [1, 3])
def test_documents_are_shifted_as_megatron_core_does_it(world, tmp_path):
    printed = printed_by_ranks(shifting_ranks, world, tmp_path / "store")
    assert all(int(out.split()[-1]) > 100 for out in printed)
