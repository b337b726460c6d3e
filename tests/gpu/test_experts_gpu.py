"""Dropless experts on a GPU, through graphs that end at the router or at the exchange of tokens, beside eager ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.gpu_training import DETERMINISTIC_MAMBA, assert_as_predicted, assert_same_training, train
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import gpu_experts_cases  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FUSED = "--moe-permute-fusion"
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid"
CASES = {
    "built for no graphs": ("", False),
    "fused, up to the exchange": (f"{FUSED} --moe-router-fusion", True),
    "shared experts": ("--moe-shared-expert-intermediate-size 128", False),
    "shared experts overlapped": ("--moe-shared-expert-intermediate-size 128 --moe-shared-expert-overlap", False),
    "groups, expert bias, z-loss": (f"{GROUPS} --moe-router-enable-expert-bias --moe-z-loss-coeff 1e-3", False),
    "forced balance": ("--moe-router-force-load-balancing", False),
}
"""Megatron's arguments of a case, and whether its plan captures the dispatcher's preprocessing."""


@pytest.mark.parametrize("name", CASES)
def test_dropless_experts_train_as_they_do_eagerly(plans, tmp_path, name):
    words, preprocess = CASES[name]
    more = [*words.split(), "--cuda-graph-impl", "none"]
    plan = plans(2, model="dropless", impl="transformer_engine", preprocess=preprocess)
    ours = train(plan, tmp_path / "ours.jsonl", "dropless", *more)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, train(plan, tmp_path / "eager.jsonl", "dropless", *more, replay=False))


@pytest.mark.parametrize("words", ["", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"])
def test_whole_chunks_of_dropless_experts_train_as_they_do_eagerly(plans, tmp_path, words):
    plan = plans(2, model="dropless", verify="1/2")
    ours = train(plan, tmp_path / "ours.jsonl", "dropless", *words.split())
    assert_as_predicted(plan, ours)
    assert_same_training(ours, train(plan, tmp_path / "eager.jsonl", "dropless", *words.split(), replay=False))


@pytest.mark.parametrize("name", gpu_experts_cases.CASES)
def test_micro_batches_of_dropless_experts_give_the_numbers_of_eager_ones(name):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/gpu/gpu_experts_cases.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is None, reason="needs mamba_ssm")
def test_a_hybrid_with_mamba_layers_and_experts_trains_as_it_does_eagerly(plans, tmp_path):
    plan = plans(1, model="mamba with experts", impl="transformer_engine")
    ours = train(
        plan, tmp_path / "ours.jsonl", "mamba with experts", "--cuda-graph-impl", "none", **DETERMINISTIC_MAMBA
    )
    assert_as_predicted(plan, ours)
    eager = train(plan, tmp_path / "eager.jsonl", "mamba with experts", replay=False, **DETERMINISTIC_MAMBA)
    assert_same_training(ours, eager)
