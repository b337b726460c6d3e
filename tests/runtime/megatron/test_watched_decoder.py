"""A watched decoder of megatron-core's own layers, on a CPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.cpu_graphs import as_if_on_a_gpu  # noqa: E402
from support.layer_graphs import BUCKETS, HIDDEN, LARGE, SMALL, TOKENS, make_block  # noqa: E402

from thdprof.runtime.graphs import slots  # noqa: E402
from thdprof.runtime.megatron import decoder_surroundings, packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.kinds import chunk  # noqa: E402

pytestmark = pytest.mark.usefixtures("parallel_state")


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda *_: None))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


def watched(**options):
    torch.manual_seed(1)
    block = make_block()
    block.train()
    for parameter in block.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    decoder = Decoder(block)
    around = replace(
        decoder_surroundings.surround_decoder(block), while_capturing=nullcontext
    )  # layers are made for layer graphs
    run = chunk.ChunkGraphs(
        decoder, BUCKETS, num_slots=2, sample_every=0, surroundings=around, name="chunk 0", **options
    )
    decoder.attach(run, cp_size=1)
    return block, run


def train(block, seed=0):
    """Two micro-batches in flight; gradients of their inputs."""
    draws, grads, held = torch.Generator().manual_seed(seed), [], []
    for bounds in (SMALL, LARGE, SMALL, LARGE):
        x = torch.randn(TOKENS, 1, HIDDEN, generator=draws).requires_grad_()
        params = packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu")
        held.append((x, block(hidden_states=x, attention_mask=None, packed_seq_params=params)))
        if len(held) == 2:
            given, y = held.pop(0)
            y.square().sum().backward()
            grads.append(given.grad)
    for given, y in held:
        y.square().sum().backward()
        grads.append(given.grad)
    return grads


def test_a_watch_changes_no_number_of_the_run_and_is_silent(caplog):
    results = []
    for every in (0, 1):
        block, run = watched(verify_every=every)
        grads = train(block)
        results.append([*grads, *(p.main_grad for p in block.parameters())])
        assert run.stats().replays.total() == 4
        assert run.stats().verified.total() == 4 * every
        assert all(p.grad is None for p in block.parameters())
    assert len(results[0]) > 8
    assert any(tensor.abs().sum() > 0 for tensor in results[0][4:])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert not [r for r in caplog.records if r.levelno == logging.ERROR]


def test_a_wrong_replay_is_found_and_named(caplog, monkeypatch):
    block, run = watched(verify_every=1)
    train(block)
    forward = slots.Lease.forward
    monkeypatch.setattr(slots.Lease, "forward", lambda *args: tuple(y * 1.001 for y in forward(*args)))
    train(block)
    run.stats()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert told[0].startswith("chunk 0: wrong numbers: micro-batch 4, replayed in slot 0 by the graphs for ")
    assert "output 0" in told[0]
