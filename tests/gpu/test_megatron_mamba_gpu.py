"""Hybrid models with megatron-core's own Mamba layers on a GPU, through every kind of graph."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.gpu_training import DETERMINISTIC_MAMBA, assert_as_predicted, assert_same_training, train
from support.paths import ROOT

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is None, reason="needs mamba_ssm"),
]
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")


@pytest.fixture(scope="module")
def eager_runs(plans, tmp_path_factory):
    """Eager runs without and with dropout, by Megatron's arguments for it."""

    def run(*more):
        record = tmp_path_factory.mktemp("eager") / "run.jsonl"
        return train(plans(1, model="mamba"), record, "mamba", *more, replay=False, **DETERMINISTIC_MAMBA)

    return {more: run(*more) for more in ((), DROPOUT)}


@pytest.mark.xdist_group("mamba")
@pytest.mark.parametrize(
    ("impl", "more"),
    [("chunk", DROPOUT), ("transformer_engine", ()), ("local", ())],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_equals_its_eager_twin(plans, eager_runs, tmp_path, impl, more):
    plan = plans(1, model="mamba", impl=impl)
    ours = train(plan, tmp_path / "ours.jsonl", "mamba", *more, **DETERMINISTIC_MAMBA)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager_runs[more])


@pytest.mark.xdist_group("mamba predicts")
def test_multi_token_prediction_with_mamba_layers_equals_its_eager_twin(plans, tmp_path):
    predicting = (*DROPOUT, "--hybrid-layer-pattern", "M-*-/M*")
    eager = train(plans(2, model="mamba"), tmp_path / "eager.jsonl", "mamba", *predicting, replay=False,
                  **DETERMINISTIC_MAMBA)  # fmt: skip
    for impl in ("chunk", "transformer_engine"):
        plan = plans(2, model="mamba", impl=impl)
        ours = train(plan, tmp_path / f"{impl}.jsonl", "mamba", *predicting, **DETERMINISTIC_MAMBA)
        assert_as_predicted(plan, ours)
        assert_same_training(ours, eager)
        assert ours.predicting == [sum(ours.replays.values())]


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("isolation_in_chunk_graphs", {}),  # tunes its kernels
        ("isolation_in_layer_graphs", DETERMINISTIC_MAMBA),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_documents_do_not_mix(name, environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/gpu/gpu_mamba_cases.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": path},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
