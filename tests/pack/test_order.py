"""The order of packs: a permutation, in which the ranks of a step cost alike and neighbouring steps do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pack_lengths

from thdprof.pack.order import measure_order, order_packs
from thdprof.pack.packs import pack_documents

sizes = st.integers(1, 4)


def draw_costs(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Sums of squared lengths of packs of a distribution: the costs that differ the most."""
    return draw_packs(name, count, seed)[0]


def draw_packs(name: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Costs, and tokens and documents, of packs of a distribution, any number of them."""
    lengths = pack_lengths.draw(name, 60_000)
    packs = pack_documents(lengths, seq_length=pack_lengths.SEQ_LENGTHS[name])
    values = np.stack([np.bincount(packs, lengths.astype(float) ** 2), np.bincount(packs, lengths), np.bincount(packs)])
    costs, *sizes = values[:, np.random.default_rng(seed).integers(values.shape[1], size=count)]
    return costs, np.stack(sizes)


def measure_by_loops(costs, order, ranks: int, microbatches: int, rows: int) -> tuple[float, list[float]]:
    """Slowest rank over mean, and the cost of each full step, as sequential samplers hand out rows."""
    ratios, steps = [], []
    handed = iter(order)
    for _ in range(len(order) // (ranks * microbatches * rows)):
        sums = [0.0] * ranks
        for _ in range(microbatches):
            for rank in range(ranks):
                sums[rank] += sum(costs[next(handed)] for _ in range(rows))
        ratios.append(max(sums) / (sum(sums) / ranks))
        steps.append(sum(sums))
    return float(np.mean(ratios)), steps


def test_it_is_a_permutation_with_the_rest_last():
    ordered = rest = 0

    @given(st.integers(0, 120), sizes, sizes, sizes, st.none() | st.integers(0, 9), st.integers(0, 5))
    def check(count, ranks, microbatches, rows, window, seed):
        nonlocal ordered, rest
        costs = np.random.default_rng(seed).lognormal(0, 1, count)
        numbers = {"num_ranks": ranks, "num_microbatches": microbatches, "micro_batch_size": rows}
        order = order_packs(costs, **numbers, window=window, seed=seed)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(count))
        assert (order == order_packs(costs, **numbers, window=window, seed=seed)).all()
        full = count - count % (ranks * microbatches * rows)
        random = np.random.default_rng(seed).permutation(count)
        assert (order[full:] == random[full:]).all()
        if window == 0:
            assert (order == random).all()
        if full:
            slowest, steps = measure_by_loops(costs, order, ranks, microbatches, rows)
            figures = measure_order(costs, order, **numbers, seed=seed).ordered
            assert figures.slowest_over_mean == pytest.approx(slowest)
            if len(steps) > 2 and np.ptp(steps[1:]) and np.ptp(steps[:-1]):
                assert figures.correlation == pytest.approx(np.corrcoef(steps[:-1], steps[1:])[0, 1])
        ordered += full
        rest += count - full

    check()
    assert ordered > 500
    assert rest > 100


@pytest.mark.parametrize("name", pack_lengths.SEQ_LENGTHS)
def test_ranks_of_a_step_cost_alike(name):
    for ranks in (1, 2, 8, 64, 512):
        for microbatches, rows in ((1, 1), (2, 1), (1, 2), (16, 1)):
            if (size := ranks * microbatches * rows) > 2000:
                continue  # 512 ranks x 16 micro-batches stand in benchmarks/results/pack.md
            costs, sizes = draw_packs(name, 200 * size + size // 2)
            numbers = {"num_ranks": ranks, "num_microbatches": microbatches, "micro_batch_size": rows}
            order = order_packs(costs, **numbers, seed=1, sizes=sizes)
            figures = measure_order(costs, order, **numbers, seed=1, sizes=sizes)
            assert figures.ordered.slowest_over_mean <= 1.02
            assert abs(figures.ordered.correlation) < 0.1  # of mean lengths
            assert abs(measure_order(costs, order, **numbers, seed=1).ordered.correlation) < 0.1
            assert figures.ordered.source_distance is None
            if ranks > 1 and microbatches == rows == 1:
                assert figures.random.slowest_over_mean > (1.1 if ranks > 8 else 1.01)


def test_ranks_cost_alike_for_any_number_of_ranks_and_micro_batches():
    checked = uneven = 0

    @settings(max_examples=25, deadline=None)
    @given(
        st.sampled_from([*pack_lengths.SEQ_LENGTHS, "tail"]),
        st.integers(1, 512),
        st.integers(1, 16),
        st.integers(200, 300),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 9),
    )
    def check(name, ranks, microbatches, steps, more, seed):
        nonlocal checked, uneven
        ranks = min(ranks, 1024 // microbatches)
        size = ranks * microbatches
        count = size * steps + int(more * size)
        if name == "tail":  # one pack in a hundred costs up to 100 times as much
            costs = 1 + np.minimum(np.random.default_rng(seed).pareto(0.8, count), 100)
        else:
            costs = draw_costs(name, count, seed)
        numbers = {"num_ranks": ranks, "num_microbatches": microbatches, "seed": seed}
        figures = measure_order(costs, order_packs(costs, **numbers), **numbers).ordered
        assert figures.slowest_over_mean <= 1.02
        assert abs(figures.correlation) < 0.1
        checked += 1
        uneven += count % size > 0

    check()
    assert checked >= 25
    assert uneven > 5


def test_a_random_order_is_measured_beside():
    costs = draw_costs("long 128k", 5000)
    order = order_packs(costs, num_ranks=8, num_microbatches=1, window=0, seed=7)
    figures = measure_order(costs, order, num_ranks=8, num_microbatches=1, seed=7)
    assert figures.ordered == figures.random
    other = measure_order(costs, order, num_ranks=8, num_microbatches=1, seed=8)
    assert other.ordered == figures.ordered != other.random


def test_steps_of_several_packs_a_rank_mix_dear_and_cheap():
    costs = draw_costs("chat 8k", 8 * 8 * 100)
    order = order_packs(costs, num_ranks=8, num_microbatches=8)
    steps = costs[order].reshape(100, 8, 8)
    assert steps.std(axis=(1, 2)).mean() > 0.8 * costs.std()
    assert steps.std(axis=2).mean() < 0.3 * costs.std()  # over the ranks, of each micro-batch
    assert abs(steps.mean(axis=(0, 2)) / costs.mean() - 1).max() < 0.2  # no place is that of the dearest
    alike = order_packs(costs, num_ranks=64, num_microbatches=1)
    assert costs[alike].reshape(100, 64).std(axis=1).mean() < 0.1 * costs.std()


def test_micro_batches_of_several_packs_cost_alike():
    costs = draw_costs("chat 8k", 4 * 4 * 200)
    numbers = {"num_ranks": 1, "num_microbatches": 4, "micro_batch_size": 4}
    order = order_packs(costs, **numbers)
    random = order_packs(costs, **numbers, window=0)
    spreads = [costs[packs].reshape(-1, 4, 4).sum(axis=2) for packs in (order, random)]
    after, before = (float((sums.max(axis=1) / sums.mean(axis=1)).mean()) for sums in spreads)
    assert before > 1.3
    assert after < 1 + (before - 1) / 2


def test_a_longer_window_makes_ranks_more_alike():
    costs = draw_costs("long 128k", 64 * 400)
    slowest = []
    for window in (0, 1, 4, 16, 64, 256):
        order = order_packs(costs, num_ranks=64, num_microbatches=1, window=window)
        slowest.append(measure_order(costs, order, num_ranks=64, num_microbatches=1).ordered.slowest_over_mean)
    assert slowest == sorted(slowest, reverse=True)
    assert slowest[0] > 1.5 > 1.01 > slowest[-1]
    longest = order_packs(costs, num_ranks=64, num_microbatches=1, window=10**9)
    assert (longest == order_packs(costs, num_ranks=64, num_microbatches=1, window=400)).all()


def test_the_seed_decides_the_order_of_steps():
    costs = draw_costs("chat 32k", 4000)
    one, other = (order_packs(costs, num_ranks=4, num_microbatches=2, seed=seed) for seed in (1, 2))
    assert (one != other).mean() > 0.9


def test_sources_are_measured():
    costs, sources = np.ones(8), np.array([[3.0] * 4 + [0] * 4, [0] * 4 + [3.0] * 4])
    numbers = {"num_ranks": 2, "num_microbatches": 1, "sources": sources}
    apart, mixed = np.arange(8), np.array([0, 4, 1, 5, 2, 6, 3, 7])
    assert measure_order(costs, apart, **numbers).ordered.source_distance == 0.5
    assert measure_order(costs, mixed, **numbers).ordered.source_distance == 0
    assert measure_order(costs, mixed, **numbers).ordered.correlation == 0
    numbers["sources"] = np.stack([sources.sum(axis=0), 0 * sources[0]])
    assert measure_order(costs, apart, **numbers).ordered.source_distance == 0


def test_mean_lengths_of_neighbouring_steps_are_compared():
    sizes = np.array([[8.0] * 6, [1, 2, 1, 4, 2, 1]])
    means = [8 / 1.5, 16 / 5, 16 / 3]
    figures = measure_order(np.ones(6), np.arange(6), num_ranks=2, num_microbatches=1, sizes=sizes).ordered
    assert figures.correlation == pytest.approx(np.corrcoef(means[:-1], means[1:])[0, 1])


def test_refusals():
    costs = np.ones(4)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"costs: pack 1 costs .*; use finite numbers over 0"):
            order_packs(np.array([1.0, wrong]), num_ranks=1, num_microbatches=1)
    with pytest.raises(ValueError, match="num_ranks 0: use 1 or more"):
        order_packs(costs, num_ranks=0, num_microbatches=1)
    with pytest.raises(ValueError, match="window -1: use 0 or more steps"):
        order_packs(costs, num_ranks=1, num_microbatches=1, window=-1)
    with pytest.raises(ValueError, match="costs: 4 packs fill no step of 6"):
        measure_order(costs, np.arange(4), num_ranks=3, num_microbatches=2)
