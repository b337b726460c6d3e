"""`thdprof compare`: a plan beside a run's statistics, its text, its JSON and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml
from support.sample_files import cost_table

from thdprof.compare.statistics import compare, read_stats
from thdprof.errors import DataError
from thdprof.plan import load_plan

COSTS = cost_table()
PACKS = "[3, 5]\n[8]\n[1, 6, 1]\n[7, 1]\n[8]\n[2, 2, 2, 2]\n[8]\n[1, 7]\n"


@pytest.fixture
def plan(thdprof, tmp_path):
    """Predicts 6 of 8 micro-batches in a bucket of 2 documents, 1 of 3, and 1 that falls back."""
    (tmp_path / "packs.jsonl").write_text(PACKS)
    (tmp_path / "costs.yaml").write_text(COSTS)
    path = tmp_path / "plan.yaml"
    done = thdprof(
        "analyze", tmp_path / "packs.jsonl", "--cost-table", tmp_path / "costs.yaml", "--loader", "single",
        "--seq-length", 8, "--buckets", 2, "-o", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


def replays(*counts: int, caps=(2, 3)) -> list[dict]:
    return [{"max_seqs": cap, "max_seqlen": 8, "cp_size": 1, "count": n} for cap, n in zip(caps, counts, strict=False)]


def line(replayed: list[dict], **more) -> dict:
    fallbacks = more.pop("fallbacks", {"too_many_seqs": 1})
    count = sum(r["count"] for r in replayed) + sum(fallbacks.values())
    values = {"schema": "thdprof.stats/1", "microbatches": count, "replays": replayed, "fallbacks": fallbacks}
    return {**values, "captures": 2, "replay_ms": None, "eager_ms": None, **more}


@pytest.fixture
def stats(tmp_path):
    def write(*lines: dict | str):
        path = tmp_path / "stats.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write


TEXT = """\
8 micro-batches observed, 8 in the plan; 3 of evaluation, eager

share of micro-batches   predicted  observed  difference
eager by shape             12.500%   12.500%     +0.000%
2 documents of 8 tokens    75.000%   62.500%    -12.500%
3 documents of 8 tokens    12.500%   12.500%     +0.000%
eager, by shape: too_many_seqs 1
eager, not predicted: no_free_slot 1
plan: a step 2.25 ms, all eagerly 10.00 ms
  (made up on a GPU)
