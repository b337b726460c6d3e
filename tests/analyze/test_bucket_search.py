"""The search over choices of buckets: each part against its definition, on made-up times."""

from __future__ import annotations

import math
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest
from support.schedules import make_table

from thdprof.analyze.buckets import recommend
from thdprof.analyze.buckets.recommend import (
    choices_of,
    choose_covering,
    choose_quickest,
    refuse_long_search,
    search_stride,
    subsets,
)
from thdprof.dispatch import Bucket
from thdprof.errors import UsageError

BUCKETS = [Bucket(n, 64, 64) for n in (8, 2, 16, 4)]


def test_choices_are_all_subsets_of_at_most_so_many_buckets_fewest_first():
    compared = 0
    for count in range(5):
        for most in range(6):
            given = BUCKETS[:count]
            found = subsets(given, most)
            assert [len(choice) for choice in found] == sorted(len(choice) for choice in found)
            assert all(list(choice) == sorted(choice) for choice in found)
            expected = {frozenset(c) for size in range(min(most, count) + 1) for c in combinations(given, size)}
            assert {frozenset(choice) for choice in found} == expected
            assert len(found) == len(expected)
            compared += len(found)
            assert choices_of([given], most, SimpleNamespace()) == found
    assert compared > 100


def made_up_times(rng, shapes, most, *, digits):
    """Costs that know a time for every choice out of one size; rounded times have ties."""
    times = {choice: round(float(rng.random()), digits) for part in shapes for choice in subsets(part, most)}
    return SimpleNamespace(total_ms=lambda choices: np.array([times[choice] for choice in choices]))


def shortened(part, most, costs):
    """The quickest choice of each number of buckets that is quicker than all of fewer; and the largest bucket."""
    kept, best = [], math.inf
    for size in range(min(most, len(part)) + 1):
        of_size = [choice for choice in subsets(part, most) if len(choice) == size]
        times = costs.total_ms(of_size)
        if times.min() < best:
            kept.append(of_size[int(times.argmin())])
            best = float(times.min())
    first = part[0]
    largest = Bucket(max(b.max_seqs for b in part), max(b.max_seqlen for b in part), first.n_tokens, first.cp_size)
    return [*kept, *([] if (largest,) in kept else [(largest,)])]


@pytest.mark.parametrize("digits", [1, 12])
def test_choices_over_several_sizes_combine_the_quickest_of_each(rng, digits):
    compared = 0
    for _ in range(30):
        every = list(product((2, 4, 8), (16, 64)))
        shapes = [
            [Bucket(*every[i], 64, size) for i in rng.permutation(len(every))[: rng.integers(1, 5)]]
            for size in (1, 2, 4)[: rng.integers(2, 4)]
        ]
        most = int(rng.integers(1, 4))
        costs = made_up_times(rng, shapes, most, digits=digits)
        found = choices_of(shapes, most, costs)
        joined = [sum(parts, ()) for parts in product(*(shortened(part, most, costs) for part in shapes))]
        assert sorted(found) == sorted(joined)
        assert [len(choice) for choice in found] == sorted(map(len, joined))
        compared += len(found)
    assert compared > 300


def test_times_that_differ_by_rounding_alone_do_not_add_a_bucket():
    shapes = [[Bucket(2, 64, 64, size), Bucket(4, 64, 64, size)] for size in (1, 2)]
    ms = {0: 1.0, 1: 1.0 - 1e-12, 2: 0.5}
    costs = SimpleNamespace(total_ms=lambda choices: np.array([ms[len(choice)] for choice in choices]))
    found = choices_of(shapes, 2, costs)
    one_size = [0, 1, 2]  # eagerly, the largest bucket, both; the quickest single bucket gains nothing
    assert [len(choice) for choice in found] == sorted(a + b for a in one_size for b in one_size)
    assert all(choice[0] == Bucket(4, 64, 64, choice[0].cp_size) for choice in found if len(choice) == 1)


@pytest.mark.parametrize("most", [36, 35])
def test_more_joint_choices_than_are_compared_are_refused(monkeypatch, most):
    monkeypatch.setattr(recommend, "_MOST_CHOICES", most)
    shapes = [[Bucket(n, 64, 64, size) for n in (2, 4, 8, 16, 32)] for size in (1, 2)]
    costs = SimpleNamespace(total_ms=lambda choices: np.array([1 / (1 + len(c)) for c in choices]))
    if most == 36:  # eagerly, one to four buckets, and the largest one, of each of two sizes
        assert len(choices_of(shapes, 4, costs)) == 36
        return
    with pytest.raises(UsageError, match=r"^--buckets 4: 36 choices for 2 context-parallel sizes .* than the 35 that"):
        choices_of(shapes, 4, costs)


