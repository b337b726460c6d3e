"""Rules of the schedule that no released package is the referee of, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from support.schedules import rows, schedule

from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.analyze.sources.base import UnpackedDocuments
from thdprof.errors import DataError, UsageError


def columns(found):
    table = found.table
    return table.n_seqs.tolist(), table.max_seqlen.tolist(), table.n_tokens.tolist()


def test_trl_pads_a_micro_batch_with_documents_of_one_token():
    found = schedule(rows([3, 4], [2], [5, 1], [8], rule="trl"), seq_length=8, micro_batch_size=2, pad_seq_to_mult=8)
    assert columns(found) == ([3 + 7, 3 + 2], [4, 8], [16, 16])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", ([2, 1, 1], [4, 2, 8], [7, 2, 8])),
        ("append_dummy_seq", ([3, 2, 1], [4, 6, 8], [8, 8, 8])),
        ("extend_last", ([2, 1, 1], [5, 8, 8], [8, 8, 8])),
    ],
)
def test_tail_policies(policy, expected):
    assert columns(schedule(rows([3, 4], [2], [8]), seq_length=8, tail_policy=policy)) == expected


def test_rows_longer_than_the_target_are_named():
    with pytest.raises(DataError, match="row 1: 9 tokens are more than --seq-length 8; give --seq-length 9"):
        schedule(rows([3], [9]), seq_length=8, tail_policy="extend_last")


def test_ranks_and_micro_batches_of_the_single_loader():
    packs = rows(*([n] for n in range(1, 13)))
    found = schedule(packs, seq_length=16, data_parallel_size=2, global_batch_size=4)
    frame = found.table.to_pandas()
    # micro-batch m of rank r in step s is row s * 4 + m * 2 + r
    assert frame["n_tokens"].tolist() == [1, 3, 2, 4, 5, 7, 6, 8, 9, 11, 10, 12]


def test_the_single_loader_ends_with_the_data():
    found = schedule(rows([1], [2], [3]), seq_length=8, train_samples=7)
    assert found.table.num_steps == 3
    assert "the data ends after 3" in found.warnings[0]


def test_an_unknown_order_is_drawn_and_says_so():
    drawn = schedule(rows(*([n] for n in range(1, 50))), seq_length=64, loader=None, train_samples=98)
    assert not drawn.table.exact
    both = drawn.table.n_tokens.reshape(2, 49)
    assert [sorted(epoch) for epoch in both.tolist()] == [list(range(1, 50))] * 2
    assert both[0].tolist() != both[1].tolist()


def test_dp_balanced_by_hand():
    # capacity 8, two ranks: packs [3 4] [5 2] [6 1 1]; three packs do not divide by two, so the last gives one away
    documents = UnpackedDocuments(document_tokens=np.array([3, 6, 4, 1, 5, 1, 2, 1], dtype=np.int32))
    found = schedule(documents, seq_length=8, packer="dp_balanced", data_parallel_size=2, global_batch_size=8)
    # rank 0 reads 3 4 5 2, rank 1 reads 6 1 1 1: gathered 3 4 5 2 6 1 1 1 -> [3 4] [5 2] [6 1 1] [1]
    assert found.table.num_microbatches.tolist() == [2]
    assert columns(found) == ([2, 3, 2, 1], [4, 6, 5, 1], [7, 8, 7, 1])
    assert found.table.exact


def test_dp_balanced_with_a_dummy_leaves_it_a_place():
    documents = UnpackedDocuments(document_tokens=np.ones(6, dtype=np.int32))
    found = schedule(
        documents,
        seq_length=8,
        packer="dp_balanced",
        global_batch_size=6,
        max_docs_per_pack=3,
        tail_policy="append_dummy_seq",
    )
    assert columns(found) == ([3, 3, 3], [6, 6, 6], [8, 8, 8])


def test_bridge_refuses_several_rows_a_micro_batch():
    with pytest.raises(UsageError, match="--micro-batch-size 2: Megatron-Bridge trains packed rows with 1"):
        resolve_settings(
            {"micro_batch_size": 2}, pack_tokens=8, dataset_format="bridge", default_loader="batch", num_datasets=1
        )