run: a replayed micro-batch 1.25 ms
run: an eager micro-batch 9.00 ms
"""


def test_whole_text(thdprof, plan, stats):
    fallbacks = {"too_many_seqs": 1, "no_free_slot": 1, "not_training": 3, "capture_failed": 0}
    path = stats(line(replays(5, 1), fallbacks=fallbacks, replay_ms=1.25, eager_ms=9.0, step=3, loss=0.5))
    done = thdprof("compare", plan, path, "--tolerance", "12.5%")
    assert (done.returncode, done.stderr) == (0, "")
    assert [x.rstrip() for x in done.stdout.splitlines()] == TEXT.splitlines()


def test_a_share_past_the_tolerance(thdprof, plan, stats):
    path = stats(line(replays(5, 1), fallbacks={"too_many_seqs": 2}))
    done = thdprof("compare", plan, path)
    assert done.returncode == 3
    assert "eager by shape             12.500%   25.000%    +12.500%" in done.stdout
    assert done.stderr == (
        f"thdprof: {path}: a share differs from the plan's by 12.500%, more than --tolerance 1.000%: "
        "analyse the data and settings that were trained on\n"
    )
    asjson = thdprof("compare", plan, path, "--json")
    assert asjson.returncode == 3
    assert json.loads(asjson.stdout)["holds"] is False


def test_verified_micro_batches_and_mismatches_are_shown(thdprof, plan, stats):
    path = stats(line(replays(6, 1), verified=replays(3, 1)))
    done = thdprof("compare", plan, path, "--tolerance", 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nverified: 4 micro-batches, 0 mismatches\n" in done.stdout
    assert "verified" not in thdprof("compare", plan, stats(line(replays(6, 1)))).stdout


@pytest.mark.parametrize(
    ("mismatches", "count"), [((60,), "60 mismatches in 60"), ((0, 1), "1 mismatch in 60"), ((1,), "1 mismatch in 60")]
)
def test_mismatches_fail_whatever_the_shares_and_are_told_first(thdprof, plan, stats, mismatches, count):
    """Also before another plan, which is as bad a comparison, but a smaller loss."""
    wrong = f"{count} verified micro-batches: replays gave other numbers than eager runs"
    given = line(
        replays(60, 10), fallbacks={"too_many_seqs": 10}, verified=replays(60), mismatches=replays(*mismatches)
    )
    for more in ({}, {"plan": "of another run"}):
        path = stats({**given, **more})
        done = thdprof("compare", plan, path, "--tolerance", 1)
        assert done.returncode == 3
        assert done.stdout.startswith(f"WRONG NUMBERS: {wrong}\n80 micro-batches observed, ")
        assert done.stderr == (
            f"thdprof: {path}: {wrong}; go back to the checkpoint that the run's log names, train on from it without "
            "replays (--replay off, or replay=False), and report the log's lines\n"
        )
    asjson = thdprof("compare", plan, path, "--tolerance", 1, "--json")
    told = json.loads(asjson.stdout)
    assert (asjson.returncode, told["holds"], told["mismatches"]) == (3, False, sum(mismatches))


def test_suspicions_that_were_not_confirmed_are_shown_and_fail_nothing(thdprof, plan, stats):
    path = stats(line(replays(6, 1), verified=replays(3, 1), mismatches=[], suspicions=replays(2, 1)))
    done = thdprof("compare", plan, path, "--tolerance", 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nverified: 4 micro-batches, 0 mismatches, 3 suspicions not confirmed\n" in done.stdout


def test_json(thdprof, plan, stats):
    done = thdprof("compare", plan, stats(line(replays(6, 1))), "--tolerance", 0, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    bucket = {"max_seqlen": 8, "cp_size": 1}
    assert json.loads(done.stdout) == {
        "schema": "thdprof.comparison/1",
        "holds": True,
        "largest_difference": 0.0,
        "basis": "replayed",
        "microbatches": 8,
        "evaluated": 0,
        "dispatched": 8,
        "plan_microbatches": 8,
        "predicted_fallback_rate": 0.125,
        "observed_fallback_rate": 0.125,
        "fallbacks": {"too_many_seqs": 1},
        "other_fallbacks": {},
        "verified": 0,
        "mismatches": 0,
        "suspicions": 0,
        "buckets": [
            {**bucket, "max_seqs": 2, "predicted_share": 0.75, "observed_share": 0.75},
            {**bucket, "max_seqs": 3, "predicted_share": 0.125, "observed_share": 0.125},
        ],
        "replay_ms": None,
        "eager_ms": None,
        "plan_step_ms": 2.25,
        "plan_eager_step_ms": 10.0,
        "plan_costs": "made up on a GPU",
        "tolerance": 0.0,
        "of_this_plan": None,
        "all_ranks": True,
    }


def test_statistics_of_another_plan_do_not_hold_however_alike_the_shares(thdprof, plan, stats):
    own = load_plan(plan).identity
    assert thdprof("compare", plan, stats(line(replays(6, 1), plan=own))).returncode == 0
    other = thdprof("compare", plan, stats(line(replays(6, 1), plan="sha256:0")))
    assert other.returncode == 3
    assert "another plan" in other.stderr
    for identity, same in ((own, True), ("sha256:0", False)):
        found = compare(load_plan(plan), read_stats(stats(line(replays(6, 1), plan=identity))), tolerance=0)
        assert (found.of_this_plan, found.holds, found.largest_difference) == (same, same, 0.0)


def test_a_plans_identity_is_that_of_its_data_settings_and_buckets(plan):
    loaded = load_plan(plan)
    graphs = loaded.graphs
    same = loaded.model_copy(update={"graphs": graphs.model_copy(update={"impl": "chunk"}), "written_by": "0"})
    fewer = loaded.model_copy(update={"graphs": graphs.model_copy(update={"buckets": graphs.buckets[:1]})})
    seeded = loaded.model_copy(update={"training": dataclasses.replace(loaded.training, seed=7)})
    assert same.identity == loaded.identity
    assert len({loaded.identity, fewer.identity, seeded.identity}) == 3


def test_fields_that_a_line_lacks_have_their_defaults(plan, stats):
    """The line of another program."""
    bare = [{"max_seqs": cap, "max_seqlen": 8, "count": n} for cap, n in ((2, 6), (3, 1))]
    short = {"schema": "thdprof.stats/1", "microbatches": 8, "replays": bare, "fallbacks": {"too_many_seqs": 1}}
    found = compare(load_plan(plan), read_stats(stats(short)), tolerance=0)
    assert found == compare(load_plan(plan), read_stats(stats(line(replays(6, 1)))), tolerance=0)
    assert (found.holds, found.of_this_plan, found.all_ranks) == (True, None, True)
    assert (found.verified, found.mismatches, found.replay_ms, found.eager_ms) == (0, 0, None, None)


def test_a_difference_of_the_tolerance_passes_whatever_its_last_digit(plan, stats):
    path = stats(line(replays(7, 1), fallbacks={"too_many_seqs": 2}))  # 0.7 of 0.75, 0.1 of 0.125, 0.2 of 0.125
    found = compare(load_plan(plan), read_stats(path), tolerance=0.075)
    assert found.largest_difference > 0.075  # by the rounding of 0.2 - 0.125
    assert found.holds
    assert not compare(load_plan(plan), read_stats(path), tolerance=0.0749).holds
    few = compare(load_plan(plan), read_stats(stats(line(replays(6, 2), fallbacks={}))), tolerance=0.1)
    assert (few.observed_fallback_rate, few.largest_difference, few.holds) == (0.0, 0.125, False)


def test_a_run_of_another_size_of_context_parallelism_replays_other_buckets(plan, stats):
    of_two = [{**entry, "cp_size": 2} for entry in replays(6, 1)]
    found = compare(load_plan(plan), read_stats(stats(line(of_two))), tolerance=0.5)
    shares = [(b.max_seqs, b.cp_size, b.predicted_share, b.observed_share) for b in found.buckets]
    assert shares == [(2, 1, 0.75, 0.0), (2, 2, 0.0, 0.75), (3, 1, 0.125, 0.0), (3, 2, 0.0, 0.125)]
    assert not found.holds


def test_counters_of_one_rank_after_an_error_say_so(thdprof, plan, stats):
    done = thdprof("compare", plan, stats(line(replays(6, 1), all_ranks=False)))
    assert "counters of rank 0 alone" in done.stdout


def test_the_last_line_counts(thdprof, plan, stats):
    path = stats(line(replays(0, 1)), "not JSON", line(replays(6, 1)), "", "  ")
    assert thdprof("compare", plan, path, "--tolerance", 0).returncode == 0


DECIDED = {"replays": replays(6, 1), "fallbacks": {"document_too_long": 1}}


def test_without_replays_the_shapes_decisions_are_compared(thdprof, plan, stats):
    path = stats(line([], fallbacks={"no_cuda": 8}, decided=DECIDED))
    done = thdprof("compare", plan, path, "--tolerance", 0)
    assert done.returncode == 3
    told = "the run replayed nothing (no_cuda 8): compare a run whose graphs were captured"
    assert done.stderr == f"thdprof: {path}: {told}\n"
    assert "nothing was replayed; what the shapes decide is compared\n" in done.stdout
    assert "eager, by shape: document_too_long 1\neager, not predicted: no_cuda 8\n" in done.stdout


def test_what_happened_goes_before_what_shapes_decide(plan, stats):
    found = compare(load_plan(plan), read_stats(stats(line(replays(1, 1), decided=DECIDED))), tolerance=0.01)
    assert (found.basis, found.dispatched, found.observed_fallback_rate) == ("replayed", 3, 1 / 3)
    assert not found.holds


def test_evaluation_does_not_dilute_the_rates(plan, stats):
    path = stats(line(replays(6, 1), fallbacks={"too_many_seqs": 1, "not_training": 99, "disabled_by_user": 1}))
    found = compare(load_plan(plan), read_stats(path), tolerance=0)
    assert found.holds
    assert (found.microbatches, found.dispatched) == (108, 8)


def test_fallbacks_that_no_plan_predicts_take_from_the_buckets(plan, stats):
    path = stats(line(replays(3, 1), fallbacks={"too_many_seqs": 1, "no_free_slot": 3}))
    found = compare(load_plan(plan), read_stats(path), tolerance=0.3)
    assert found.largest_difference == 3 / 8
    assert not found.holds


def test_another_plans_bucket(plan, stats):
    found = compare(load_plan(plan), read_stats(stats(line(replays(6, 1, 1, caps=(2, 3, 9))))), tolerance=0.05)
    assert [(b.max_seqs, b.predicted_share) for b in found.buckets] == [(2, 0.75), (3, 0.125), (9, 0.0)]
    assert not found.holds


def test_a_plan_that_captures_nothing_predicts_that_all_run_eagerly(plan, stats):
    values = yaml.safe_load(plan.read_text())
    values["graphs"].update(impl="none", buckets=[])
    values["predictions"]["fallback_rate"] = dict.fromkeys(("microbatch", "rank_step", "step"), 1.0)
    plan.write_text(yaml.safe_dump(values))
    path = stats(line([], fallbacks={"disabled_by_user": 8}))
    found = compare(load_plan(plan), read_stats(path), tolerance=0)
    assert found.holds
    assert not found.other_fallbacks
    evaluated = read_stats(stats(line([], fallbacks={"disabled_by_user": 6, "no_cuda": 2, "not_training": 4})))
    found = compare(load_plan(plan), evaluated, tolerance=0)
    assert (found.evaluated, found.dispatched, found.observed_fallback_rate) == (4, 8, 1.0)
    assert found.fallbacks == {"disabled_by_user": 6, "no_cuda": 2}
    assert found.holds
    assert not compare(load_plan(plan), read_stats(stats(line(replays(6)))), tolerance=0.1).holds


MALFORMED = [
    ("", "is empty: the run wrote no statistics (Stats.append_jsonl)"),
    ("\n \n", "is empty: the run wrote no statistics (Stats.append_jsonl)"),
    ('\n{"schema": "thdprof.stats/1", "micro', "line 2: not JSON: "),
    ("[" * 100_000, "line 1: not JSON: "),
    ("[1]", "line 1: not statistics: holds a list, not an object"),
    ({}, "line 1: not statistics: it has no schema; give what a run wrote"),
    ({"schema": "thdprof.stats/1"}, "line 1: replays: Field required"),
    ({**line(replays(1)), "schema": "thdprof.stats/2"}, "line 1: schema: Input should be 'thdprof.stats/1' (got"),
    ({**line(replays(1)), "microbatches": 9}, "line 1: microbatches: 9, but replays and fallbacks add up to 2"),
    ({**line(replays(1)), "microbatches": True}, "line 1: microbatches: Input should be a valid integer (got True)"),
    (line(replays(-1)), "line 1: replays.0.count: Input should be greater than or equal to 0 (got -1)"),
    (line([], fallbacks={"tired": 1}), "line 1: fallbacks.tired"),
    (line([], eager_ms=-0.5), "line 1: eager_ms: Input should be greater than or equal to 0 (got -0.5)"),
    (line([], replay_ms=float("nan")), "line 1: replay_ms: Input should be a finite number (got nan)"),
    (line([], fallbacks={}), "no micro-batch was dispatched by its shape (none ran): nothing to compare"),
    (
        line([], fallbacks={"no_cuda": 7, "not_training": 1}),
        "no micro-batch was dispatched by its shape (7 no_cuda, 1 not_training): nothing to compare",
    ),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED)
def test_statistics_that_are_none(plan, tmp_path, content, message):
    path = tmp_path / "stats.jsonl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as raised:
        compare(load_plan(plan), read_stats(path), tolerance=0.01, where=str(path))
    assert str(raised.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{}"])
def test_bad_statistics_exit_with_1(thdprof, plan, tmp_path, content):
    (tmp_path / "stats.jsonl").write_bytes(content)
    done = thdprof("compare", plan, tmp_path / "stats.jsonl")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"thdprof: {tmp_path}/stats.jsonl: ")
    assert done.stderr.count("\n") == 1


def test_statistics_that_cannot_be_read_say_why(tmp_path):
    for path, reason in ((tmp_path / "nothing", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=f"cannot be read: {reason}"):
            read_stats(path)


def test_missing_files(thdprof, plan, tmp_path):
    done = thdprof("compare", plan, tmp_path / "nothing")
    assert (done.returncode, done.stderr) == (
        1,
        f"thdprof: {tmp_path}/nothing: cannot be read: No such file or directory\n",
    )
    assert thdprof("compare", tmp_path / "nothing", plan).returncode == 1


@pytest.mark.parametrize("tolerance", ["2", "-1", "1.5%%", "nan"])
def test_tolerances_that_cannot_be(thdprof, plan, stats, tolerance):
    done = thdprof("compare", plan, stats(line(replays(6, 1))), f"--tolerance={tolerance}")
    assert done.returncode == 2
    assert done.stderr == f"thdprof: --tolerance {tolerance}: must be a share such as 0.005 or 0.5%\n"


def test_help_names_every_option(thdprof):
    assert set(re.findall(r"--[a-z][a-z-]+", thdprof("compare", "--help").stdout)) == {
        "--tolerance",
        "--json",
        "--help",
    }
