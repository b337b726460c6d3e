"""Layer graphs whose captures succeed on all ranks or on none, and those that are captured before training."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support.layer_graphs import BUCKETS, LARGE, OVER, SMALL, FakeEngine, forward, graphs_of, inputs, make_block
from torch import nn

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import decoder_surroundings, packed_seq_params
from thdprof.runtime.megatron.kinds import layer_graphs

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")


def test_a_bucket_that_failed_on_a_peer_runs_eagerly_and_the_others_replay():
    said = []

    def agreed(succeeded):
        said.append(succeeded)
        return succeeded and len(said) != 2  # the smaller bucket fails on a peer, in the first slot

    block, engine = make_block(), FakeEngine()
    run = graphs_of(block, engine, num_slots=2, agreed=agreed)
    x = inputs(1)[0]
    with run.stats().expect(captures=3, replays=1):
        replayed = forward(block, x.clone().requires_grad_(), LARGE)
    assert torch.equal(replayed, forward(make_block(), x, LARGE))
    assert said == [True] * 5  # large, small, that it was no bug, large again, and large in the second slot
    assert len(engine.calls) == 4
    replayed.sum().backward()
    with run.stats().expect(fallbacks=1):
        eager = forward(block, x.clone().requires_grad_(), SMALL)
    assert torch.equal(eager, forward(make_block(), x, SMALL))
    assert run.stats().fallbacks == {FallbackReason.capture_failed: 1}


def test_layers_are_captured_before_training_without_a_pass_or_a_gather(monkeypatch):
    gathered: list[nn.Module] = []
    for module in (decoder_surroundings, layer_graphs):
        monkeypatch.setattr(module, "gather_parameters", gathered.append)
    block, engine, hooked = make_block(), FakeEngine(), []
    run = graphs_of(block, engine, num_slots=1)
    block.layers[0].register_forward_pre_hook(lambda *_: hooked.append("hook"))
    x = inputs(1)[0].requires_grad_()
    with run.ahead_of_training():
        run.module.show(torch.zeros_like(x).requires_grad_(), packed_seq_params([0, len(x)], device="cpu"))
    assert run.holds_graphs()
    assert gathered == []  # Megatron's hooks would begin to gather parameters, which are whole before training
    assert hooked == []
    assert len(engine.calls) == len(BUCKETS)
    assert all(p.grad is None for p in block.parameters())
    with run.stats().expect(replays=1):
        forward(block, x, SMALL).sum().backward()
    assert x.grad is not None
    hooked.clear()
    forward(block, x, OVER)
    assert hooked == ["hook"]  # it is back
