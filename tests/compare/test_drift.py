"""Has the data moved on? Simulated runs: quiet on the plan's own data, an alarm soon after the data moves."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from scipy.stats import hypergeom
from support.plans import plan_of_shares

from thdprof.compare.drift import FALSE_ALARMS_PER_RUN, DriftTest, Moved, tail

SHARES = (0.6, 0.25, 0.1)
"""Of three buckets; one in twenty micro-batches runs eagerly."""
PER_LOOK = 800
"""Micro-batches between two comparisons: 100 steps of 8."""


def first_alarm(plan, kinds, *, per_look=PER_LOOK) -> tuple[int, Moved] | None:
    """The number of the first comparison that gives an alarm, from 1, over micro-batches of these kinds, in order.

    Kind 0 runs eagerly by shape, kind i replays the plan's i-th bucket.
    """
    buckets, test = sorted(plan.shares), DriftTest(plan)
    counts = np.zeros(len(buckets) + 1, dtype=int)
    for look, end in enumerate(range(per_look, len(kinds) + 1, per_look), start=1):
        counts += np.bincount(kinds[end - per_look : end], minlength=len(counts))
        by_shape, *replayed = counts.tolist()
        moved = test.moved(dict(zip(buckets, replayed, strict=True)), by_shape=by_shape, undecided=0)
        if moved is not None:
            return look, moved
    return None


def planned_kinds(plan) -> np.ndarray:
    """The kinds of the plan's own micro-batches, one bucket after the other."""
    shares = [plan.predictions.fallback_rate.microbatch, *(plan.shares[b] for b in sorted(plan.shares))]
    return np.repeat(np.arange(len(shares)), [round(s * plan.microbatches.count) for s in shares])


def test_the_tail_is_that_of_fishers_exact_test():
    compared = 0
    for drawn in range(1, 7):
        for others in range(1, 10):
            for count in range(drawn + 1):
                for marked in range(others + 1):
                    everything, all_marked = drawn + others, count + marked
                    exact = sum(
                        Fraction(
                            comb(all_marked, k) * comb(everything - all_marked, drawn - k), comb(everything, drawn)
                        )
                        for k in range(count, min(drawn, all_marked) + 1)
                    )
                    above = count * others > marked * drawn
                    assert tail(count, drawn, marked, others) == pytest.approx(float(exact) if above else 1.0)
                    compared += above
    assert compared > 500


