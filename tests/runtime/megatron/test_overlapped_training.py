"""Megatron's own schedule of overlapped experts, on a CPU: its nodes replay graphs, and train as they do eagerly."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support.gpt_of_experts import BOUNDS, micro_batches
from support.gpt_of_experts import model_of as model_for_any_schedule
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    SMALL,
    TOKENS,
    FakeEngine,
    Reduction,
)
from support.plans import plan_of_shares

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs
from thdprof.runtime.megatron.kinds.overlapped import OverlappedLayerGraphs, SchedulePlans

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu", "_engine_can_be_imported", "_streams")
MODULES = ["attn", "moe_router"]


@pytest.fixture
def _streams(monkeypatch):
    """Streams and events of a schedule, which order nothing here."""
    from megatron.core.models.common.utils import TransformerLayerNode

    # one rank's exchange gives its input on, and Megatron would free that as if another rank had it
    monkeypatch.setattr(TransformerLayerNode, "_resolve_free_input", staticmethod(lambda *_: False))
    event = SimpleNamespace(record=lambda *_: None, wait=lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda *_, **__: event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def model_of(**settings):
    """A model whose schedule overlaps; see `gpt_of_experts.model_of`."""
    return model_for_any_schedule(overlaps=True, **settings)


def plans_of(model, engine=None):
    """Graphs of the model's layers, to which its schedule's nodes are led; without an engine nothing is captured."""
    if engine is None:
        plans = SchedulePlans(model, None, None)
        plans.attach()
        return plans, None
    engine.block, decoder = model.decoder, Decoder(model.decoder)
    run = OverlappedLayerGraphs(decoder, BUCKETS, num_slots=2, make=engine, sample_every=0, modules=MODULES)
    decoder.attach(run, cp_size=1)
    plans = SchedulePlans(model, decoder, run)
    plans.attach()
    return plans, run


def trained(model, masked=False):
    """Losses and gradients of micro-batches whose forward and backward Megatron's schedule interleaves."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan as Chunk

    reduction = Reduction(model)
    reduction.zero(resets_flags=True)
    seen, before = [], None
    for micro_batch in [*micro_batches(masked), None]:
        plan = None
        if micro_batch is not None:
            args, kwargs = micro_batch
            plan = model.build_schedule_plan(*args, **kwargs)
        grad = None if before is None else torch.ones_like(before[1])
        loss = Chunk.run(plan, None if before is None else before[0], b_grad=grad)
        if plan is not None:
            seen.append(loss.detach().clone())
        before = (plan, loss)
    return [*seen, *(p.main_grad.clone() for p in model.parameters())], reduction.ready


@pytest.mark.parametrize("settings", [{}, {"first_dense": True}, {"predictions": 1}], ids=["experts", "dense", "mtp"])
def test_a_schedules_nodes_train_from_graphs_as_they_do_eagerly(settings):
    found = []
    for engine in (None, FakeEngine()):
        model = model_of(**settings)
        _, run = plans_of(model, engine)
        found.append(trained(model))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert found[0][1] == found[1][1]
    assert run.stats().replays == {BUCKETS[0]: 3, BUCKETS[1]: 2}
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 2}


def test_routers_get_no_padding_mask_in_graphs_as_the_schedules_nodes_give_them_none():
    found = []
    for engine in (None, FakeEngine()):
        model = model_of(moe_z_loss_coeff=0.1)
        plans_of(model, engine)
        found.append(trained(model, masked=True)[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("kind", "forks"), [(OverlappedLayerGraphs, 0), (LayerGraphs, 1)])
def test_layers_are_captured_over_the_random_state_from_which_their_nodes_draw(monkeypatch, kind, forks):
    """With sequence parallelism a block's forward draws from another state; the schedule's nodes do not."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    model, engine, forked = model_of(), FakeEngine(), []
    fork = contextmanager(lambda *_: iter([forked.append(engine.calls)]))
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    decoder = Decoder(model.decoder)
    engine.block = model.decoder
    run = kind(decoder, BUCKETS[:1], num_slots=1, make=engine, sample_every=0, modules=MODULES)
    decoder.attach(run, cp_size=1)
    x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    params = packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")
    model.decoder.config.sequence_parallel = True
    model.decoder(hidden_states=x, attention_mask=None, packed_seq_params=params)
    assert len(engine.calls) == 1
    assert len(forked) == forks


def test_multi_token_prediction_is_that_of_the_schedule_without_overlap():
    model = model_of(predictions=1)
    plans_of(model)
    losses = trained(model)[0][: len(BOUNDS)]
    gradients = [p.main_grad.clone() for p in model.parameters()]
    assert any("mtp" in name and p.main_grad.any() for name, p in model.named_parameters())
    usual = model_of(predictions=1)
    Reduction(usual).zero(resets_flags=True)
    for (args, kwargs), loss in zip(micro_batches(), losses, strict=True):
        found = usual(*args, **kwargs)
        assert torch.equal(found, loss)
        found.sum().backward()
    for ours, theirs in zip(gradients, usual.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.main_grad)


def test_an_installation_that_fails_takes_its_changes_back(monkeypatch):
    from thdprof.runtime.megatron import install, refusals, versions

    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    models = [model_of(), model_of()]
    attach, attached = SchedulePlans.attach, []

    def failing(self):
        attach(self)
        attached.append(self)
        if len(attached) == len(models):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(SchedulePlans, "attach", failing)
    plan = plan_of_shares([0.4, 0.4], count=8, steps=2, seq_length=TOKENS, global_batch_size=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        install(models, plan, models[0].config, replay=False)
    for model in models:
        assert "build_schedule_plan" not in vars(model)
        assert "forward" not in vars(model.decoder)
    monkeypatch.setattr(SchedulePlans, "attach", attach)
    with install(models, plan, models[0].config, replay=False):
        assert all("forward" in vars(model.decoder) and "build_schedule_plan" in vars(model) for model in models)
    assert not any("forward" in vars(model.decoder) or "build_schedule_plan" in vars(model) for model in models)
