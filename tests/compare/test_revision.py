"""The plan that a run lacked: its buckets hold what the message says, and its predictions are the counted shapes'."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.plans import plan_of_shares

from thdprof.compare.drift import bucket_name
from thdprof.compare.revision import revise
from thdprof.dispatch import Bucket, Dispatcher, Shape
from thdprof.plan import load_plan

SHAPES = st.dictionaries(
    st.builds(Shape, st.integers(1, 256), st.integers(1, 256), st.sampled_from([256, 256, 256, 128])),
    st.integers(1, 400),
    min_size=1,
    max_size=12,
)
COMPARED: Counter[str] = Counter()


def eager_by(buckets, seen) -> dict[Shape, int]:
    return {s: n for s, n in seen.items() if not isinstance(Dispatcher(buckets).decide(s), Bucket)}


@settings(max_examples=300, deadline=None)
@example({Shape(1, 1, 128): 1}, 1, [])
@example({Shape(9, 200, 128): 7}, 3, [])
@example({Shape(256, 256, 128): 2}, 1, [])
@example({Shape(30, 64, 128): 400}, 100, [])
@given(SHAPES, st.integers(1, 100), st.lists(st.integers(32, 255), max_size=2))
def hold_what_they_say(seen, steps, longest):
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    if longest:
        buckets = [b.model_copy(update={"max_seqlen": n}) for b, n in zip(plan.graphs.buckets, longest, strict=False)]
        plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"buckets": buckets})})
    found, before = revise(plan, seen, steps=steps, source="a run"), eager_by(plan.captured, seen)
    can_fit = {shape: n for shape, n in before.items() if shape.n_tokens == 256}
    if found is None:
        assert not can_fit
        COMPARED["nothing to revise"] += 1
        return
    total, new = sum(seen.values()), found.plan
    assert found.fit_none == can_fit
    assert found.num_eager == sum(before.values())
    left = eager_by(new.captured, seen)
    assert left == {shape: n for shape, n in before.items() if shape.n_tokens != 256}
    assert set(new.captured) == {*plan.captured, *found.lacking} - {*found.unused}
    assert not set(found.lacking) & {*plan.captured}
    text = found.describe({})
    for bucket in found.lacking:
        fits = [s for s in can_fit if isinstance(Dispatcher([bucket]).decide(s), Bucket)]
        assert fits == [*can_fit]
        most = max(s.n_seqs for s in fits)
        assert most <= bucket.max_seqs < 4 / 3 * most + 1
        assert (
            f"the plan lacks {bucket_name(bucket)}, for {sum(can_fit.values()):,} of {sum(before.values()):,} " in text
        )
        fewest, longest = min(s.n_seqs for s in fits), max(s.max_seqlen for s in fits)
        documents = f"{most}" if fewest == most else f"{fewest} to {most}"
        assert f"({documents} documents of at most {longest} tokens)" in text
        COMPARED["lacking"] += 1
    for bucket in found.unused:
        assert not any(Dispatcher(plan.captured).decide(shape) == bucket for shape in seen)
        assert bucket_name(bucket) in text.partition("no longer replayed: ")[2]
        COMPARED["unused"] += 1
    for part, bucket in zip(new.graphs.buckets, new.captured, strict=True):
        replays = sum(n for shape, n in seen.items() if Dispatcher(new.captured).decide(shape) == bucket)
        assert part.share == pytest.approx(replays / total)
    rate = new.predictions.fallback_rate
    assert rate.microbatch == pytest.approx(sum(left.values()) / total)
    assert rate.microbatch <= rate.rank_step + 1e-12
    assert rate.rank_step <= rate.step + 1e-12
    ranks = plan.training.data_parallel_size
    per_rank = max(1, round(total / (steps * ranks)))  # each micro-batch as if independent of the others
    assert rate.rank_step == pytest.approx(1 - (1 - rate.microbatch) ** per_rank)
    assert rate.step == pytest.approx(1 - (1 - rate.microbatch) ** (per_rank * ranks))
    assert rate.microbatch < new.predictions.fallback_rate_upper_bound <= 1
    counted = np.repeat([s.n_seqs for s in seen], [*seen.values()])
    for name, percent in {"p50": 50, "p99": 99, "p99_9": 99.9, "max": 100}.items():
        assert getattr(new.microbatches.n_seqs, name) == np.percentile(counted, percent, method="inverted_cdf")
    assert (new.microbatches.count, new.microbatches.exact, new.training) == (total, False, plan.training)


def test_the_revised_buckets_hold_what_the_message_says():
    COMPARED.clear()
    hold_what_they_say()
    assert min(COMPARED[name] for name in ("lacking", "unused")) > 20
    assert COMPARED["nothing to revise"] > 3


def test_a_revised_plan_is_read_again_and_says_where_it_comes_from(tmp_path):
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    found = revise(plan, {Shape(20, 200, 256): 800}, steps=100, source="steps 201 to 300 of a run")
    found.plan.save(tmp_path / "revised.yaml")
    read = load_plan(tmp_path / "revised.yaml")
    assert read == found.plan
    assert (read.predictions.times.origin, read.predictions.times.basis) == (
        "none",
        "predictions are of 800 micro-batches that were counted in steps 201 to 300 of a run; for times, analyse the "
        "data that is trained on now",
    )
    assert [(b.max_seqs, b.max_seqlen, b.share) for b in read.graphs.buckets] == [(20, 256, 1.0)]
    assert read.predictions.step_ms is None
    assert read.identity != plan.identity


def test_the_share_of_steps_that_fall_back_grows_with_the_micro_batches_of_a_step():
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    seen, ranks = {Shape(20, 200, 256): 780, Shape(20, 200, 128): 20}, plan.training.data_parallel_size
    rates = revise(plan, seen, steps=100, source="a run").plan.predictions.fallback_rate
    eager, of_a_rank = 20 / 800, 800 // (100 * ranks)
    assert of_a_rank > 1
    assert rates.microbatch == eager
    assert rates.rank_step == pytest.approx(1 - (1 - eager) ** of_a_rank)
    assert rates.step == pytest.approx(1 - (1 - eager) ** (of_a_rank * ranks))


def test_a_cost_is_named_by_the_plans_own_times_alone():
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    times = {"origin": "modelled", "basis": "x on y", "decoder_replay_ms": 10.0, "decoder_eager_ms": [13.0, 20.0]}
    values = plan.model_dump(mode="json", by_alias=True)
    values["predictions"]["times"] = times
    timed = type(plan).model_validate(values)
    seen = {Shape(5, 200, 256): 500, Shape(17, 200, 256): 100, Shape(23, 200, 256): 200}
    found = revise(timed, seen, steps=100, source="a run")
    assert found.describe({timed.captured[1]: 12 << 20}) == (
        "the plan lacks 24 documents of 256 tokens, for 300 of 300 micro-batches that fit no bucket in the last 100 "
        "steps (17 to 23 documents of at most 200 tokens; eagerly the plan's median one takes 3.0 ms longer "
        "(modelled)); no longer replayed: 16 documents of 256 tokens (12.0 MiB of graphs)"
    )
    assert "ms" not in revise(plan, seen, steps=100, source="a run").describe({})
    assert found.plan.predictions.times.decoder_replay_ms is None


def test_a_bucket_that_is_seldom_replayed_is_not_called_unused_by_few_micro_batches():
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    assert revise(plan, {Shape(5, 200, 256): 49}, steps=5, source="a run") is None
    assert revise(plan, {Shape(5, 200, 256): 50}, steps=5, source="a run").unused == (plan.captured[1],)
    larger = {Shape(5, 200, 256): 5, Shape(20, 200, 256): 1}  # a new bucket holds whatever it would
    assert revise(plan, larger, steps=5, source="a run").unused == (plan.captured[1],)


def test_a_later_revision_holds_what_an_earlier_one_did():
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    first = revise(plan, {Shape(5, 9, 256): 700, Shape(100, 9, 256): 100}, steps=100, source="a run")
    later = {Shape(5, 9, 256): 700, Shape(60, 9, 256): 100}
    again = revise(plan, later, steps=100, source="a run", lacking=first.lacking)
    assert again.plan.captured == first.plan.captured


def test_each_context_parallel_size_has_a_bucket_of_its_own():
    plan = plan_of_shares(
        (0.5, 0.4), count=8000, steps=1000, cp_sizes=(1, 2), packer="balanced_cp", max_seqlen_per_dp_cp_rank=256
    )
    seen = {Shape(30, 100, 256, 1): 400, Shape(30, 400, 256, 2): 300, Shape(3, 900, 256, 4): 100}
    found = revise(plan, seen, steps=100, source="a run")
    assert found.lacking == (Bucket(32, 256, 256, 1), Bucket(32, 448, 256, 2), Bucket(3, 1024, 256, 4))
    assert not eager_by(found.plan.captured, seen)