def chance_by_definition(count, total, share, planned, together) -> float:
    """Fisher's exact test of one count, on whichever side of the plan's share it is, by scipy's distribution."""
    drawn, others = int(total // together), int(planned // together)
    if count < share * total:
        count, share = total - count, 1 - share
    seen, marked = int(count * drawn // total), min(others, int(np.ceil(share * others - 1e-6)))
    above = seen * others > marked * drawn and seen + marked <= drawn + others
    return float(hypergeom.sf(seen - 1, drawn + others, seen + marked, drawn)) if above else 1.0


def alarm_by_definition(plan, seen, together) -> tuple[float, int, int] | None:
    """Chance, micro-batches and kind of the alarm after the comparisons `seen`, cumulative counts of each kind.

    The i-th comparison may spend 1 / (i * (i + 1)) of the chance of a false alarm, shared evenly among its spans, its
    kinds, and too few or too many.
    """
    shares = [plan.predictions.fallback_rate.microbatch, *(plan.shares[b] for b in sorted(plan.shares))]
    looks = len(seen)
    spans = {1 << power for power in range(looks.bit_length()) if 1 << power < looks} | {looks}
    allowed = FALSE_ALARMS_PER_RUN / (looks * (looks + 1)) / len(spans) / len(shares) / 2
    found = []
    for span in sorted(spans):
        counts = np.array(seen[-1]) - (np.array(seen[-1 - span]) if span < looks else 0)
        total = int(counts.sum())
        for kind, (share, count) in enumerate(zip(shares, counts.tolist(), strict=True)):
            chance = chance_by_definition(count, total, share, plan.microbatches.count, together)
            if chance < allowed:
                found.append((chance, total, kind))
    return min(found, default=None, key=lambda alarm: alarm[0])


def test_behind_the_last_micro_batch_in_order_an_alarm_needs_more_than_all_epochs_have(rng):
    plan = plan_of_shares(SHARES, count=8000, steps=1000, dataset_format="lengths", packer="next_fit")
    rows = planned_kinds(plan)
    assert first_alarm(plan, np.tile(rows, 3)) is None
    for _ in range(25):  # other rows of the same kinds
        assert first_alarm(plan, np.concatenate([rows, rng.choice(4, 16_000, p=[0.05, 0.6, 0.25, 0.1])])) is None
    look, moved = first_alarm(plan, np.concatenate([rows, np.zeros(8000, dtype=int)]))
    assert (look, moved.bucket) == (11, None)
    assert moved.observed_share == 1200 / 8800
    assert moved.chance < 1e-6


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({}, 1),
        ({"shared_capture_ranks": 2, "data_parallel_size": 4}, 2),
        ({"dataset_format": "bridge_npy", "loader": "batch", "data_parallel_size": 2, "global_batch_size": 20}, 5),
        ({"dataset_format": "bridge", "loader": "cyclic", "data_parallel_size": 2, "global_batch_size": 20}, 1),
        ({"dataset_format": "lengths", "loader": None, "packer": "dynamic_cp", "max_seqlen_per_dp_cp_rank": 256}, 10),
        ({"dataset_format": "megatron", "loader": "batch"}, 1),
        ({"dataset_format": "bridge", "loader": "cyclic", "packer": "dp_balanced"}, 1),  # rows that are packed already
    ],
)
def test_an_alarm_is_given_exactly_where_the_chance_is_less_than_a_comparison_may_spend(rng, settings, together):
    plan = plan_of_shares((0.6, 0.25, 0.1), count=2000 * together, steps=200 * together, **settings)
    buckets, alarms, quiet, kinds = sorted(plan.shares), 0, 0, set()
    for run in range(20):
        test, counts, seen = DriftTest(plan), np.zeros(4, dtype=int), []
        drift = rng.dirichlet([2, 8, 6, 4]) if run % 2 else [0.05, 0.6, 0.25, 0.1]
        for look in range(1, 12):
            if look == 6:  # the run's data moves on in its middle
                drift = rng.dirichlet([2, 8, 6, 4])
            counts = counts + rng.multinomial(rng.integers(1, 200 * together), drift)
            seen.append(counts.tolist())
            replays = dict(zip(buckets, counts[1:].tolist(), strict=True))
            moved = test.moved(replays, by_shape=int(counts[0]), undecided=0)
            expected = alarm_by_definition(plan, seen, together)
            if expected is None:
                assert moved is None
                quiet += 1
                continue
            chance, total, kind = expected
            assert moved.chance == pytest.approx(chance, rel=1e-6, abs=1e-300)
            if chance > 1e-250:  # else several have no chance at all
                assert (moved.microbatches, moved.bucket) == (total, buckets[kind - 1] if kind else None)
                share = [0.05, 0.6, 0.25, 0.1][kind]
                before = next((s[kind] for s in seen[::-1] if sum(seen[-1]) - sum(s) == total), 0)
                assert moved.predicted_share == pytest.approx(share)
                assert moved.observed_share == pytest.approx((seen[-1][kind] - before) / total)
                kinds.add(kind)
            alarms += 1
    assert alarms > 20
    assert quiet > 20
    assert len(kinds) == 4


