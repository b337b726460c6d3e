"""What a run says while it trains: scalars, the log line, the comparison every 100 steps, the line for compare."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.plans import plan_of_shares
from support.rank_processes import start_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from thdprof.compare.statistics import compare, read_stats  # noqa: E402
from thdprof.runtime import FallbackReason, Stats, rank_totals  # noqa: E402
from thdprof.runtime.megatron.trainers.observer import COMPARED_EVERY, Observer  # noqa: E402
from thdprof.runtime.stats import Prediction, TimedPass  # noqa: E402

SHARES = (0.75, 0.2)
PER_STEP = 8


class Installed:
    """What Observer asks of an Installation."""

    replays = True

    def __init__(self, plan) -> None:
        self.counters = Stats(prediction=Prediction.from_plan(plan))
        self.other_chunks: list[Stats] = []
        self.behind: list[Stats] = []

    def prediction_stats(self) -> list[Stats]:
        return self.behind

    def stats(self, chunk: int) -> Stats:
        return [self.counters, *self.other_chunks][chunk]

    def pool_bytes(self) -> int:
        return 3 << 20

    def host_bytes(self) -> int:
        return 1 << 20

    def count(self, replays=(), **fallbacks: int) -> None:
        for bucket, n in replays:
            self.counters.replays[bucket] += n
        for reason, n in fallbacks.items():
            self.counters.fallbacks[FallbackReason(reason)] += n
            self.counters.fallback_sizes[FallbackReason(reason), 1] += n


@pytest.fixture
def plan():
    return plan_of_shares(SHARES, count=8000, steps=1000)


@pytest.fixture
def installed(plan):
    return Installed(plan)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def observer(plan, installed, lines, tmp_path):
    return Observer(installed, plan, stats=tmp_path / "stats.jsonl", say=lines.append)


def train(observer, installed, plan, rates, *, steps=range(1, 101)) -> None:
    """Steps of PER_STEP micro-batches: shares of buckets as `rates`, the rest too many documents."""
    small, large = sorted(plan.shares)
    for number in steps:
        n = number * PER_STEP  # counted up to here in the given shares
        before = n - PER_STEP
        of_small, of_large = (int(n * r) - int(before * r) for r in rates)
        installed.count([(small, of_small), (large, of_large)], too_many_seqs=PER_STEP - of_small - of_large)
        observer.after_step(number)


def test_scalars_are_those_of_stats_and_the_memory(observer, installed, plan):
    small, _ = sorted(plan.shares)
    installed.count([(small, 90)], too_many_seqs=10, not_training=4)
    installed.counters.captures = 2
    assert observer.scalars() == {
        "thdprof/microbatches": 104,
        "thdprof/replayed": 90,
        "thdprof/eager/not_training": 4,
        "thdprof/eager/too_many_seqs": 10,
        "thdprof/captures": 2,
        "thdprof/shape_fallback_rate/observed": 0.1,
        "thdprof/shape_fallback_rate/predicted": pytest.approx(0.05),
        "thdprof/replays/8_documents_256_tokens": 90,
        "thdprof/pool_bytes": 3 << 20,
        "thdprof/host_bytes": 1 << 20,
    }
    own = {name: value for name, value in observer.scalars().items() if not name.endswith("_bytes")}
    assert own == installed.counters.scalars()


def test_captures_and_mismatches_of_multi_token_prediction_are_told_with_the_decoders(
    observer, installed, plan, tmp_path
):
    small, _ = sorted(plan.shares)
    installed.count([(small, 90)])
    installed.counters.captures, installed.counters.verified[small] = 2, 9
    installed.behind = [Stats(captures=2, replays=Counter({small: 90})), Stats(captures=2)]
    installed.behind[1].mismatches[small] += 1
    installed.behind[1].suspicions[small] += 2
    told = observer.scalars()
    assert (told["thdprof/captures"], told["thdprof/mismatches"], told["thdprof/verified"]) == (6, 1, 9)
    assert (told["thdprof/replayed"], told["thdprof/suspicions"]) == (90, 2)
    assert "thdprof mismatches: 1 |" in observer.log_text()
    assert installed.counters.captures == 2
    installed.counters.capture_s, installed.behind[0].capture_s = 1.0, 0.5
    observer.finish(together=False)
    (line,) = [json.loads(text) for text in (tmp_path / "stats.jsonl").read_text().splitlines()]
    assert (line["captures"], line["capture_s"], sum(one["count"] for one in line["mismatches"])) == (6, 1.5, 1)


def test_every_chunk_of_a_virtual_pipeline_is_told(lines, tmp_path):
    """Counted are the micro-batches of the chunk that ran most of them eagerly, and what the watch found in any."""
    plan = plan_of_shares(SHARES, count=8000, steps=1000, virtual_pipeline_size=3)
    installed, path = Installed(plan), tmp_path / "stats.jsonl"
    small, large = sorted(plan.shares)
    second, third = installed.other_chunks = [Stats(), Stats()]
    observer = Observer(installed, plan, stats=path, say=lines.append)
    installed.count([(small, 75), (large, 20)], too_many_seqs=5)
    installed.counters.captures, installed.counters.verified[small] = 2, 4
    for chunk in (second, third):
        chunk.replays.update({small: 75})
        chunk.fallbacks.update({FallbackReason.too_many_seqs: 5, FallbackReason.capture_failed: 20})
        chunk.captures = 1
    third.replays[small] -= 1
    third.fallbacks[FallbackReason.quarantined] += 1
    third.verified[small], third.mismatches[small], second.suspicions[small] = 5, 1, 2
    expected = {"microbatches": 100, "replayed": 74, "eager/capture_failed": 20, "eager/quarantined": 1}
    expected |= {"captures": 4, "verified": 5, "mismatches": 1, "suspicions": 2}
    assert {f"thdprof/{name}": value for name, value in expected.items()}.items() <= observer.scalars().items()
    assert observer.log_text() == (
        " thdprof replayed: 74 | thdprof eager capture_failed: 20 | thdprof eager quarantined: 1 | "
        "thdprof eager too_many_seqs: 5 | thdprof verified: 5 | thdprof mismatches: 1 | thdprof suspicions: 2 |"
    )
    installed.count([(small, 8)])
    second.replays[small] += 8
    third.replays[small] += 6
    third.fallbacks[FallbackReason.quarantined] += 2
    assert observer.log_text() == " thdprof replayed: 6 | thdprof eager quarantined: 2 |"
    observer.after_step(1)
    observer.finish(together=True)
    assert lines == [
        "WARNING: thdprof, step 1: eager in some stages of the pipeline alone: pipeline rank 0, model chunk 1: 20 "
        "capture_failed; pipeline rank 0, model chunk 2: 20 capture_failed, 3 quarantined"
    ]
    found = compare(plan, read_stats(path), tolerance=1.0)
    assert (found.microbatches, found.mismatches, found.suspicions, found.holds) == (108, 1, 2, False)
    assert found.other_fallbacks == {"capture_failed": 20, "quarantined": 3}
    (line,) = map(json.loads, path.read_text().splitlines())
    assert [(stage["stage"][-1], stage["replayed"], stage.get("mismatches")) for stage in line["stages"]] == [
        ("0", 103, 0), ("1", 83, 0), ("2", 80, 1),
    ]  # fmt: skip


def test_a_stage_that_stays_behind_is_warned_of_once(lines, tmp_path):
    plan = plan_of_shares(SHARES, count=8000, steps=1000, virtual_pipeline_size=2)
    installed = Installed(plan)
    installed.other_chunks = [Stats(fallbacks=Counter({FallbackReason.no_free_slot: 1}))]
    observer = Observer(installed, plan, stats=None, say=lines.append)
    for step in range(7, 302):
        if step == 250:
            installed.other_chunks[0].fallbacks[FallbackReason.no_free_slot] += 4
        observer.after_step(step)
    warned = [line.rpartition(": ")[2] for line in lines if "WARNING" in line]
    assert (warned, len(lines)) == (["1 no_free_slot", "5 no_free_slot"], 5)


def test_memory_is_looked_up_after_captures_alone(observer, installed, monkeypatch):
    """Graphs of layers read a snapshot of all GPU memory for it, which takes long."""
    asked = []
    monkeypatch.setattr(installed, "pool_bytes", lambda: asked.append("pool") or len(asked))
    assert [observer.scalars()["thdprof/pool_bytes"] for _ in range(3)] == [1, 1, 1]
    installed.counters.captures += 1
    assert [observer.scalars()["thdprof/pool_bytes"] for _ in range(3)] == [2, 2, 2]


def test_the_log_line_says_what_was_counted_since_the_last_one(observer, installed, plan):
    small, large = sorted(plan.shares)
    assert observer.log_text() == " thdprof replayed: 0 |"
    installed.count([(small, 300), (large, 18)], too_many_seqs=2)
    assert observer.log_text() == " thdprof replayed: 318 | thdprof eager too_many_seqs: 2 |"
    installed.count([(small, 5)], not_training=7)
    assert observer.log_text() == " thdprof replayed: 5 | thdprof eager not_training: 7 |"
    assert observer.log_text() == " thdprof replayed: 0 |"


def test_verified_micro_batches_and_mismatches_are_told(observer, installed, plan, lines, tmp_path):
    small, large = sorted(plan.shares)
    installed.count([(small, 700), (large, 300)])
    installed.counters.verified.update({small: 3, large: 1})
    assert observer.log_text() == " thdprof replayed: 1000 | thdprof verified: 4 |"
    installed.counters.verified[large] += 1
    installed.counters.mismatches[large] += 1
    assert observer.log_text() == " thdprof replayed: 0 | thdprof verified: 1 | thdprof mismatches: 1 |"
    installed.counters.suspicions[small] += 2
    assert observer.log_text() == " thdprof replayed: 0 | thdprof suspicions: 2 |"
    assert observer.log_text() == " thdprof replayed: 0 |"
    scalars = observer.scalars()
    assert (scalars["thdprof/verified"], scalars["thdprof/mismatches"]) == (5, 1)
    observer.after_step(100)
    observer.after_step(101)
    assert ", verified 5, mismatches 1, suspicions 2" in lines[0]
    observer.finish(together=True)
    found = compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=1.0)
    assert (found.verified, found.mismatches, found.suspicions) == (5, 1, 2)


def test_every_100_steps_one_line_tells_observed_and_predicted_shares(observer, installed, plan, lines):
    train(observer, installed, plan, SHARES, steps=range(1, COMPARED_EVERY + 1))
    assert lines == []  # the sums are read one step later, so that nobody waits
    train(observer, installed, plan, SHARES, steps=range(COMPARED_EVERY + 1, COMPARED_EVERY + 3))
    assert lines == [
        "thdprof, step 100: 800 micro-batches; eager by shape 5.00% (plan 5.00%), 8 documents of 256 tokens 75.00% "
        "(plan 75.00%), 16 documents of 256 tokens 20.00% (plan 20.00%)"
    ]


def test_other_reasons_and_evaluation_are_told_apart(observer, installed, plan, lines):
    small, _ = sorted(plan.shares)
    installed.count([(small, 700)], too_many_seqs=50, no_free_slot=250, not_training=1000)
    observer.after_step(100)
    observer.after_step(101)
    assert lines == [
        "thdprof, step 100: 1,000 micro-batches; eager by shape 5.00% (plan 5.00%), 8 documents of 256 tokens 70.00% "
        "(plan 75.00%), 16 documents of 256 tokens 0.00% (plan 20.00%); eager for other reasons: 250 no_free_slot"
    ]


def test_data_that_has_moved_on_is_told_with_numbers_and_what_to_do(observer, installed, plan, lines):
    train(observer, installed, plan, SHARES, steps=range(1, 201))
    assert not any("WARNING" in line for line in lines)
    train(observer, installed, plan, (0.4, 0.2), steps=range(201, 302))
    warnings = [line for line in lines if "WARNING" in line]
    assert warnings == [
        "WARNING: thdprof, step 300: the data is not what the plan was made from: of the last 800 micro-batches "
        "40.00% ran eagerly by shape, the plan says 5.00% (by chance less than once in 10^12); run `thdprof check "
        "PLAN DATA` with the data that is trained on, and analyse it again for a plan that fits"
    ]


def test_the_last_comparison_is_said_when_the_run_ends_with_it(observer, installed, plan, lines):
    train(observer, installed, plan, SHARES)
    observer.finish(together=True)
    assert [line[:18] for line in lines] == ["thdprof, step 100:"]


def test_a_plan_that_captures_nothing_has_nothing_to_compare(plan, lines, tmp_path):
    nothing = plan.graphs.model_copy(update={"impl": "none", "buckets": []})
    plan = plan.model_copy(update={"graphs": nothing})
    installed = Installed(plan)
    observer = Observer(installed, plan, stats=tmp_path / "stats.jsonl", say=lines.append)
    installed.count(disabled_by_user=800)
    observer.after_step(100)
    observer.finish(together=True)
    assert lines == ["thdprof, step 100: 800 micro-batches, all eager, as the plan captures nothing"]
    assert compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=1.0).observed_fallback_rate == 1.0


def test_without_cuda_no_shape_is_looked_at(observer, installed, lines):
    installed.count(no_cuda=800)
    observer.after_step(100)
    observer.after_step(101)
    assert lines == ["thdprof, step 100: 800 micro-batches, none looked at by shape (800 no_cuda)"]


@pytest.mark.parametrize("together", [True, False])
def test_the_statistics_file_is_what_compare_reads(observer, installed, plan, tmp_path, together):
    train(observer, installed, plan, SHARES)
    bucket = plan.captured[0]
    passes = [TimedPass(bucket=bucket, n_seqs=2, squared_tokens=9.0, ms=ms) for ms in (1.0, 2.0)]
    installed.counters.passes.extend(passes)
    installed.counters.steps.clear()
    for step in range(6):
        installed.counters.replays[bucket] += 8 * (step > 0)
        installed.counters.end_step(step * 0.5)
    installed.counters.replays[bucket] -= 40
    installed.counters.captures = 2
    observer.finish(together=together)
    result = compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=0.001)
    assert result.holds
    assert (result.microbatches, result.replay_ms) == (800, 1.5)
    (line,) = (tmp_path / "stats.jsonl").read_text().splitlines()
    read = read_stats(tmp_path / "stats.jsonl")
    assert (read.run.replay, read.run.n_tokens, read.steps.ms, read.steps.microbatches) == (True, 256, 500.0, 8)
    extra = {"iteration": 100, "ranks": 1, "all_ranks": together, "pool_bytes": 3 << 20, "captures": 2}
    assert extra.items() <= json.loads(line).items()


def test_nothing_is_written_without_a_file(plan, installed, lines, tmp_path):
    Observer(installed, plan, stats=None, say=lines.append).finish(together=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_ends_no_run(plan, installed, lines, tmp_path):
    Observer(installed, plan, stats=tmp_path, say=lines.append).finish(together=True)
    assert lines == [f"WARNING: thdprof: {tmp_path}: cannot be written: Is a directory"]


def of_one_rank(rank: int, folder: str) -> None:
    """One process of four, in runs where ranks that share a micro-batch have counted the same, and others others."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    for name, (sizes, cp_sizes) in RUNS.items():
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        dynamic = {"packer": "balanced_cp", "max_seqlen_per_dp_cp_rank": 256} if cp_sizes else {}
        plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000, cp_sizes=cp_sizes or (), **dynamic)
        small, large = sorted(plan.shares)
        installed, lines = Installed(plan), []
        group = parallel_state.get_data_parallel_rank()
        installed.count([(small, 70 + 10 * group), (large, 20)], not_training=10 * (group + 1))
        installed.count(too_many_seqs=10)
        if cp_sizes:
            installed.counters.fallback_sizes = Counter({(FallbackReason.too_many_seqs, 2): 10})
        if name == "failed" and parallel_state.get_pipeline_model_parallel_rank() == 1:
            installed.counters.replays[large] -= 20
            installed.count(capture_failed=20)
            installed.counters.mismatches[small] = 1
        observer = Observer(installed, plan, stats=f"{folder}/{name}.jsonl", say=lines.append)
        observer.after_step(100)
        observer.after_step(101)
        lines.append(str(observer.scalars().get("thdprof/all_ranks/eager/capture_failed")))
        Path(f"{folder}/{name}.{rank}").write_text("\n".join(lines))
        observer.finish(together=True)
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


