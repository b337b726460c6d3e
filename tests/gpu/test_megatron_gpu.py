"""Megatron training through every kind of graph, beside eager training of the same padded input, bit for bit.

Cases of one model share their eager run: `pytest -m gpu -n 4 --dist loadgroup` keeps them in one process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.gpu_process import free_port
from support.gpu_training import LIMIT_S, assert_as_predicted, assert_same_training, environment, train
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


CASES = [
    ("dropout", 1, ("chunk", "transformer_engine")),
    ("dense", 2, ("chunk", "transformer_engine", "local")),
    ("hybrid", 1, ("chunk",)),
    ("moe", 1, ("chunk", "transformer_engine")),
    ("dropless", 1, ("transformer_engine",)),
    ("mla", 2, ("chunk", "transformer_engine", "local")),
]
"""Model, number of buckets, and kinds of graphs."""


@pytest.fixture(scope="module")
def eager_runs(plans, tmp_path_factory):
    """Gives the eager run of a model, which is trained once."""
    found = {}

    def run(model, buckets):
        if (model, buckets) not in found:
            record = tmp_path_factory.mktemp("eager") / "run.jsonl"
            found[model, buckets] = train(plans(buckets, model=model), record, model, replay=False)
        return found[model, buckets]

    return run


@pytest.mark.parametrize(
    ("model", "buckets", "impl"),
    [
        pytest.param(model, buckets, impl, marks=pytest.mark.xdist_group(model), id=f"{model}-{impl}")
        for model, buckets, impls in CASES
        for impl in impls
    ],
)
def test_a_run_equals_its_eager_twin(plans, eager_runs, tmp_path, model, buckets, impl):
    plan = plans(buckets, model=model, impl=impl)
    ours = train(plan, tmp_path / "ours.jsonl", model)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager_runs(model, buckets))


FOUR_LAYERS = "--num-layers 4 --hidden-size 256 --num-attention-heads 4"
IN_GROUPS = [("dropout", 1), ("dropout", 2), ("dropout", 4), ("moe", 2), ("mla", 3), ("hybrid", 1)]
"""Model of four layers, and layers of one graph."""


@pytest.fixture(scope="module")
def eager_runs_of_four_layers(plans, tmp_path_factory):
    """Gives the eager run of a model of four layers, which is trained once."""
    found = {}

    def run(model):
        if model not in found:
            record = tmp_path_factory.mktemp("eager") / "run.jsonl"
            found[model] = train(plans(2, model=model), record, model, replay=False, shape=FOUR_LAYERS)
        return found[model]

    return run


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        pytest.param(model, layers, marks=pytest.mark.xdist_group(f"{model} in groups"), id=f"{model}-{layers}")
        for model, layers in IN_GROUPS
    ],
)
def test_graphs_of_some_layers_equal_their_eager_twin(plans, eager_runs_of_four_layers, tmp_path, model, layers):
    plan = plans(2, model=model, layers_per_graph=layers, verify="1/4")
    ours = train(plan, tmp_path / "ours.jsonl", model, shape=FOUR_LAYERS)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager_runs_of_four_layers(model))
    assert ours.verified > 5
    assert ours.mismatches == 0


def example(plan, directory, replay, stages):
    """What a loop of one's own prints: a line a step."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", stages]
    command += ["--master-port", free_port(), ROOT / "examples" / "train_megatron_core.py", "--plan", plan]
    command += ["--replay", replay, "--stats", directory / f"{replay}.jsonl", "--layers", 2, "--hidden", 256]
    done = subprocess.run(
        [*map(str, command), "--heads", "4"], capture_output=True, text=True, env=environment(), timeout=LIMIT_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "two stages"])
def test_a_loop_of_ones_own_equals_its_eager_twin_and_its_plan(plans, tmp_path, thdprof, stages):
    if torch.cuda.device_count() < stages:
        pytest.skip("needs two NVIDIA GPUs")
    plan = plans(1, stages=stages)
    ours, eager = (example(plan, tmp_path, replay, stages) for replay in ("on", "off"))
    assert len(ours) == 12
    assert ours == eager
    assert len({line.partition(":")[2] for line in ours}) > 1
    compared = thdprof("compare", plan, tmp_path / "on.jsonl")
    assert compared.returncode == 0, compared.stdout + compared.stderr
