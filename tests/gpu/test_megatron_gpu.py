"""Megatron training through every kind of graph, beside eager training of the same padded input, bit for bit."""

from __future__ import annotations

import pytest
from support.gpu_training import train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


CASES = [
    ("chunk", "dense", 1, ("--dropout", "0.1")),
    ("chunk", "dense", 2, ()),
    ("chunk", "hybrid", 1, ()),
    ("chunk", "moe", 1, ("--aux-loss", "0.01")),
    ("transformer_engine", "dense", 1, ("--dropout", "0.1")),
    ("transformer_engine", "dense", 2, ()),
    ("transformer_engine", "moe", 1, ("--aux-loss", "0.01")),
    ("transformer_engine", "moe", 1, ("--dropless", "--aux-loss", "0.01")),
    ("chunk", "mla", 1, ()),
    ("transformer_engine", "mla", 2, ()),
    ("local", "dense", 1, ()),
    ("local", "dense", 2, ()),
]


@pytest.mark.parametrize(("impl", "model", "buckets", "more"), CASES)
def test_a_run_equals_its_eager_twin(plans, tmp_path, impl, model, buckets, more):
    common = ("--model", model, *more)
    eager = train(plans[buckets], tmp_path / "eager.jsonl", "--padded-eager", *common)
    ours = train(plans[buckets], tmp_path / "ours.jsonl", "--impl", impl, *common)
    assert ours["captures"] > 0
    assert ours["fallbacks"] == ours["predicted"]
    assert sum(ours["fallbacks"]) > 0
    assert len(ours["replays"]) == buckets
    assert sum(ours["replays"].values()) > 20
    assert len(ours["losses"]) == 12
    assert ours["losses"] == eager["losses"]
    assert ours["grad_norms"] == eager["grad_norms"]
