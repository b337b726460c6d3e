"""Megatron-Bridge's adapters over a frozen model, through Megatron's own loop: replayed beside eager, bit for bit."""

from __future__ import annotations

import importlib.util

import pytest
from support.gpu_training import assert_as_predicted, assert_same_training, train

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge"),
]

DROPOUT = ("--adapters-dropout", "0.1")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
CASES = {
    "LoRA": ("dense", ("--adapters", "lora")),
    "LoRA, dropout": ("dropout", ("--adapters", "lora", *DROPOUT)),
    "LoRA, dropout, full recompute": ("dropout", ("--adapters", "lora", *DROPOUT, *FULL)),
    "DoRA, dropout": ("dropout", ("--adapters", "dora", *DROPOUT)),
    "canonical LoRA, dropout": ("dropout", ("--adapters", "canonical", *DROPOUT)),
}
"""Name, model, and arguments."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def test_adapters_train_as_they_do_eagerly(plans, tmp_path, name):
    model, options = CASES[name]
    plan = plans(2, model=model)
    ours = train(plan, tmp_path / "on.jsonl", model, *options)
    eager = train(plan, tmp_path / "off.jsonl", model, *options, replay=False)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_adapters_train_in_graphs_of_layers(plans, tmp_path, impl):
    options = CASES["LoRA"][1]
    plan = plans(2, impl=impl)
    ours = train(plan, tmp_path / "on.jsonl", "dense", *options)
    eager = train(plans(2), tmp_path / "off.jsonl", "dense", *options, replay=False)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)


@pytest.mark.parametrize("layers", [1])
def test_adapters_train_in_pieces(plans, tmp_path, layers):
    options = CASES["LoRA, dropout"][1]
    plan = plans(2, model="dropout", layers_per_graph=layers)
    ours = train(plan, tmp_path / "on.jsonl", "dropout", *options)
    eager = train(plans(2, model="dropout"), tmp_path / "off.jsonl", "dropout", *options, replay=False)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)