RUNS = {
    "tp": ({"tensor_model_parallel_size": 2}, None),
    "cp": ({"context_parallel_size": 2}, None),
    "pp": ({"pipeline_model_parallel_size": 2}, None),
    "failed": ({"pipeline_model_parallel_size": 2}, None),
    "dynamic": ({}, (1, 2)),
}
"""Sizes of the groups of four ranks, and context-parallel sizes of the plan's buckets where they differ."""


def test_micro_batches_that_ranks_share_are_counted_once(tmp_path):
    start_ranks(of_one_rank, 4, str(tmp_path))
    for name in ("tp", "cp", "pp"):
        (line,) = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        assert [r["count"] for r in line["replays"]] == [70 + 80, 20 + 20], name
        assert line["fallbacks"] == {"not_training": 30, "too_many_seqs": 20}
        assert (line["microbatches"], line["ranks"]) == (240, 4)
        said = [(tmp_path / f"{name}.{rank}").read_text() for rank in range(4)]
        assert said[0].startswith("thdprof, step 100: 210 micro-batches; eager by shape 9.52%")
        assert said[0].endswith("\nNone")
        assert said[1:] == ["None"] * 3
    # the two ranks of a micro-batch of two have both counted it; all others have one of their own
    (line,) = map(json.loads, (tmp_path / "dynamic.jsonl").read_text().splitlines())
    assert [(r["cp_size"], r["count"]) for r in line["replays"]] == [(1, 70 + 80 + 90 + 100), (2, 4 * 20 // 2)]
    assert line["fallbacks"] == {"too_many_seqs": 4 * 10 // 2}
    # the second stage of both pipelines has no graphs of the larger bucket
    (line,) = map(json.loads, (tmp_path / "failed.jsonl").read_text().splitlines())
    assert [r["count"] for r in line["replays"]] == [70 + 80]
    assert line["fallbacks"] == {"capture_failed": 40, "not_training": 30, "too_many_seqs": 20}
    assert (line["microbatches"], sum(r["count"] for r in line["mismatches"])) == (240, 2)
    assert [(stage["stage"], stage["replayed"]) for stage in line["stages"]] == [
        ("pipeline rank 0", 190), ("pipeline rank 1", 150),
    ]  # fmt: skip
    said = [(tmp_path / f"failed.{rank}").read_text().splitlines() for rank in range(4)]
    assert said[0][0] == (
        "WARNING: thdprof, step 100: eager in some stages of the pipeline alone: pipeline rank 1: 40 capture_failed"
    )
    assert said[0][1].startswith("thdprof, step 100: 210 micro-batches; ")
    assert said[0][1].endswith("mismatches 2, suspicions 0; eager for other reasons: 40 capture_failed")
    assert said[1:] == [["40"]] * 3  # by the rank that writes scalars, whichever that is


def test_ranks_are_added_up_and_the_largest_peak_is_that_of_one(plan, installed, monkeypatch):
    small, _ = sorted(plan.shares)
    installed.count([(small, 90)], too_many_seqs=10)
    installed.counters.verified[small], installed.counters.mismatches[small] = 7, 1
    installed.counters.suspicions[small] = 2
    sent = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda sums: sent.append(sums.clone()) or sums.copy_(sum(sent))
    )
    for rank, peak in enumerate((3, 5, 4)):
        monkeypatch.setattr(rank_totals, "rank_and_size", lambda rank=rank: (rank, 3))
        totals = rank_totals.RankTotals(plan)
        totals.begin([installed.counters], peak=peak)
    (added,), largest = totals.end()
    assert (added.replays[small], added.fallbacks["too_many_seqs"], largest) == (270, 30, 5)
    assert (added.verified, added.mismatches, added.suspicions) == ({small: 21}, {small: 3}, {small: 6})


@pytest.mark.parametrize(("rank", "lines_written"), [(0, 1), (1, 0)])
def test_a_rank_is_what_it_was_after_process_groups_went(plan, installed, tmp_path, rank, lines_written):
    """An exit may destroy the process groups first; not every rank is rank 0 then."""
    stats = tmp_path / "stats.jsonl"
    with pytest.MonkeyPatch.context() as alive:
        alive.setattr(torch.distributed, "is_initialized", lambda: True)
        alive.setattr(torch.distributed, "get_rank", lambda: rank)
        alive.setattr(torch.distributed, "get_world_size", lambda: 2)
        observer = Observer(installed, plan, stats=stats, say=print)
    observer.finish(together=False)
    written = stats.read_text().splitlines() if stats.exists() else []
    assert [json.loads(line)["ranks"] for line in written] == [2] * lines_written
