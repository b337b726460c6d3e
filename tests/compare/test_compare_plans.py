"""`thdprof compare a.yaml b.yaml`: what differs between two plans, and what of it counts."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample_files import cost_table, write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.compare.plans import compare_plans, kind_of
from thdprof.errors import DataError
from thdprof.plan import Plan, parse_plan

PACKS = [[3, 5], [8], [1, 6, 1], [7, 1], [8], [2, 2, 2, 2], [8], [1, 7]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = write_lines(tmp_path_factory.mktemp("data") / "packs.jsonl", PACKS)
    return make_plan(analyze_dataset(path, loader="single", seq_length=8))


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """The same plan with measured times."""
    directory = tmp_path_factory.mktemp("timed")
    path = write_lines(directory / "packs.jsonl", PACKS)
    (directory / "costs.yaml").write_text(cost_table())
    plan = make_plan(analyze_dataset(path, loader="single", seq_length=8, cost_table=directory / "costs.yaml"))
    assert plan.predictions.times.origin == "measured"
    return plan


def edited(plan: Plan, *edits: tuple[str, object]) -> Plan:
    """`plan` with fields at dotted paths replaced."""
    values = plan.model_dump(mode="json", by_alias=True)
    for path, value in edits:
        *parents, last = path.split(".")
        part = values
        for name in parents:
            part = part[name]
        part[last] = value
    return parse_plan(values, where="edited")


def files(tmp_path, first: Plan, second: Plan):
    first.save(tmp_path / "a.yaml")
    second.save(tmp_path / "b.yaml")
    return tmp_path / "a.yaml", tmp_path / "b.yaml"


TEXT = """\
other data; 10 fields differ

