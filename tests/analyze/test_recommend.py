"""Fallback rates, step times and the choice of buckets, against hand-computed cases and brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from support.schedules import analyzed_run, make_costs, make_table

from thdprof.analyze.buckets.cost_table import EagerPoint, built_in_costs
from thdprof.analyze.buckets.recommend import candidate_caps, recommend
from thdprof.analyze.buckets.statistics import Histogram, Profile, fallback_rate, upper_bound
from thdprof.analyze.buckets.step_costs import RankCounts, StepCosts, launched_ahead_ms
from thdprof.analyze.report.analysis import sentence
from thdprof.analyze.settings.limits import Limits
from thdprof.dispatch import Bucket
from thdprof.errors import UsageError


def recommend_for(table, costs, *, independent=None, limits=None, **options):
    run = analyzed_run(table, **options)
    return recommend(run, costs, independent=independent or len(table), limits=limits or Limits())


def brute_force(table, costs, pipeline=1):
    """Gives the mean step time with some buckets by the definition, one micro-batch at a time."""
    frame = table.to_pandas()
    frame["squared"] = 0.0 if table.squared is None else table.squared
    frame["eager_ms"] = [float(costs.eager_ms(np.array([n_seqs]))[0]) for n_seqs in frame["n_seqs"]]
    with_squared = costs.ms_per_squared_token > 0 and costs.squared_tokens is not None and table.squared is not None
    shortest = min(p.ms for p in costs.eager + costs.replay)
    rows_of_steps = [(step, list(rows.itertuples())) for step, rows in frame.groupby("step")]

    def step_ms(buckets) -> float:
        ordered = [(bucket, costs.replay_ms(*_pair(bucket))) for bucket in sorted(buckets)]
        steps = []
        for step, rows in rows_of_steps:
            by_rank = {}
            for row in rows:
                fitting = [ms for b, ms in ordered if row.n_seqs <= b.max_seqs and row.max_seqlen <= b.max_seqlen]
                ms = (fitting[0] if fitting else row.eager_ms) + (costs.outside_ms or 0)
                if with_squared and (fitting or not costs.host_bound):
                    ms += max(-0.9 * shortest, costs.ms_per_squared_token * (row.squared - costs.squared_tokens))
                by_rank[row.dp_rank] = by_rank.get(row.dp_rank, 0.0) + ms
            slowest = max(by_rank.values()) * (1 + (pipeline - 1) / int(table.num_microbatches[step]))
            steps.append(slowest + (costs.optimizer_ms or 0))
        return float(np.mean(steps))

    return step_ms


def _pair(bucket: Bucket) -> tuple[int, int]:
    return bucket.max_seqs, bucket.max_seqlen


def test_fallback_rates_by_hand():
    # two steps, two ranks, two micro-batches: one eager micro-batch, on rank 1 of step 0
    table = make_table([[[1, 2], [9, 3]], [[4, 4], [4, 4]]], ranks=2, num_microbatches=2)
    rate = fallback_rate(table, table.n_seqs > 4)
    assert (rate.microbatch, rate.rank_step, rate.step) == (1 / 8, 1 / 4, 1 / 2)


def test_fallback_rates_with_steps_of_different_size():
    table = make_table([9, 1, 1, 1, 1, 1], ranks=2, num_microbatches=[1, 2])
    rate = fallback_rate(table, table.n_seqs > 4)
    assert (rate.microbatch, rate.rank_step, rate.step) == (1 / 6, 1 / 4, 1 / 2)


def test_step_time_by_hand():
    # cap 2: rank 0 replays twice at 10, rank 1 once and runs once eagerly at 100; the step waits for rank 1
    table = make_table([1, 2, 9, 2], ranks=2, num_microbatches=2)
    costs = make_costs(replay=((2, None, 10.0), (9, None, 50.0)))
    step_costs = StepCosts(table, costs, [2, 9], [64], pipeline=3, n_tokens=64)
    small, large = Bucket(2, 64, 64), Bucket(9, 64, 64)
    times = step_costs.step_ms([(), (small,), (large,), (small, large)])
    bubble = 1 + 2 / 2
    np.testing.assert_allclose(times, np.array([200, 110, 100, 60]) * bubble)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_no_other_choice_of_buckets_is_better(rng, ranks, with_lengths, ragged):
    compared = 0
    for _ in range(3):
        per_step = rng.integers(1, 4, 6) if ragged else 2
        size = int(np.sum(per_step)) * ranks if ragged else 12 * ranks
        n_seqs = rng.integers(1, 30, size)
        lengths = rng.integers(1, 60, size)
        table = make_table(n_seqs, ranks=ranks, num_microbatches=per_step, max_seqlen=lengths)
        replay = [
            (n, s, float(rng.uniform(5, 90))) for n in (1, 10, 40) for s in ((8, 64) if with_lengths else (None,))
        ]
        costs = make_costs(eager=[(1, float(rng.uniform(20, 60))), (30, float(rng.uniform(20, 90)))], replay=replay)
        found = recommend_for(table, costs, pipeline_size=2, limits=Limits(cover_largest=False))
        caps = [c.max_seqs for c in found.candidates]
        longest = max(64, int(lengths.max()))
        if with_lengths:
            histogram = Histogram.count(table.max_seqlen)
            sizes = sorted({histogram.percentile(p) for p in (50, 90, 99, 100)} | {longest})
        else:
            sizes = [longest]
        everything = [Bucket(n, s, 64) for n in caps for s in sizes]
        step_ms = brute_force(table, costs, 2)
        assert step_ms(found.buckets) == pytest.approx(found.step_ms)
        choices = [c for k in range(4) for c in combinations(everything, k)]
        if len(choices) > 150:
            choices = [choices[i] for i in rng.choice(len(choices), 150, replace=False)]
        for choice in choices:
            assert step_ms(choice) >= found.step_ms - 1e-6
            compared += 1
    assert compared > 50


def test_distinct_rows_of_counts_are_those_of_every_rank_and_step(rng):
    checked = 0
    for classes, most, ragged in ((1, 3, False), (5, 4, True), (12, 60, False), (30, 200, True)):  # the last overflow
        ranks, steps = 3, 40
        per_step = rng.integers(1, most + 1, steps) if ragged else np.full(steps, most)
        table = make_table(rng.integers(1, 9, int(per_step.sum()) * ranks), ranks=ranks, num_microbatches=per_step)
        drawn = rng.choice(classes, len(table), p=rng.dirichlet(np.full(classes, 0.3)))
        found = RankCounts.count(table, drawn, classes)
        assert len(np.unique(found.counts, axis=0)) == len(found.counts)
        marked = rng.random(classes) < 0.3
        positions = np.array([table.position(index)[:2] for index in range(len(table))])
        for step in range(steps):
            for rank in range(ranks):
                here = drawn[(positions == (step, rank)).all(axis=1)]
                expected = np.bincount(here, minlength=classes)
                np.testing.assert_array_equal(found.counts[found.row[step, rank]], expected)
                assert found.any_in(marked)[step, rank] == marked[here].any()
                checked += 1
    assert checked == 480


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_step_times_do_not_depend_on_how_counts_are_kept(rng, monkeypatch, ranks):
    """Once for each distinct row of counts, or once for each rank and step."""
    table = make_table(rng.integers(1, 30, 50 * ranks * 4), ranks=ranks, num_microbatches=4)
    costs = make_costs(replay=((1, None, 10.1), (30, None, 47.3)))
    choices = [(), *((Bucket(n, 64, 64),) for n in (5, 20, 30)), (Bucket(5, 64, 64), Bucket(30, 64, 64))]
    found = StepCosts(table, costs, [5, 20, 30], [64], 2, n_tokens=64).step_ms(choices)
    np.testing.assert_allclose(found, [*map(brute_force(table, costs, 2), choices)])
    monkeypatch.setattr(StepCosts, "_ms_of_rows", lambda self, weights: None)
    again = StepCosts(table, costs, [5, 20, 30], [64], 2, n_tokens=64).step_ms(choices)
    np.testing.assert_array_equal(found, again)


def test_step_times_with_what_differs_between_micro_batches_of_one_bucket():
    # both ranks replay twice at 10; rank 1 has 200 more squared tokens than the table's at 0.1 ms each, rank 0 fewer
    table = make_table([1, 2, 2, 2], ranks=2, num_microbatches=2, squared=[90, 100, 100, 300])
    costs = make_costs(
        replay=((2, None, 10.0),), ms_per_squared_token=0.1, squared_tokens=100.0, outside_ms=3.0, optimizer_ms=7.0
    )
    one = Bucket(2, 64, 64)
    step_costs = StepCosts(table, costs, [2], [64], pipeline=3, n_tokens=64)
    # eagerly the host is the bound, and longer attention hides behind it
    np.testing.assert_allclose(step_costs.step_ms([(), (one,)]), [(200 + 6) * 2 + 7, (20 + 6 + 20) * 2 + 7])
    np.testing.assert_allclose(step_costs.total_ms([(one,)]), [4 * 13 - 1 + 20])
    # a micro-batch of far shorter documents than the table's keeps a tenth of the shortest time
    short = make_table([2], ranks=1, num_microbatches=1, squared=[0])
    steep = costs.model_copy(update={"ms_per_squared_token": 50.0})
    found = StepCosts(short, steep, [2], [64], 1, n_tokens=64).step_ms([(), (one,)])
    np.testing.assert_allclose(found, [100 + 3 + 7, 10 - 9 + 3 + 7])


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("kind", ["eager times alike", "eager times differ", "ragged", "the GPU is the bound"])
def test_step_times_equal_the_definition_with_squared_lengths(rng, ranks, kind):
    compared = 0
    for _ in range(8):
        per_step = rng.integers(1, 5, 10) if kind == "ragged" else np.full(10, 3)
        size = int(per_step.sum()) * ranks
        table = make_table(
            rng.integers(1, 30, size), ranks=ranks, num_microbatches=per_step, squared=rng.lognormal(5, 1, size).round()
        )
        costs = make_costs(
            eager=[(1, 60.0), (30, 90.0 if kind == "eager times differ" else 60.0)],
            replay=((1, None, 58.1 if kind == "the GPU is the bound" else 10.1), (30, None, 59.3)),
            ms_per_squared_token=float(rng.choice([0.01, 0.1, 1.0])),
            squared_tokens=150.0,
            outside_ms=float(rng.choice([0.0, 4.0])),
            optimizer_ms=11.0,
        )
        choices = [(), *((Bucket(n, 64, 64),) for n in (5, 20, 30)), (Bucket(5, 64, 64), Bucket(30, 64, 64))]
        step_costs = StepCosts(table, costs, [5, 20, 30], [64], 2, n_tokens=64)
        step_ms = brute_force(table, costs, 2)
        np.testing.assert_allclose(step_costs.step_ms(choices), [*map(step_ms, choices)])
        found = recommend_for(table, costs, pipeline_size=2)
        assert found.step_ms == pytest.approx(step_ms(found.buckets))
        for candidate in found.candidates:
            relative = step_ms([Bucket(candidate.max_seqs, 64, 64)]) / step_ms(())
            assert candidate.relative_step_time == pytest.approx(relative)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize(
    ("fields", "squared"),
    [
        ({"ms_per_squared_token": 0.5}, True),
        ({"squared_tokens": 100.0}, True),
        ({"ms_per_squared_token": 0.5, "squared_tokens": 100.0}, False),
    ],
)
def test_squared_lengths_that_are_not_known_change_no_time(rng, fields, squared):
    drawn = rng.integers(1, 30, 320), rng.integers(1, 1000, 320)
    plain = make_table(drawn[0], ranks=8, num_microbatches=4)
    table = make_table(drawn[0], ranks=8, num_microbatches=4, squared=drawn[1] if squared else None)
    choices = [(), (Bucket(5, 64, 64), Bucket(30, 64, 64))]
    replay = ((1, None, 10.1), (30, None, 47.3))
    with_fields, without = (
        StepCosts(t, make_costs(replay=replay, **f), [5, 30], [64], 2, n_tokens=64).step_ms(choices)
        for t, f in ((table, fields), (plain, {}))
    )
    np.testing.assert_array_equal(with_fields, without)


def test_eager_is_an_answer():
    found = recommend_for(make_table([3, 4, 5, 6], ranks=1, num_microbatches=1), make_costs(eager=5.0))
    assert found.buckets == ()
    assert found.one_cap is None
    assert found.relative_step_time == 1
    assert found.fallback_rate.step == 1


@pytest.mark.parametrize(("replay_ms", "chosen"), [(97.9, 1), (98.5, 0), (101.0, 0)])
def test_graphs_that_save_next_to_nothing_are_not_recommended(replay_ms, chosen):
    """Where the GPU is the bound, a gain within the spread of measured times is no reason to spend memory."""
    costs = make_costs(replay=((1, None, replay_ms), (100, None, replay_ms)))
    found = recommend_for(make_table([3, 3], ranks=1, num_microbatches=1), costs)
    assert len(found.buckets) == chosen
    assert (found.one_cap is not None) == bool(chosen)
    assert found.relative_step_time == (pytest.approx(replay_ms / 100) if chosen else 1.0)
    assert found.unlimited_relative_step_time == pytest.approx(min(1.0, replay_ms / 100))
    forced = recommend_for(make_table([3, 3], ranks=1, num_microbatches=1), costs, limits=Limits(max_fallback_rate=0.0))
    assert len(forced.buckets) == 1
    assert forced.one_cap is not None


@pytest.mark.parametrize(
    ("best", "experts", "told"),
    [
        (1.0, "none", "eagerly is quickest"),
        (0.99, "padded", "would take 0.990 of the eager step time, no clear gain; the GPU is busy without them too"),
        (0.99, "dropless", "no clear gain; the host is busy without them too"),
        (0.5, "none", "within"),
    ],
)
def test_the_report_says_why_there_are_no_graphs(best, experts, told):
    analysis = SimpleNamespace(
        recommendation=SimpleNamespace(buckets=(), unlimited_relative_step_time=best),
        times=SimpleNamespace(origin="measured"),
        timed=True,
        costs=make_costs(),
        verdict=SimpleNamespace(ruling="graphs do not pay"),
        router_reason="a rank exchanges rows" if experts == "dropless" else None,
    )
    assert told in sentence(analysis)


def test_without_times_no_time_is_a_reason_for_no_graphs():
    chosen = SimpleNamespace(buckets=(), unlimited_relative_step_time=0.5)
    times = SimpleNamespace(origin="none")
    told = sentence(SimpleNamespace(recommendation=chosen, times=times, timed=False, costs=make_costs()))
    assert told == "Capture no graphs: none keep to the limits."


def test_a_larger_cap_that_is_cheaper_is_taken():
    costs = make_costs(replay=((16, None, 13.3), (64, None, 12.3)))
    found = recommend_for(make_table([5] * 8, ranks=1, num_microbatches=1), costs)
    assert [b.max_seqs for b in found.buckets] == [64]


def test_caps_are_rounded_up_to_the_granularity():
    costs = make_costs(replay=((1, None, 10.0),), max_seqs_granularity=8)
    found = recommend_for(make_table([5, 9, 17, 17], ranks=1, num_microbatches=1), costs)
    assert [c.max_seqs for c in found.candidates] == [16, 24]


def test_caps_are_rounded_up_to_the_steps_of_a_kernel():
    table = make_table([3, 20, 33, 140], ranks=1, num_microbatches=1)
    replay = ((1, None, 10.0), (600, None, 10.0))
    costs = make_costs(replay=replay, max_seqs_steps=(32, 64, 128), max_seqs_granularity=8)
    assert candidate_caps(Profile.count(table), costs) == [32, 64, 144]
    percentiles = {20, 140}
    found = recommend_for(table, costs)
    assert [c.max_seqs for c in found.candidates] == sorted({32, 64, 144} | percentiles)
    assert found.one_cap.max_seqs == 144  # as quick as 140, and holds more
    assert [costs.round_max_seqs(n) for n in (0, 1, 32, 33, 128, 129, 136)] == [32, 32, 32, 64, 128, 136, 136]


def test_eager_times_at_either_end_of_what_hosts_take():
    costs = make_costs(eager=[(1, 60.0), (30, 90.0)])
    ranged = costs.model_copy(update={"eager": [EagerPoint(n_seqs=1, ms=60.0, range_ms=(40.0, 100.0)), costs.eager[1]]})
    at = np.array([1, 30])
    assert ranged.at_host("low").eager_ms(at).tolist() == [40.0, 90.0]
    assert ranged.at_host("high").eager_ms(at).tolist() == [100.0, 90.0]
    assert ranged.eager_ms(at).tolist() == [60.0, 90.0]
    assert ranged.at_host("low").model_copy(update={"eager": ranged.eager}) == ranged
    assert costs.at_host("high") == costs


def test_memory_budget_and_rate_limit_the_choice():
    table = make_table([1] * 98 + [50, 100], ranks=1, num_microbatches=1)
    costs = make_costs(replay=((1, None, 1.0), (100, None, 90.0)), slot_bytes=1000, bucket_overhead=0.5)
    free = recommend_for(table, costs)
    assert len(free.buckets) == 3
    assert free.graph_memory_bytes == 2000
    assert len(recommend_for(table, costs, limits=Limits(graph_memory_bytes=1500)).buckets) == 2
    assert recommend_for(table, costs, limits=Limits(graph_memory_bytes=10)).buckets == ()
    kept = recommend_for(table, costs, limits=Limits(num_buckets=1, max_fallback_rate=0.01))
    assert kept.fallback_rate.step <= 0.01
    with pytest.raises(UsageError, match="no choice of buckets"):
        recommend_for(table, costs, limits=Limits(graph_memory_bytes=10, max_fallback_rate=0.01))
    for limit, fits in ((1000, True), (999, False)):  # the memory of one bucket
        found = recommend_for(table, costs, limits=Limits(graph_memory_bytes=limit))
        assert (len(found.buckets) == 1, found.one_cap is not None) == (fits, fits)
    unknown = recommend_for(
        table, make_costs(replay=((1, None, 1.0), (100, None, 90.0))), limits=Limits(graph_memory_bytes=1)
    )
    assert (len(unknown.buckets), unknown.graph_memory_bytes) == (3, None)


def test_the_limit_is_on_steps_of_which_any_rank_runs_eagerly():
    """One micro-batch in 20 is eager under the quickest bucket: that is one (rank, step) in 20, and one step in 10."""
    table = make_table([1] * 19 + [100], ranks=2, num_microbatches=1)
    costs = make_costs(replay=((1, None, 1.0), (100, None, 90.0)))
    for most, cap in ((0.1, 1), (0.05, 100)):
        found = recommend_for(table, costs, limits=Limits(num_buckets=1, max_fallback_rate=most))
        assert [b.max_seqs for b in found.buckets] == [cap]
        assert found.fallback_rate.step <= most


def test_the_bound_counts_eager_micro_batches_among_independent_ones_upwards():
    """One in ten of the table is eager: half a micro-batch of five that are independent counts as one."""
    table = make_table([1] * 9 + [100], ranks=2, num_microbatches=1)
    costs = make_costs(replay=((1, None, 1.0), (100, None, 900.0)))
    found = recommend_for(table, costs, independent=5)
    assert found.fallback_rate.microbatch == 0.1
    assert found.fallback_rate_upper_bound == pytest.approx(upper_bound(1, 5))
    together = replace(make_table([1] * 18 + [100] * 2, ranks=2, num_microbatches=1), shared_capture_ranks=2)
    found = recommend_for(together, costs, independent=20)  # pairs decide alike: ten decisions, of which one is eager
    assert found.fallback_rate.microbatch == 0.1
    assert found.fallback_rate_upper_bound == pytest.approx(upper_bound(1, 10))
    assert recommend_for(together, costs, independent=1).fallback_rate_upper_bound == 1.0


@pytest.mark.parametrize(("stride", "searched"), [(1, 10), (4, 3), (10, 1)])
def test_a_search_that_takes_too_long_looks_at_evenly_spaced_steps(rng, monkeypatch, stride, searched):
    """The figures of what it chooses are of all steps; what would be best without limits is then not known."""
    table = make_table(rng.integers(1, 90, 40), ranks=2, num_microbatches=2)
    costs = make_costs(replay=((1, None, 10.0), (100, None, 90.0)), slot_bytes=1000, bucket_overhead=0.5)
    monkeypatch.setattr("thdprof.analyze.buckets.recommend.search_stride", lambda *_: stride)
    found = recommend_for(table, costs, limits=Limits(num_buckets=2, graph_memory_bytes=1000))
    assert len(found.buckets) == 1
    assert found.graph_memory_bytes == 1000
    assert found.steps_searched == searched
    assert found.step_ms == pytest.approx(brute_force(table, costs)(found.buckets))
    assert found.eager_step_ms == pytest.approx(brute_force(table, costs)(()))
    assert found.relative_step_time == found.step_ms / found.eager_step_ms
    assert (found.unlimited_relative_step_time < found.relative_step_time) == (searched == 10)


def test_choices_are_compared_on_the_evenly_spaced_steps_alone(monkeypatch):
    """Every other step has a single document, where all steps make the larger bucket the quickest."""
    table = make_table([[100 if step % 2 else 1] * 2 for step in range(10)], ranks=2, num_microbatches=1)
    costs = make_costs(replay=((1, None, 1.0), (100, None, 40.0)))
    for stride, cap in ((1, 100), (2, 1)):
        monkeypatch.setattr("thdprof.analyze.buckets.recommend.search_stride", lambda *_, stride=stride: stride)
        found = recommend_for(table, costs, limits=Limits(num_buckets=1))
        assert [b.max_seqs for b in found.buckets] == [cap]


def test_ranks_that_decide_together_have_caps_of_what_they_ask_for_together(rng):
    table = replace(make_table(rng.integers(1, 100, 400), ranks=2, num_microbatches=2), shared_capture_ranks=2)
    together, alone = (np.unique(np.percentile(v, [50, 90], method="inverted_cdf")) for v in (
        table.joint(table.n_seqs), table.n_seqs
    ))  # fmt: skip
    assert not {*together} <= {*alone}
    caps = {c.max_seqs for c in recommend_for(table, make_costs()).candidates}
    assert caps >= {*together, *alone}


def test_more_choices_than_are_compared_are_refused(monkeypatch):
    table, costs = make_table([1, 20, 33, 140], ranks=1, num_microbatches=1), make_costs()
    assert len(recommend_for(table, costs, limits=Limits(num_buckets=2)).candidates) == 4
    monkeypatch.setattr("thdprof.analyze.buckets.recommend._MOST_CHOICES", 10)
    with pytest.raises(UsageError, match=r"--buckets 2: 11 choices of 4 shapes are more than the 10 that are compared"):
        recommend_for(table, costs, limits=Limits(num_buckets=2))


def test_buckets_are_of_the_runs_context_parallel_size(rng):
    table = make_table(rng.integers(1, 90, 40), ranks=2, num_microbatches=2, max_seqlen=rng.integers(1, 129, 40))
    found = recommend_for(table, make_costs(), longest_possible={2: 128})
    assert {(b.n_tokens, b.cp_size) for b in found.buckets} == {(64, 2)}
    assert max(b.max_seqlen for b in found.buckets) == 128
    assert (found.fallback_rate.step, sum(found.shares)) == (0.0, pytest.approx(1.0))
    assert found.relative_step_time < 0.5


def test_systems_a_with_64_microbatches_a_step(rng):
    """P90 or P99 with eager fallback stalls most steps; buckets do not."""
    points, values = (0, 0.5, 0.9, 0.96, 0.99, 1), np.log([1, 12, 43, 64, 106, 358])
    n_seqs = np.ceil(np.exp(np.interp(rng.random(64 * 500), points, values)) - 1e-9)
    table = make_table(n_seqs, ranks=8, num_microbatches=8)
    found = recommend_for(table, built_in_costs("transformer_engine", 2048), longest_possible={1: 2048})
    at = {name: c for c in found.candidates for name in c.names}
    assert at["p90"].fallback_rate.step > 0.99
    assert at["p99"].fallback_rate.step > 0.4
    assert found.fallback_rate.step == 0
    assert len(found.buckets) == 3
    assert found.relative_step_time < 0.3


def test_percentiles_are_numpys(rng):
    compared = 0
    for size in (1, 2, 7, 100, 1000, 1001, 5000):
        values = rng.integers(0, 50, size)
        histogram = Histogram.count(values)
        for percent in (50, 90, 95, 99, 99.9, 100):
            assert histogram.percentile(percent) == np.percentile(values, percent, method="inverted_cdf")
            compared += 1
    assert compared == 42


def test_histograms_merge(rng):
    values = rng.integers(1, 40, 600)
    parts = [Histogram.count(part) for part in np.split(values, [10, 300])]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    np.testing.assert_array_equal(merged.counts, Histogram.count(values).counts)
    assert merged.total == 600


def test_clopper_pearson_bound():
    from scipy.stats import beta

    assert upper_bound(0, 100) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert upper_bound(3, 100) == pytest.approx(beta.ppf(0.95, 4, 97))
    assert upper_bound(5, 5) == 1


def test_costs_between_and_beyond_measured_points():
    table = built_in_costs("torch", 4096)
    assert table.replay_ms(64, 798) == 13.1
    assert table.replay_ms(64, 4096) == 15.8
    assert table.replay_ms(1, 100) == 12.5
    assert 13.1 < table.replay_ms(64, 2000) < 15.8
    assert table.replay_ms(2048, 4096) > 71.9
    assert built_in_costs("transformer_engine", 2048).replay_ms(64, 5) == 12.3
    assert built_in_costs("transformer_engine", 8192).n_tokens == 4096


def outlier(largest=50):
    """Micro-batches of up to 3 documents, and one of `largest`."""
    return make_table([1, 2, 3, 2] * 24 + [largest, 1, 1, 1], ranks=1, num_microbatches=4)


def test_several_buckets_hold_the_largest_micro_batch_though_leaving_it_out_is_quicker():
    costs = make_costs(eager=30.0, replay=((4, None, 10.0), (50, None, 60.0)))
    quickest = recommend_for(outlier(), costs, limits=Limits(cover_largest=False))
    covering = recommend_for(outlier(), costs)
    assert ([b.max_seqs for b in quickest.buckets], quickest.fallback_rate.step) == ([3], 1 / 25)
    assert ([b.max_seqs for b in covering.buckets], covering.fallback_rate.step) == ([3, 50], 0.0)
    assert quickest.step_ms < covering.step_ms < 1.1 * quickest.step_ms


@pytest.mark.parametrize("large_ms", [60.0, 15.0])
def test_one_bucket_is_the_quickest_one(large_ms):
    """Also where a bucket for all, at 15 ms, would keep most of the gain."""
    costs = make_costs(eager=30.0, replay=((4, None, 10.0), (50, None, large_ms)))
    found = recommend_for(outlier(), costs, limits=Limits(num_buckets=1))
    assert [b.max_seqs for b in found.buckets] == [3]


def test_the_largest_micro_batch_stays_eager_where_holding_it_would_cost_half_the_gain():
    costs = make_costs(eager=30.0, replay=((4, None, 10.0), (50, None, 5000.0)))
    assert [b.max_seqs for b in recommend_for(outlier(), costs).buckets] == [3]


def test_holding_the_largest_micro_batch_makes_no_graphs_that_do_not_pay():
    costs = make_costs(eager=30.0, replay=((4, None, 29.9), (50, None, 60.0)))
    assert recommend_for(outlier(), costs).buckets == ()


def test_holding_the_largest_micro_batch_never_makes_graphs_that_pay_into_graphs_that_do_not():
    """Buckets that save 3% pay, and keep half of that with the largest micro-batch held: 1.6%, which does not pay."""
    costs = make_costs(replay=((4, None, 96.9), (50, None, 240.0)))
    quickest = recommend_for(outlier(), costs, limits=Limits(cover_largest=False))
    covering = recommend_for(outlier(), costs)
    assert [b.max_seqs for b in quickest.buckets] == [3]
    assert covering.buckets == quickest.buckets
    both = Bucket(3, 64, 64), Bucket(50, 64, 64)
    held_ms = brute_force(outlier(), costs)(both)
    assert 0.98 * covering.eager_step_ms < held_ms < (covering.eager_step_ms + quickest.step_ms) / 2


def test_the_longest_document_is_held_as_well():
    table = make_table([2] * 96, ranks=1, num_microbatches=4, max_seqlen=[8] * 95 + [64])
    replay = ((1, 8, 5.0), (4, 8, 10.0), (1, 64, 50.0), (4, 64, 60.0))
    found = recommend_for(table, make_costs(eager=30.0, replay=replay))
    assert max(b.max_seqlen for b in found.buckets) == 64
    assert found.fallback_rate.microbatch == 0
    quickest = recommend_for(table, make_costs(eager=30.0, replay=replay), limits=Limits(cover_largest=False))
    assert max(b.max_seqlen for b in quickest.buckets) < 64


def _hidden(order, replay: float, waiting: float) -> float:
    """Milliseconds that the host launches ahead, by the definition; `order` says which micro-batches run eagerly."""
    left = hidden = 0.0
    for is_eager in order:
        used = min(left, waiting) if is_eager else -replay
        left, hidden = left - used, hidden + max(used, 0.0)
    return hidden


@pytest.mark.parametrize("waiting", [0.0, 3.0, 10.0, 25.0, 1000.0])
def test_launching_ahead_is_the_mean_over_all_orders(waiting):
    for number in range(1, 9):
        found = launched_ahead_ms(number, 10.0, waiting)
        for eager in range(number + 1):
            orders = [[at in chosen for at in range(number)] for chosen in combinations(range(number), eager)]
            assert found[eager] == pytest.approx(np.mean([_hidden(order, 10.0, waiting) for order in orders]))


@pytest.mark.parametrize(("ranks", "per_step"), [(1, 8), (1, [8, 6] * 2000), (2, 8), (3, 8), (1, 300)])
def test_eager_micro_batches_among_replays_are_launched_ahead(rng, ranks, per_step):
    steps = 4000 if per_step != 300 else 100
    counts = np.broadcast_to(per_step, (steps,))
    table = make_table(rng.integers(1, 11, int(counts.sum()) * ranks), ranks=ranks, num_microbatches=per_step)
    costs = make_costs(eager=[(1, 175.0)], replay=((2, None, 42.0), (8, None, 42.0)), outside_ms=7.0)
    small, large = Bucket(2, 64, 64), Bucket(8, 64, 64)
    choices = [(), (small,), (large,), (small, large)]
    how = {"caps": [2, 8], "lengths": [64], "pipeline": 1, "n_tokens": 64}
    found = StepCosts(table, costs, **how, goes_ahead=True).step_ms(choices)
    without = StepCosts(table, costs, **how).step_ms(choices)
    of_rank_steps = np.split(table.n_seqs, np.cumsum(np.repeat(counts, ranks))[:-1])
    for ms, most, cap in zip(found, without, (0, 2, 8, 8), strict=True):
        expected = []
        for n_seqs in of_rank_steps:
            is_eager = n_seqs > cap
            expected.append(np.where(is_eager, 182.0, 49.0).sum() - _hidden(is_eager.tolist(), 42.0, 175.0 - 42.0))
        slowest = np.reshape(expected, (steps, ranks)).max(axis=1)
        assert ms == pytest.approx(slowest.mean(), rel=0.01 if ranks == 1 and per_step != 300 else 0.05)
        assert ms == most if cap == 0 else ms < most


def test_nothing_is_launched_ahead_where_the_gpu_is_the_bound(rng):
    table = make_table(rng.integers(1, 11, 80), ranks=1, num_microbatches=8)
    costs = make_costs(eager=[(1, 45.0)], replay=((8, None, 42.0),))
    times = [
        StepCosts(table, costs, [8], [64], 1, n_tokens=64, goes_ahead=ahead).step_ms([(Bucket(8, 64, 64),)])
        for ahead in (False, True)
    ]
    assert times[0] == times[1]
