"""The example closes the loop on a CPU: demo data, a plan, training, and counts equal to the prediction."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from support.command import run_in_process, run_script
from support.paths import ROOT

pytest.importorskip("torch")

COSTS = """
schema: thdprof.costs/1
name: made up
calibrated: true
hardware: none
attention: none
n_tokens: 256
eager: [{n_seqs: 1, ms: 10.0}]
replay: [{max_seqs: 2, ms: 1.0}, {max_seqs: 3, ms: 2.0}, {max_seqs: 4, ms: 30.0}]
"""
SMALL = ["--device", "cpu", "--layers", 1, "--hidden", 32, "--heads", 2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("example")
    assert run_in_process("demo", "demo", cwd=directory).returncode == 0
    (directory / "costs.yaml").write_text(COSTS)
    return directory


def analyze(directory: Path, name: str, *more: object) -> Path:
    """A plan whose buckets leave some micro-batches out; its table lies beside it."""
    done = run_in_process(
        "analyze", "demo/megatron", "--seq-length", 128, "--micro-batch-size", 2,
        "--data-parallel-size", 2, "--global-batch-size", 8, "--cost-table", "costs.yaml",
        "-o", f"{name}.yaml", "--microbatches", f"{name}.parquet", *more,
        cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return directory / f"{name}.yaml"


def train(directory: Path, plan: Path, stats: str, *more: object) -> subprocess.CompletedProcess:
    return run_script("examples/train_packed.py", "--plan", plan, "--stats", stats, *SMALL, *more, cwd=directory)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_training_sees_what_the_plan_predicts(demo, loader):
    name = loader
    plan = analyze(demo, name, "--loader", loader, "--train-iters", 10, "--buckets", 2 if loader == "single" else 1)
    done = train(demo, plan, f"{name}.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr

    told = yaml.safe_load(plan.read_text())
    written = lines(demo / f"{name}.jsonl")
    last = written[-1]
    assert [x["step"] for x in written] == list(range(10))
    assert (last["microbatches"], last["fallbacks"]) == (40, {"no_cuda": 40})
    predicted = {b["max_seqs"]: round(b["share"] * 40) for b in told["graphs"]["buckets"]}
    assert {r["max_seqs"]: r["count"] for r in last["decided"]["replays"]} == predicted
    fallen = sum(last["decided"]["fallbacks"].values())
    assert fallen == round(told["predictions"]["fallback_rate"]["microbatch"] * 40) == 40 - sum(predicted.values())
    assert fallen > 2

    table = pq.read_table(demo / f"{name}.parquet").to_pylist()
    seen = [shape for x in written for shape in x["shapes"]]
    assert seen == [[row["n_seqs"], row["max_seqlen"], row["n_tokens"]] for row in table]
    assert len(seen) == 40
    compared = run_in_process("compare", plan, f"{name}.jsonl", "--tolerance", 0, cwd=demo)
    assert compared.returncode == 3
    assert compared.stderr.endswith(
        ": the run replayed nothing (no_cuda 40): compare a run whose graphs were captured\n"
    )
    assert done.stdout == compared.stdout


def test_an_eager_run_is_counted_as_the_wish_of_its_user(demo):
    plan = analyze(demo, "eager", "--train-iters", 5)
    done = train(demo, plan, "eager.jsonl", "--steps", 3, "--eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(demo / "eager.jsonl")[-1]["fallbacks"] == {"disabled_by_user": 3 * 4}


def test_a_plan_that_does_not_hold(demo):
    plan = analyze(demo, "wrong", "--train-iters", 5, "--buckets", 1)
    told = yaml.safe_load(plan.read_text())
    told["graphs"]["buckets"][0]["max_seqs"] -= 1
    plan.write_text(yaml.safe_dump(told))
    done = train(demo, plan, "wrong.jsonl")
    assert done.returncode == 3
    assert "micro-batches do not fit, the plan predicted" in done.stderr
    assert "share of micro-batches" in done.stdout
    partly = train(demo, plan, "partly.jsonl", "--steps", 2)
    assert partly.returncode == 0, partly.stderr  # of so few steps the plan predicts nothing


def test_refusals(demo):
    plan = analyze(demo, "refusals", "--train-iters", 5)
    done = train(demo, plan, "new.jsonl", "--steps", 6)
    assert (done.returncode, done.stderr) == (2, "train_packed: --steps 6: the plan has 5\n")
    epochs = train(demo, analyze(demo, "epochs", "--split", "1,99,0", "--train-iters", 30), "new.jsonl")
    assert epochs.returncode == 2
    assert "several datasets or more than one epoch" in epochs.stderr
    told = yaml.safe_load(plan.read_text())
    told["dataset"]["fingerprint"] = "another"
    plan.write_text(yaml.safe_dump(told))
    done = train(demo, plan, "new.jsonl")
    assert done.returncode == 1
    assert "has changed since" in done.stderr
    assert not (demo / "new.jsonl").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_stays_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= 150