@pytest.mark.parametrize(("num_shapes", "num_buckets", "choices"), [(5, 2, 16), (3, 9, 8), (4, 4, 16)])
def test_more_choices_of_shapes_than_are_compared_are_refused(monkeypatch, num_shapes, num_buckets, choices):
    monkeypatch.setattr(recommend, "_MOST_CHOICES", choices)
    refuse_long_search(num_shapes, num_buckets)
    monkeypatch.setattr(recommend, "_MOST_CHOICES", choices - 1)
    with pytest.raises(UsageError, match=f"^--buckets {num_buckets}: {choices} choices of {num_shapes} shapes are"):
        refuse_long_search(num_shapes, num_buckets)


def test_the_search_takes_every_so_many_th_step_that_its_work_allows(monkeypatch):
    """Two multiplications for each class of micro-batches, on every rank of every step, under each choice."""
    table = make_table([1] * 80, ranks=4, num_microbatches=2)
    costs = SimpleNamespace(class_counts=np.ones(3))
    work = 10 * 4 * 2 * 3 * 7
    for allowed, stride in ((work, 1), (work - 1, 2), (work // 2, 2), (work // 2 - 1, 3), (work // 10, 10)):
        monkeypatch.setattr(recommend, "_SEARCH_WORK", allowed)
        assert search_stride(table, costs, 7) == stride
    one_rank = make_table([1] * 20, ranks=1, num_microbatches=2)
    assert search_stride(one_rank, costs, 7) == 1  # which needs the totals of the classes alone
    ragged = make_table([1] * 3, ranks=1, num_microbatches=[1, 2])
    monkeypatch.setattr(recommend, "_SEARCH_WORK", 2 * 2 * 3 * 7 - 1)
    assert search_stride(ragged, costs, 7) == 2


def test_the_search_over_groups_of_ranks_takes_longer_for_each_micro_batch(monkeypatch):
    class Grouped:
        data_parallel_size, uniform, groups, num_steps = 4, True, object(), 10

        def __len__(self):
            return 50

    work = 50 * 7 * 8
    for allowed, stride in ((work, 1), (work - 1, 2), (work // 5, 5), (1, 10)):  # one step is left at least
        monkeypatch.setattr(recommend, "_SEARCH_WORK", allowed)
        assert search_stride(Grouped(), SimpleNamespace(class_counts=np.ones(99)), 7) == stride


def made_up_choices(rng):
    """Choices with made-up times, some of them infinite and some alike, and the rate of steps with a fallback."""
    choices = subsets(BUCKETS, 2)
    times = np.round(rng.random(len(choices)), 1)
    times[rng.random(len(choices)) < 0.2] = np.inf
    steps = {choice: round(float(rng.random()), 1) if choice else 1.0 for choice in choices}
    rates = SimpleNamespace(fallback_rate=lambda choice: SimpleNamespace(step=steps[choice]))
    return choices, times, steps, rates


@pytest.mark.parametrize("most", [None, 0.0, 0.3, 1.0])
def test_the_quickest_choice_within_the_limits_has_the_fewest_of_alike_buckets(rng, most):
    found = refused = 0
    for _ in range(200):
        choices, times, steps, rates = made_up_choices(rng)
        kept = [
            (time, index)
            for index, (choice, time) in enumerate(zip(choices, times + rng.random(len(times)) * 1e-10, strict=True))
            if np.isfinite(time) and (most is None or steps[choice] <= most)
        ]
        if kept:
            _, best = min((round(time, 9), index) for time, index in kept)
            assert choose_quickest(choices, times, rates, most) == choices[best]
            found += 1
        else:
            with pytest.raises(UsageError, match="no choice of buckets within the graph-memory budget"):
                choose_quickest(choices, times, rates, most)
            refused += 1
    assert found > 30
    assert most != 0.0 or refused > 0


def test_the_quickest_covering_choice_holds_every_class_and_takes_no_longer_than_it_may(rng):
    found = 0
    for _ in range(300):
        choices, times, *_ = made_up_choices(rng)
        held = {bucket: int(rng.integers(0, 8)) for bucket in BUCKETS}  # of three classes, as bits
        costs = SimpleNamespace(class_counts=np.ones(3), classes_held=held.__getitem__)
        covering = [
            (time, index)
            for index, (choice, time) in enumerate(zip(choices, times, strict=True))
            if {place for b in choice for place in range(3) if held[b] >> place & 1} == {0, 1, 2} and np.isfinite(time)
        ]
        if not covering:
            assert choose_covering(choices, times, costs, most_ms=10.0) == ()
            continue
        time, best = min(covering)
        assert choose_covering(choices, times, costs, most_ms=time) == choices[best]
        assert choose_covering(choices, times, costs, most_ms=time - 0.01) == ()
        found += 1
    assert found > 100