what changed                             first       second   change
dataset.fingerprint            {first}  sha256:other
dataset.documents                           16           17
training.loader                         single            -
microbatches.n_seqs.p99                      4            5  20.000%  past the tolerance
buckets.3x8                                  -      75.000%
buckets.64x8                          100.000%      25.000%
graphs.slots                             [[1]]        [[2]]
graphs.overflow                          eager        error
predictions.fallback_rate.step          0.000%       0.500%   0.500%
costs.calibrated                         false         true
"""
EDITS = (
    ("dataset.fingerprint", "sha256:other"),
    ("dataset.documents", 17),
    ("training.loader", None),
    ("microbatches.n_seqs.p99", 5),
    (
        "graphs.buckets",
        [
            {"max_seqs": 64, "max_seqlen": 8, "cp_size": 1, "share": 0.25},
            {"max_seqs": 3, "max_seqlen": 8, "cp_size": 1, "share": 0.75},
        ],
    ),
    ("graphs.slots", [[2]]),
    ("graphs.overflow", "error"),
    ("predictions.fallback_rate.step", 0.005),
    ("costs.calibrated", True),
)


def test_whole_text(thdprof, plan, tmp_path):
    a, b = files(tmp_path, plan, edited(plan, *EDITS))
    done = thdprof("compare", a, b)
    assert done.returncode == 3
    assert done.stderr == (f"thdprof: {a} and {b} differ by more than --tolerance 1.000%: microbatches.n_seqs.p99\n")
    shown = plan.dataset.fingerprint
    want = TEXT.format(first=f"{shown[:18]}...{shown[-19:]}").splitlines()
    assert [line.split() for line in done.stdout.splitlines()] == [line.split() for line in want]
    assert thdprof("compare", a, b, "--tolerance", "20%").returncode == 0
    assert thdprof("compare", b, a, "--tolerance", "20%").returncode == 0
    assert thdprof("compare", b, a, "--tolerance", "19.9%").returncode == 3


def test_one_field(thdprof, plan, tmp_path):
    values = plan.model_dump(mode="json", by_alias=True)
    values["written_by"] = "another"
    done = thdprof("compare", *files(tmp_path, plan, parse_plan(values, where="edited")))
    assert "; 1 field differs\n" in done.stdout


def test_the_same_plan_is_alike(thdprof, plan, tmp_path):
    a, b = files(tmp_path, plan, plan)
    done = thdprof("compare", a, b, "--tolerance", 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the plans are the same\n", "")
    done = thdprof("compare", a, b, "--json")
    assert json.loads(done.stdout) == {
        "schema": "thdprof.plan-comparison/1",
        "holds": True,
        "largest_change": 0.0,
        "same_data": True,
        "differences": [],
        "tolerance": 0.01,
    }


def test_json(thdprof, timed, tmp_path):
    second = edited(timed, ("predictions.step_ms", timed.predictions.step_ms * 2), ("training.seed", 1))
    done = thdprof("compare", *files(tmp_path, timed, second), "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["holds"], found["largest_change"], found["same_data"]) == (False, 0.5, True)
    assert found["differences"] == [
        {"field": "training.seed", "before": 1234, "after": 1, "measure": None, "change": None},
        {
            "field": "predictions.step_ms",
            "before": timed.predictions.step_ms,
            "after": timed.predictions.step_ms * 2,
            "measure": "relative",
            "change": 0.5,
        },
    ]


PERCENTILES = ("p50", "p90", "p95", "p99", "p99_9", "max")
COUNTING = {
    **{f"microbatches.{of}.{p}": "relative" for of in ("n_seqs", "max_seqlen") for p in PERCENTILES},
    **{f"predictions.fallback_rate.{level}": "absolute" for level in ("microbatch", "rank_step", "step")},
    "predictions.step_ms": "relative",
    "predictions.relative_step_time": "relative",
}
TEXTS = {
    "dataset.format": "trl",
    "training.tail_policy": "extend_last",
    "graphs.impl": "chunk",
    "graphs.overflow": "error",
    "costs.name": "mine",
    "written_by": "0.0.1",
}
LISTED = {
    **TEXTS,
    "dataset.rows": 77,
    "training.global_batch_size": 77,
    "microbatches.count": 77,
    "microbatches.n_seqs.mean": 77.5,
    "predictions.eager_step_ms": 77.5,
    "predictions.fallback_rate_upper_bound": 0.99,
    "predictions.graph_memory_bytes": 77,
}


def value_at(plan: Plan, path: str):
    value = plan.model_dump(mode="json", by_alias=True)
    for name in path.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize("field", sorted(COUNTING))
def test_what_counts(plan, field):
    shares = COUNTING[field] == "absolute"
    first, second = edited(plan, (field, 0.25 if shares else 100)), edited(plan, (field, 0.5 if shares else 125))
    for a, b in ((first, second), (second, first)):
        found = compare_plans(a, b, tolerance=0.1)
        assert [(d.field, d.measure) for d in found.differences] == [(field, COUNTING[field])]
        assert found.largest_change == pytest.approx(0.25 if shares else 0.2)
        assert not found.holds
        assert compare_plans(a, b, tolerance=found.largest_change).holds


@pytest.mark.parametrize("field", sorted(LISTED))
def test_what_is_listed_and_does_not_count(plan, field):
    found = compare_plans(plan, edited(plan, (field, LISTED[field])), tolerance=0.0)
    assert [(d.field, d.change) for d in found.differences] == [(field, None)]
    assert found.holds


@settings(deadline=None, max_examples=80)
@given(
    changed=st.dictionaries(st.sampled_from(sorted({*COUNTING, *TEXTS})), st.integers(1, 10_000), max_size=6),
    buckets=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2])), max_size=3, unique=True),
)
def test_the_order_of_the_plans_makes_no_difference(timed, changed, buckets):
    plan, edits = timed, []
    for field, number in changed.items():
        value = TEXTS.get(field) or (number / 10_000 if COUNTING[field] == "absolute" else number)
        edits.append((field, value))
    edits.append(
        ("graphs.buckets", [{"max_seqs": n, "max_seqlen": s, "cp_size": c, "share": 0.1} for n, s, c in buckets])
    )
    second = edited(plan, *edits)
    there, back = (compare_plans(*pair, tolerance=0.01) for pair in ((plan, second), (second, plan)))
    assert [(d.field, d.before, d.after, d.measure, d.change) for d in there.differences] == [
        (d.field, d.after, d.before, d.measure, d.change) for d in back.differences
    ]
    assert there.holds == back.holds
    wanted = {field for field, value in edits[:-1] if value_at(plan, field) != value}
    assert {d.field for d in there.differences if not d.field.startswith("graphs.buckets")} == wanted
    own = {f"graphs.buckets.{b.max_seqs}x{b.max_seqlen}" for b in timed.graphs.buckets}
    assert own & {d.field for d in there.differences}


def test_a_part_that_one_plan_lacks_is_listed_field_by_field(plan):
    without = edited(plan, ("graphs.one_cap", None))
    fields = [d.field for d in compare_plans(plan, without, tolerance=0.0).differences]
    assert fields == [
        "graphs.one_cap.max_seqs",
        *(f"graphs.one_cap.fallback_rate.{level}" for level in ("microbatch", "rank_step", "step")),
    ]
    assert compare_plans(without, plan, tolerance=0.0).holds


def test_rounding_is_no_difference(timed):
    time = timed.predictions.relative_step_time
    assert not compare_plans(
        timed, edited(timed, ("predictions.relative_step_time", time * (1 + 1e-15))), tolerance=0
    ).differences


def test_times_that_one_plan_lacks_are_listed_and_do_not_count(thdprof, plan, timed, tmp_path):
    """As of a plan that was made before its model was known, or measured."""
    untimed = edited(
        timed,
        *((f"predictions.{name}", None) for name in ("relative_step_time", "step_ms", "eager_step_ms", "verdict")),
        ("predictions.times", plan.model_dump(mode="json")["predictions"]["times"]),
    )
    for first, second in ((timed, untimed), (untimed, timed)):
        found = compare_plans(first, second, tolerance=0.0)
        assert found.holds
        assert {d.field: (d.before is None, d.after is None) for d in found.differences}.items() >= {
            (f"predictions.{name}", (first is untimed, second is untimed))
            for name in ("relative_step_time", "step_ms", "eager_step_ms", "verdict")
        }
    done = thdprof("compare", *files(tmp_path, untimed, timed))
    assert done.returncode == 0, done.stderr
    line = next(line.split() for line in done.stdout.splitlines() if "predictions.step_ms" in line)
    assert line == ["predictions.step_ms", "-", f"{timed.predictions.step_ms:,.6g}"]


STATS = '{"schema": "thdprof.stats/1", "microbatches": 0}\n'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (STATS, "statistics"),
        ("\n\n" + STATS, "statistics"),
        ("starting\n" + STATS, "statistics"),
        ("{", "statistics"),
        ("", "statistics"),
        (" \n", "statistics"),
        ('{"loss": 1, "schema": "thdprof.plan/1"}', "statistics"),
        ("schema: thdprof.plan/1\n", "plan"),
        ("# mine\n'schema': thdprof.plan/7\n", "plan"),
        ('{"schema": "thdprof.plan/1",\n"written_by": "x"}', "plan"),
        ("written_by: x\nschema: thdprof.costs/1\n", "plan"),
        ("hello\n", None),
        ("[1, 2]\n", None),
        ("\x00\x01\x02", None),
    ],
)
def test_files_are_told_apart_by_content(tmp_path, content, kind):
    path = tmp_path / "misleading.jsonl"
    path.write_text(content)
    if kind is not None:
        assert kind_of(path) == kind
        return
    with pytest.raises(DataError, match=r"neither a plan \(schema thdprof.plan/1\) nor statistics of a run"):
        kind_of(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"schema: thdprof.plan/2\nwritten_by: 9.9\n", "schema thdprof.plan/2, written by thdprof 9.9; this thdprof"),
        (b"schema: thdprof.costs/1\n", "not a plan: schema is 'thdprof.costs/1'"),
        (b"schema: thdprof.plan/1\nmore: 1\n", "written_by: Field required"),
        (b"schema: thdprof.plan/1\na: [\n", "not YAML"),
        (b"\x93NUMPY\x01\x00", "neither a plan (schema thdprof.plan/1) nor statistics of a run (thdprof.stats/1)"),
        (b"\xff\xfes\x00", "neither a plan"),
    ],
)
def test_second_files_that_are_neither(thdprof, plan, tmp_path, content, message):
    plan.save(tmp_path / "a.yaml")
    (tmp_path / "b").write_bytes(content)
    done = thdprof("compare", tmp_path / "a.yaml", tmp_path / "b")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"thdprof: {tmp_path}/b: {message}")
    assert done.stderr.count("\n") == 1


def test_a_plan_as_json_is_a_plan(thdprof, plan, tmp_path):
    plan.save(tmp_path / "a.yaml")
    (tmp_path / "b.json").write_text(json.dumps(yaml.safe_load(plan.to_yaml())))
    done = thdprof("compare", tmp_path / "a.yaml", tmp_path / "b.json")
    assert (done.returncode, done.stdout) == (0, "the plans are the same\n")