@pytest.mark.parametrize("shares", [SHARES, (0.999,), (1.0,)])
@pytest.mark.parametrize("how", ["the plan's run", "resumed in its middle", "another seed", "two epochs"])
def test_runs_of_the_same_data_are_not_said_to_have_moved_on(rng, shares, how):
    plan = plan_of_shares(shares, count=40 * PER_LOOK, steps=4000)
    kinds, alarms = planned_kinds(plan), 0
    for _ in range(25):
        match how:
            case "the plan's run":
                run = rng.permutation(kinds)
            case "resumed in its middle":
                run = rng.permutation(kinds)[len(kinds) // 2 :]
            case "another seed":  # other rows make other micro-batches of the same kinds
                run = rng.choice(kinds, len(kinds))
            case _:
                run = np.concatenate([rng.permutation(kinds) for _ in range(2)])
        alarms += first_alarm(plan, run) is not None
    assert alarms == 0


def test_so_many_comparisons_at_the_5_percent_level_would_have_cried_wolf(rng):
    """The simulated runs are not quiet by themselves: it is the level of the test that makes them so."""
    plan = plan_of_shares(SHARES, count=40 * PER_LOOK, steps=4000)
    kinds = planned_kinds(plan)
    loud = 0
    for _ in range(25):
        eager = np.cumsum(rng.permutation(kinds) == 0)[PER_LOOK - 1 :: PER_LOOK].tolist()
        rates = [(n, (look + 1) * PER_LOOK) for look, n in enumerate(eager)]
        loud += any(tail(n, of, round(0.05 * len(kinds)), len(kinds)) < 0.05 for n, of in rates)
    assert loud > 0
    assert FALSE_ALARMS_PER_RUN < 0.01


@pytest.mark.parametrize(("before", "within"), [(0, 2), (10, 3), (100, 4)])
def test_twice_as_many_fallbacks_are_told_within_400_steps(rng, before, within):
    plan = plan_of_shares(SHARES, count=200 * PER_LOOK, steps=20_000)
    for _ in range(10):
        own = rng.permutation(planned_kinds(plan))[: before * PER_LOOK]
        moved_on = rng.choice(4, 20 * PER_LOOK, p=[0.10, 0.57, 0.235, 0.095])
        look, moved = first_alarm(plan, np.concatenate([own, moved_on]))
        assert before < look <= before + within
        assert moved.bucket is None
        assert moved.observed_share > 1.5 * moved.predicted_share


def test_a_small_change_is_told_when_there_is_enough_of_it(rng):
    """The share of fallbacks rises by a fifth: too little for 100 steps, enough for some thousand."""
    plan = plan_of_shares(SHARES, count=400 * PER_LOOK, steps=40_000)
    own = rng.permutation(planned_kinds(plan))[: 50 * PER_LOOK]
    moved_on = rng.choice(4, 100 * PER_LOOK, p=[0.06, 0.595, 0.245, 0.10])
    look, moved = first_alarm(plan, np.concatenate([own, moved_on]))
    assert 51 < look < 120
    assert moved.microbatches > PER_LOOK


def test_other_shares_of_buckets_are_told_too(rng):
    plan = plan_of_shares(SHARES, count=40 * PER_LOOK, steps=4000)
    _, moved = first_alarm(plan, rng.choice(4, PER_LOOK, p=[0.05, 0.3, 0.55, 0.1]))
    assert moved.bucket in sorted(plan.shares)[:2]
    assert "replayed " in str(moved)


def test_the_words_of_an_alarm():
    plan = plan_of_shares((0.75, 0.125), count=80_000, steps=10_000)
    buckets = sorted(plan.shares)
    moved = DriftTest(plan).moved({buckets[0]: 500, buckets[1]: 200}, by_shape=100, undecided=0)
    assert str(moved) == (
        "of the last 800 micro-batches 25.00% replayed 16 documents of 256 tokens, the plan says 12.50% "
        "(by chance less than once in 10^12)"
    )


def test_nothing_is_said_of_no_micro_batches():
    plan = plan_of_shares((0.75, 0.125), count=80_000, steps=10_000)
    small, large = sorted(plan.shares)
    test = DriftTest(plan)
    for _ in range(3):  # the second and the third time nothing has come since
        assert test.moved({small: 75, large: 13}, by_shape=12, undecided=0) is None
    assert DriftTest(plan).moved({}, by_shape=0, undecided=0) is None


def test_one_micro_batch_is_enough_where_a_large_plan_has_none_of_its_kind():
    plan = plan_of_shares((1.0,), count=80_000, steps=10_000)
    moved = DriftTest(plan).moved({}, by_shape=1, undecided=0)
    assert (moved.bucket, moved.microbatches, moved.chance) == (None, 1, pytest.approx(1 / 80_001))


def test_shares_of_buckets_are_not_compared_while_other_reasons_hide_them():
    """Without a free slot it is not known which bucket a micro-batch would have replayed."""
    plan = plan_of_shares((0.75, 0.125), count=80_000, steps=10_000)
    small, large = sorted(plan.shares)
    assert DriftTest(plan).moved({small: 100, large: 100}, by_shape=100, undecided=500) is None
    assert DriftTest(plan).moved({small: 100, large: 100}, by_shape=600, undecided=0).bucket is None


def test_rows_in_the_files_order_alarm_only_past_what_the_whole_plan_holds():
    """A file whose longest rows come first would be said to have moved on at once, although it is the plan's."""
    plan = plan_of_shares(SHARES, count=8000, steps=1000, dataset_format="lengths", packer="next_fit")
    sorted_rows = planned_kinds(plan)
    assert first_alarm(plan, sorted_rows) is None
    look, moved = first_alarm(plan, np.concatenate([[0] * 400, sorted_rows])[:8000])
    assert (look, moved.chance) == (1, None)
    assert str(moved) == (
        "of the last 800 micro-batches 100.00% ran eagerly by shape, the plan says 5.00% (the whole plan has fewer)"
    )
    for few in (400, 401):  # of 8,000 the plan has 400
        replayed = dict(zip(sorted(plan.shares), (4200, 1000, 200), strict=True))
        moved = DriftTest(plan).moved(replayed, by_shape=few, undecided=8000 - 5400 - few)
        assert (moved is None) == (few == 400)
    assert moved.bucket is None
    assert (moved.observed_share, moved.predicted_share) == (401 / 8000, pytest.approx(0.05))
    replayed[max(replayed)] = 801
    assert DriftTest(plan).moved(replayed, by_shape=0, undecided=8000 - 6001).bucket == max(replayed)
    assert DriftTest(plan).moved(replayed, by_shape=0, undecided=8001 - 6001) is None  # what follows is not known
    sample = plan_of_shares(SHARES, count=8000, steps=1000, dataset_format="lengths", packer="next_fit", exact=False)
    assert first_alarm(sample, sorted_rows) is None
    assert DriftTest(sample).moved({}, by_shape=410, undecided=7590) is None  # of which a sample had 400
    look, moved = first_alarm(sample, np.zeros(8000, dtype=int))  # as in a run by a revised plan whose data goes on
    assert (look, moved.bucket, moved.chance < 1e-12) == (1, None, True)


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({"dataset_format": "bridge", "loader": "batch", "global_batch_size": 16, "data_parallel_size": 2}, 8),
        ({"dataset_format": "lengths", "loader": None, "packer": "dp_balanced", "data_parallel_size": 2}, 16),
        ({"data_parallel_size": 8, "shared_capture_ranks": 8}, 8),
    ],
)
def test_micro_batches_that_are_made_together_count_as_one(rng, settings, together):
    """All rows of a rank and step are collated to the same shape: 800 of them are but 100 observations."""
    plan = plan_of_shares(SHARES, count=2000 * 16, steps=2000, **settings)
    kinds = planned_kinds(plan)[::together]
    for _ in range(25):
        assert first_alarm(plan, np.repeat(rng.permutation(kinds), together)) is None
    assert first_alarm(plan, np.repeat(rng.choice(4, 1000, p=[0.3, 0.4, 0.2, 0.1]), together)) is not None


def test_only_rows_that_a_file_gives_in_its_order_are_compared_with_the_whole_plan():
    in_order = {"dataset_format": "lengths", "packer": "next_fit", "loader": "single"}
    for changes in ({"loader": "cyclic"}, {"dataset_format": "megatron"}, {"max_num_samples": 99}, {}):
        plan = plan_of_shares(SHARES, count=8000, steps=1000, **{**in_order, **changes})
        moved = DriftTest(plan).moved({}, by_shape=300, undecided=0)
        assert (moved is None) == (not changes)  # the plan has 400 of them
