"""`thdprof calibrate --stats`: a cost table from the statistics of two runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.command import run_in_process

from thdprof.analyze.buckets.cost_table import load_costs
from thdprof.compare.costs import costs_of_runs
from thdprof.compare.statistics import read_stats
from thdprof.dispatch import Bucket, FallbackReason
from thdprof.errors import UsageError
from thdprof.runtime.stats import Stats, TimedPass

TOKENS = 4096
REPLAY_MS = {16: 40.0, 64: 42.0}
EAGER_MS, OUTSIDE_MS, SLOPE = 120.0, 9.0, 1e-6
STAMP = dict.fromkeys(("torch", "transformer_engine", "cudnn", "megatron_core", "gpu", "processor"), "1")
RUN = {"replay": True, "model": "28 layers", "attention": "TE", "n_tokens": TOKENS, "pipeline_parallel_size": 1,
       "model_chunks": 1, "num_slots": 2, "stamp": STAMP}  # fmt: skip


def trained(*, replay: bool, eager_every: int = 5, steps: int = 20, pipeline: int = 1) -> Stats:
    """Statistics of a run that takes exactly the times above, but for a capture and a verified step."""
    stats, random, now = Stats(), np.random.default_rng(0), 0.0
    buckets = {cap: Bucket(cap, TOKENS, TOKENS) for cap in REPLAY_MS}
    for step in range(steps):
        ms = []
        for number in range(8):
            cap, squared = (16, 64)[number % 2], float(random.uniform(1e6, 6e6))
            if replay and number % eager_every == 4:
                stats.fallbacks[FallbackReason.too_many_seqs] += 1
                ms.append(EAGER_MS + OUTSIDE_MS)
                continue
            stats.replays[buckets[cap]] += 1
            passed = REPLAY_MS[cap] + SLOPE * squared if replay else EAGER_MS
            stats.passes.append(TimedPass(bucket=buckets[cap], n_seqs=cap // 2, squared_tokens=squared, ms=passed))
            ms.append(passed + OUTSIDE_MS)
        verified = step == 7
        stats.verified[buckets[16]] += verified
        now += (sum(ms) / 1000) * (1 + (pipeline - 1) / 8) + 30.0 * (step == 1) + 0.3 * verified
        stats.end_step(now)
    return stats


@pytest.fixture
def statistics_of(tmp_path):
    """Writes the statistics of two runs, whose `run` has other values, and returns their files."""

    def write(on: Stats | None = None, off: Stats | None = None, **changed: object):
        files = [tmp_path / "on.jsonl", tmp_path / "off.jsonl"]
        pipeline = int(str(changed.get("pipeline_parallel_size", 1)))
        for path, stats, replay in zip(files, (on, off), (True, False), strict=True):
            stats = stats or trained(replay=replay, pipeline=pipeline)
            stats.append_jsonl(path, run={**RUN, **changed, "replay": replay}, pool_bytes=2**30)
        return files

    return write


@pytest.mark.parametrize("pipeline", [1, 4])
def test_the_table_has_the_times_that_the_runs_took(statistics_of, tmp_path, pipeline):
    files, table = statistics_of(pipeline_parallel_size=pipeline), tmp_path / "costs.yaml"
    ran = run_in_process("calibrate", "--stats", files[1], "--stats", files[0], "-o", table)
    assert ran.returncode == 0, ran.stderr
    costs = load_costs(table)
    assert costs.ms_per_squared_token == pytest.approx(SLOPE, rel=1e-6)
    assert {p.max_seqs: p.ms for p in costs.replay} == pytest.approx(
        {cap: ms + SLOPE * (costs.squared_tokens or 0) for cap, ms in REPLAY_MS.items()}, rel=1e-4
    )
    assert costs.outside_ms == pytest.approx(OUTSIDE_MS, rel=0.03)
    assert costs.eager[0].ms == pytest.approx(EAGER_MS, rel=0.01)
    assert (costs.origin, costs.n_tokens, costs.slot_bytes) == ("measured", TOKENS, round(2**29 / 1.0106))


def test_fields_that_a_run_has_added_by_these_names_are_passed_over(tmp_path):
    path = tmp_path / "stats.jsonl"
    trained(replay=True).append_jsonl(path, steps=100, run="exp-1", passes="none")
    read = read_stats(path)
    assert (read.steps, read.run, read.passes) == (None, None, [])


def test_a_run_that_replayed_in_no_plain_step_is_refused(statistics_of):
    stats = trained(replay=True)
    eager = Counter({FallbackReason.too_many_seqs: 8})
    stats.steps = type(stats.steps)(replace(step, replays=Counter(), fallbacks=eager) for step in stats.steps)
    with pytest.raises(UsageError, match="no step replayed anything"):
        costs_of_runs(statistics_of(stats))


def test_what_does_not_belong_together_is_refused(statistics_of):
    on, off = statistics_of()
    for files in ([on], [on, on], [on, off, off]):
        with pytest.raises(UsageError, match="give the statistics of a run by a plan, and --eager-step-ms"):
            costs_of_runs(files)
    with pytest.raises(UsageError, match="give the statistics of a run by a plan, and --eager-step-ms"):
        costs_of_runs([off], eager_step_ms=9.0)


def test_the_time_of_an_eager_step_stands_for_a_second_run(statistics_of):
    on, off = statistics_of()
    whole = 8 * (EAGER_MS + OUTSIDE_MS)
    table = costs_of_runs([on], eager_step_ms=whole)
    assert table["eager"][0]["ms"] + table["outside_ms"] == pytest.approx(whole / 8)
    assert {**table, "eager": 0, "outside_ms": 0} == {**costs_of_runs([on, off]), "eager": 0, "outside_ms": 0}


def test_too_few_steps_and_untimed_buckets_are_refused(statistics_of):
    with pytest.raises(UsageError, match="holds the times of 2 steps"):
        costs_of_runs(statistics_of(trained(replay=True, steps=4)))
    stats = trained(replay=True)
    stats.passes = type(stats.passes)(timed for timed in stats.passes if timed.bucket != Bucket(64, TOKENS, TOKENS))
    with pytest.raises(UsageError, match="no replay at 64 documents was timed"):
        costs_of_runs(statistics_of(stats))
    stats = trained(replay=True)
    stats.steps = type(stats.steps)(
        replace(step, replays=step.replays + Counter([Bucket(16, 128, TOKENS)])) for step in stats.steps
    )
    with pytest.raises(UsageError, match="not told apart"):
        costs_of_runs(statistics_of(stats))
