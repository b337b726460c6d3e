"""Tokens of packed documents, shifted together, beside megatron-core's own way document by document."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import shifting_ranks
from support.rank_processes import printed_by_ranks


def test_documents_of_one_rank_are_shifted_as_megatron_core_does_it(tmp_path, capfd):
    shifting_ranks.main(0, 1, str(tmp_path / "store"))
    assert int(capfd.readouterr().out.split()[-1]) > 100


def test_documents_of_several_ranks_are_shifted_as_megatron_core_does_it(tmp_path):
    printed = printed_by_ranks(shifting_ranks.main, 3, tmp_path / "store")
    assert all(int(out.split()[-1]) > 100 for out in printed)
