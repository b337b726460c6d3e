"""Packs: every document in one, within their bounds, and hardly more of them than best fit decreasing makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pack_lengths
from support.pack_lengths import count_best_fit

from thdprof.pack.packs import pack_documents
from thdprof.schedule import compiled

small_lengths = st.integers(1, 30).flatmap(
    lambda longest: st.tuples(st.just(longest), st.lists(st.integers(1, longest), max_size=40))
)
caps = st.none() | st.integers(1, 8)


def pack(lengths, seq_length, max_docs=None) -> list[int]:
    return pack_documents(np.array(lengths, dtype=np.int64), seq_length=seq_length, max_docs=max_docs).tolist()


def count_fewest(lengths, seq_length: int, cap: int | None) -> int:
    """Fewest packs of all that are possible, by trying all."""
    fewest = len(lengths)

    def place(at: int, packs: list[tuple[int, int]]) -> None:
        nonlocal fewest
        if len(packs) >= fewest:
            return
        if at == len(lengths):
            fewest = len(packs)
            return
        for i, (tokens, documents) in enumerate(packs):
            if tokens + lengths[at] <= seq_length and documents != cap:
                place(at + 1, [*packs[:i], (tokens + lengths[at], documents + 1), *packs[i + 1 :]])
        place(at + 1, [*packs, (lengths[at], 1)])

    place(0, [])
    return fewest


def test_packs_by_hand():
    assert pack([5, 3, 2, 8, 2], 10) in ([0, 0, 0, 1, 1], [1, 1, 1, 0, 0])
    assert pack([10, 10], 10) == [0, 1]
    assert sorted(pack([1] * 6, 10, 2)) == [0, 0, 1, 1, 2, 2]
    assert pack([], 10) == pack([], 10, 1) == []
    packs = pack_documents(np.array([3, 3]), seq_length=10)
    assert (packs.dtype, packs.shape) == (np.int32, (2,))


def test_every_document_is_packed_once_within_bounds():
    packed = at_cap = 0

    @settings(max_examples=300)
    @given(small_lengths, caps)
    def check(data, cap):
        nonlocal packed, at_cap
        seq_length, lengths = data
        packs = pack(lengths, seq_length, cap)
        assert len(packs) == len(lengths)
        assert sorted(set(packs)) == list(range(max(packs, default=-1) + 1))
        assert packs == pack(lengths, seq_length, cap)
        if lengths:
            assert np.bincount(packs, weights=lengths).max() <= seq_length
            assert cap is None or np.bincount(packs).max() <= cap
            assert max(packs) + 1 <= count_best_fit(lengths, seq_length, cap)
            at_cap += np.bincount(packs).max() == cap
        packed += len(lengths)

    check()
    assert packed > 1000
    assert at_cap > 10


def test_few_more_packs_than_the_fewest_possible():
    counted = as_few = 0

    @given(st.lists(st.integers(1, 20), min_size=1, max_size=8), caps)
    def check(lengths, cap):
        nonlocal counted, as_few
        fewest = count_fewest(lengths, 20, cap)
        assert fewest <= max(pack(lengths, 20, cap)) + 1 <= fewest * 3 // 2
        counted += 1
        as_few += fewest == max(pack(lengths, 20, cap)) + 1

    check()
    assert counted > 50
    assert as_few > counted * 0.9


def test_compiled_loops_equal_plain_ones(monkeypatch):
    lengths = pack_lengths.draw("chat 8k", 1500)
    plain = [pack(lengths, 8192, cap) for cap in (None, 14, 12)]
    monkeypatch.setattr(compiled, "_WORTH_COMPILING", 0)
    assert [pack(lengths, 8192, cap) for cap in (None, 14, 12)] == plain
    assert len({max(packs) for packs in plain}) > 1


@pytest.mark.parametrize("name", pack_lengths.SEQ_LENGTHS)
def test_a_cap_costs_few_packs_and_short_documents_are_spread(name):
    lengths, seq_length = pack_lengths.draw(name, 60_000), pack_lengths.SEQ_LENGTHS[name]
    best_fit = count_best_fit(lengths.tolist(), seq_length, None)
    mean = len(lengths) / best_fit
    bounds = {None: 0.0005, int(np.ceil(4 * mean)): 0.003, int(np.ceil(2 * mean)): 0.01}
    for cap, bound in bounds.items():
        packs = pack_documents(lengths, seq_length=seq_length, max_docs=cap)
        counts = np.bincount(packs)
        assert counts.min() > 0
        assert cap is None or counts.max() <= cap
        assert np.bincount(packs, weights=lengths).max() <= seq_length
        assert len(counts) <= best_fit * (1 + bound)
        assert np.percentile(counts, 99) <= 3 * mean  # 8 times the mean and more in best fit's packs
    if name == "chat 8k":  # best fit under that cap pays 14%
        assert count_best_fit(lengths.tolist(), seq_length, int(np.ceil(2 * mean))) > 1.1 * best_fit


def test_a_tight_cap_costs_no_more_than_it_must():
    lengths, seq_length = pack_lengths.draw("long 128k", 60_000), pack_lengths.SEQ_LENGTHS["long 128k"]
    without_cap, tight = (pack_documents(lengths, seq_length=seq_length, max_docs=cap).max() + 1 for cap in (None, 19))
    assert len(lengths) / without_cap > 17
    assert without_cap < tight < 1.05 * without_cap  # best fit pays 50%


def test_long_documents_of_which_three_fit_in_few_ways_are_kept_as_best_fit_has_them():
    rng = np.random.default_rng(1)
    drawn = np.where(rng.random(60_000) < 0.9, rng.normal(100, 20, 60_000), rng.normal(2800, 150, 60_000))
    lengths = np.clip(drawn, 1, 8192).astype(np.int64)
    without_cap = int(pack_documents(lengths, seq_length=8192).max()) + 1
    cap = 2 * -(-len(lengths) // without_cap)
    packs = pack_documents(lengths, seq_length=8192, max_docs=cap)
    counts = np.bincount(packs)
    assert counts.min() > 0
    assert counts.max() <= cap
    assert np.bincount(packs, weights=lengths).max() <= 8192
    assert len(counts) < 1.01 * without_cap  # spreading alone pays 4%


def test_a_thousand_packs_have_a_spare_one_so_that_short_documents_are_not_heaped():
    rng = np.random.default_rng(9)
    drawn = np.where(rng.random(20_000) < 0.9, rng.lognormal(4, 0.5, 20_000), rng.lognormal(8.3, 0.4, 20_000))
    counts = np.bincount(pack_documents(np.clip(drawn, 1, 8192).astype(np.int64), seq_length=8192))
    assert len(counts) > 1000
    assert counts.max() <= 3 * counts.mean()  # 27 times the mean by best fit


@pytest.mark.parametrize("cap", [None, 40])
def test_packs_fill_whole_steps_where_that_adds_few(cap):
    lengths = pack_lengths.draw("chat 8k", 20_000)
    plain, steps, many = (
        np.bincount(pack_documents(lengths, seq_length=8192, max_docs=cap, multiple=size)) for size in (1, 16, 1000)
    )
    assert len(plain) % 16
    assert len(steps) == -(-len(plain) // 16) * 16
    assert steps.min() > 0
    assert steps.max() <= min(cap or 10**9, 3 * steps.mean())
    assert len(many) == len(plain)  # where half a step more would be


def test_refusals():
    with pytest.raises(ValueError, match="lengths: document 1 has 11 tokens; use 1 to seq_length 10"):
        pack([1, 11], 10)
    with pytest.raises(ValueError, match="lengths: document 0 has 0 tokens"):
        pack([0], 10)
    with pytest.raises(ValueError, match="seq_length 0: use 1"):
        pack([1], 0)
    with pytest.raises(ValueError, match="max_docs 0: use 1 or more"):
        pack([1], 10, 0)
