"""The plan file: written whole or not at all, read strictly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.errors import DataError
from thdprof.files import replacing
from thdprof.plan import Plan, load_plan, parse_plan


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "packs.jsonl").write_text("[3, 4]\n[5]\n[1, 1, 1]\n[7, 2]\n")
    return make_plan(analyze_dataset(tmp_path / "packs.jsonl", loader="single", seq_length=16))


def test_round_trip(plan, tmp_path):
    plan.save(tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == plan


def test_every_field_is_documented():
    from thdprof.plan import Plan

    schema = Plan.model_json_schema()
    undocumented = [
        f"{name}.{field}"
        for name, part in {"Plan": schema, **schema["$defs"]}.items()
        for field, spec in part["properties"].items()
        if not spec.get("description") and "$ref" not in spec
    ]
    assert not [
        f
        for f in undocumented
        if f.split(".")[1]
        not in {
            *("mean", "p50", "p90", "p95", "p99", "p99_9", "max"),
            *("data_parallel_size", "context_parallel_size", "pipeline_parallel_size", "seed", "hardware"),
        }
    ]


def test_an_existing_plan_is_kept_without_force(plan, tmp_path):
    target = tmp_path / "plan.yaml"
    target.write_text("mine")
    with pytest.raises(DataError, match="exists; give --force"):
        plan.save(target)
    assert target.read_text() == "mine"
    plan.save(target, force=True)
    assert load_plan(target) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "thdprof.plan/2", "written_by": "9.9"}, "schema thdprof.plan/2, written by thdprof 9.9; this"),
        ({"schema": "something"}, "not a plan: schema is 'something'"),
        ({"grpahs": {}}, r"grpahs: Extra inputs are not permitted"),
        ({"graphs": {"buckets": []}}, "graphs.one_cap: Field required"),
    ],
)
def test_other_files_are_refused(plan, tmp_path, change, message):
    values = {**yaml.safe_load(plan.to_yaml()), **change}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=message):
        load_plan(tmp_path / "plan.yaml")


def test_graphs_of_no_kind_have_no_buckets(plan, tmp_path):
    values = yaml.safe_load(plan.to_yaml())
    values["graphs"] |= {
        "impl": "none",
        "buckets": [{"max_seqs": n, "max_seqlen": 16, "share": 0.1} for n in range(1, 9)],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(values))
    told = r"graphs.buckets: Value error, must be \[\] where graphs.impl is none, which captures nothing"
    with pytest.raises(DataError, match=told) as caught:
        load_plan(tmp_path / "plan.yaml")
    assert len(str(caught.value)) < 450 + len(str(tmp_path))
    values["graphs"]["buckets"] = []
    assert parse_plan(values, where="plan").graphs.impl == "none"


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "\x00", "- " * 3000])
def test_what_is_no_plan_at_all(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(DataError, match=r"plan\.yaml: "):
        load_plan(tmp_path / "plan.yaml")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "plan.yaml"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_killed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "plan.yaml"
    target.write_text("old")
    code = (
        "import sys, time, pathlib; from thdprof.files import replacing\n"
        f"with replacing(pathlib.Path({str(target)!r})) as t:\n"
        "    t.write_text('half'); print('written', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"written\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.05)
    assert target.read_text() == "old"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(plan, tmp_path, value):
    values = yaml.safe_load(plan.to_yaml())
    values["predictions"]["step_ms"] = value
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"predictions\.step_ms: Input should be a finite number"):
        load_plan(tmp_path / "plan.yaml")


def test_a_part_that_is_there_twice_is_refused(plan, tmp_path):
    text = plan.to_yaml()
    (tmp_path / "plan.yaml").write_text(text + text[text.index("graphs:") : text.index("predictions:")])
    with pytest.raises(DataError, match="graphs is given twice in one mapping"):
        load_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(("text", "every"), [("1/4096", 4096), ("1/1", 1), (None, 0)])
def test_the_rate_of_verified_micro_batches(plan, tmp_path, text, every):
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"]["verify"] = text
    path = tmp_path / "plan.yaml"
    Plan.model_validate(values).save(path)
    assert load_plan(path).graphs.verify_every == every
    assert load_plan(path).identity == plan.identity  # the same shares are predicted
    del values["graphs"]["verify"]  # a plan of an earlier version
    assert Plan.model_validate(values).graphs.verify_every == 0


@pytest.mark.parametrize("wrong", ["1/0", "4096", "0.1", "2/5", "1/-3", 0.25, "1/4096\n"])
def test_a_rate_that_cannot_be_is_refused(plan, tmp_path, wrong):
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"]["verify"] = wrong
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"graphs\.verify"):
        load_plan(path)
