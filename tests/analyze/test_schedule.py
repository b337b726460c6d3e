"""Rules of the schedule that no released package is the referee of, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from support.schedules import rows, schedule

from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import UnpackedDocuments
from thdprof.systems import megatron_gpt
from thdprof.systems.megatron_gpt import gpt_samples


def columns(found):
    table = found.table
    return table.n_seqs.tolist(), table.max_seqlen.tolist(), table.n_tokens.tolist()


def test_trl_pads_a_micro_batch_with_documents_of_one_token():
    found = schedule(rows([3, 4], [2], [5, 1], [8], rule="trl"), seq_length=8, micro_batch_size=2, pad_seq_to_mult=8)
    assert columns(found) == ([3 + 7, 3 + 2], [4, 8], [16, 16])
    assert found.table.squared.tolist() == [9 + 16 + 4 + 7, 25 + 1 + 64 + 2]


@pytest.mark.parametrize(
    ("policy", "expected", "squared"),
    [
        ("none", ([2, 1, 1], [4, 2, 8], [7, 2, 8]), [9 + 16, 4, 64]),
        ("append_dummy_seq", ([3, 2, 1], [4, 6, 8], [8, 8, 8]), [9 + 16 + 1, 4 + 36, 64]),
        ("extend_last", ([2, 1, 1], [5, 8, 8], [8, 8, 8]), [9 + 25, 64, 64]),
    ],
)
def test_tail_policies(policy, expected, squared):
    found = schedule(rows([3, 4], [2], [8]), seq_length=8, tail_policy=policy)
    assert columns(found) == expected
    assert found.table.squared.tolist() == squared


@given(
    packs=strategies.rows,
    policy=st.sampled_from(["none", "append_dummy_seq", "extend_last"]),
    size=st.integers(1, 3),
    loader=st.sampled_from(["single", "cyclic", None]),
)
def test_squared_lengths_are_those_of_the_documents_of_a_micro_batch(packs, policy, size, loader):
    """Every row has a token count of its own, by which a micro-batch's rows are known."""
    packs = [[*pack, 600 + 7**2 * place] for place, pack in enumerate(packs)]
    found = schedule(rows(*packs), seq_length=4096, tail_policy=policy, global_batch_size=1, loader=loader).table
    expected = {}
    for pack in packs:
        tail = 4096 - sum(pack)
        seen = {"none": pack, "append_dummy_seq": [*pack, tail], "extend_last": [*pack[:-1], pack[-1] + tail]}[policy]
        expected.setdefault((len(seen), max(seen), sum(seen)), set()).add(sum(n * n for n in seen))
    for *key, squared in zip(found.n_seqs, found.max_seqlen, found.n_tokens, found.squared, strict=True):
        assert squared in expected[tuple(key)]
    if loader == "single" and len(packs) >= size:
        merged = schedule(rows(*packs), seq_length=4096, tail_policy=policy, micro_batch_size=size).table
        sums = found.squared[: len(merged) * size].reshape(-1, size).sum(axis=1)
        assert merged.squared.tolist() == sums.tolist()


@given(
    documents=strategies.documents,
    seq_length=st.integers(8, 80),
    num_samples=st.none() | st.integers(1, 100),
    seed=strategies.seeds,
    add_extra_token=st.booleans(),
)
def test_samples_do_not_depend_on_how_they_are_shuffled(documents, seq_length, num_samples, seed, add_extra_token):
    """As integers that hold a sample, or by index where these would be too large."""
    tokens = np.array([*documents, 2 * seq_length], dtype=np.int32)
    options = {"seq_length": seq_length, "num_samples": num_samples, "seed": seed, "add_extra_token": add_extra_token}
    try:
        found = gpt_samples(tokens, **options)
    except DataError:  # megatron-core's own index build stops on these
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_gpt, "_bits", lambda n_seqs, length: None)
        by_index = gpt_samples(tokens, **options)
    for name in ("n_seqs", "max_seqlen", "squared"):
        first, second = getattr(found, name), getattr(by_index, name)
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)
    least = seq_length**2 / found.n_seqs.astype(float)
    assert ((found.squared >= least) & (found.squared <= seq_length**2)).all()


def test_samples_too_long_for_one_integer_keep_their_squared_lengths():
    samples = gpt_samples(
        np.full(4, 3 * 2**20, dtype=np.int32), seq_length=2**22, num_samples=None, seed=1, add_extra_token=False
    )
    found = zip(samples.n_seqs.tolist(), samples.max_seqlen.tolist(), samples.squared.tolist(), strict=True)
    million = 2**20  # the stream is cut into documents of 3 + 1, 2 + 2 and 1 + 3 million tokens
    expected = [(2, 2 * million, 8 * million**2), (2, 3 * million, 10 * million**2), (2, 3 * million, 10 * million**2)]
    assert sorted(found) == expected


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
    assert found.table.squared.tolist() == [9 + 16, 36 + 1 + 1, 25 + 4, 1]
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
    assert found.table.squared.tolist() == [1 + 1 + 36] * 3


def test_bridge_refuses_several_rows_a_micro_batch():
    with pytest.raises(UsageError, match="--micro-batch-size 2: Megatron-Bridge trains packed rows with 1"):
        resolve_settings(
            {"micro_batch_size": 2}, pack_tokens=8, dataset_format="bridge", default_loader="batch", num_datasets=1
        )
