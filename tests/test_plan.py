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


def test_fields_that_say_nothing_are_left_out_and_may_stand_there(plan, tmp_path):
    whole = plan.model_dump(mode="json", by_alias=True)
    written = yaml.safe_load(plan.to_yaml())
    left_out = {path for path in flatten(whole).items() if path not in flatten(written).items()}
    assert len(left_out) > 20
    assert {value for _, value in left_out} == {"None", "[]"}
    assert flatten(written).items() <= flatten(whole).items()
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(whole))
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert load_plan(tmp_path / "plan.yaml").identity == plan.identity


def flatten(value, path=()):
    """Every leaf of nested mappings as text, by its path."""
    if not isinstance(value, dict):
        return {path: str(value)}
    return {at: leaf for name, part in value.items() for at, leaf in flatten(part, (*path, name)).items()}


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
        ({"graphs": {"buckets": []}}, "graphs.slots: Field required"),
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


@pytest.mark.parametrize("wrong", ["1/0", "4096", "0.1", "2/5", "1/-3", 0.25, "1/4096\n"])
def test_a_rate_that_cannot_be_is_refused(plan, tmp_path, wrong):
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"]["verify"] = wrong
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"graphs\.verify"):
        load_plan(path)


BUCKET = {"max_seqs": 2, "max_seqlen": 16, "cp_size": 1, "share": 0.5}


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("graphs.buckets", [BUCKET, BUCKET], "graphs.buckets.1: is the same as bucket 0: leave one out"),
        ("graphs.buckets", [{**BUCKET, "max_seqlen": 17}], "graphs.buckets.0.max_seqlen: must be at most 16, the"),
        (
            "graphs.buckets",
            [{**BUCKET, "share": 0.8}, {**BUCKET, "max_seqs": 3, "share": 0.3}],
            "graphs.buckets: shares must add up to 1 at most: a micro-batch replays one bucket (got 1.1)",
        ),
        (
            "graphs.buckets",
            [{**BUCKET, "max_seqs": "64"}],
            "graphs.buckets.0.max_seqs: Input should be a valid integer",
        ),
        (
            "graphs.buckets",
            [{**BUCKET, "max_seqs": True}],
            "graphs.buckets.0.max_seqs: Input should be a valid integer",
        ),
        ("graphs.buckets", [{**BUCKET, "share": "0.5"}], "graphs.buckets.0.share: Input should be a valid number"),
        ("graphs.slots", [[1], [1], [1]], "graphs.slots: must be 1 lists, one for each of training.pipeline_parallel"),
        ("graphs.slots", [[1, 1]], "graphs.slots.0: must hold one number: 1 (got [1, 1])"),
        ("graphs.slots", [], "graphs.slots: must be 1 lists"),
        ("predictions.times", {"origin": "measured", "basis": "x"}, "predictions.times.origin: no time stands beside"),
        ("predictions.times", {"origin": "modelled", "basis": "x"}, "predictions.times.origin: no time stands beside"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(plan, path, value, told):
    values = yaml.safe_load(plan.to_yaml())
    part, field = path.split(".")
    values[part][field] = value
    values["graphs"]["impl"] = "module"
    with pytest.raises(DataError) as caught:
        parse_plan(values, where="p")
    assert str(caught.value).startswith(f"p: {told}")


@pytest.mark.parametrize(
    "graphs",
    [
        {"buckets": [{**BUCKET, "share": 0.2}]},  # one of two left out by hand: predictions are of the plan as it was
        {"buckets": [BUCKET, {**BUCKET, "max_seqs": 3}]},
        {"buckets": [{**BUCKET, "share": 1 / 3}, {**BUCKET, "max_seqs": 3, "share": 2 / 3 + 1e-9}]},
        {"buckets": [{**BUCKET, "share": 1}]},
        {"buckets": [BUCKET, {**BUCKET, "cp_size": 2}]},
        {"slots": [[4]]},
    ],
)
def test_graphs_edited_by_hand_still_load(plan, graphs):
    values = yaml.safe_load(plan.to_yaml())
    values["graphs"] |= {"impl": "module", **graphs}
    assert parse_plan(values, where="p").graphs.impl == "module"


def test_slots_are_of_the_pipeline_and_its_chunks(tmp_path):
    (tmp_path / "packs.jsonl").write_text("[3, 4]\n[5]\n[1, 1, 1]\n[7, 2]\n")
    run = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "global_batch_size": 4}
    plan = make_plan(analyze_dataset(tmp_path / "packs.jsonl", loader="single", seq_length=16, **run))
    values = yaml.safe_load(plan.to_yaml())
    assert parse_plan(values, where="p") == plan
    values["graphs"]["slots"] = [[2], [1]]
    with pytest.raises(DataError, match=r"graphs\.slots\.0: must hold a number for each chunk"):
        parse_plan(values, where="p")


def test_a_plan_with_a_null_in_every_field_that_takes_one_is_read_again(plan):
    stamp = {
        "torch": "2.11",
        "transformer_engine": None,
        "cudnn": None,
        "megatron_core": None,
        "gpu": "A",
        "processor": "B",
    }
    values = {**plan.model_dump(mode="json", by_alias=True)}
    values["costs"] = {**values["costs"], "stamp": stamp}
    with_stamp = parse_plan(values, where="p")
    assert parse_plan(yaml.safe_load(with_stamp.to_yaml()), where="p") == with_stamp
