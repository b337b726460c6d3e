"""Multi-token prediction behind a decoder, on a CPU: replayed as the decoder is, it trains as it does eagerly."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer import multi_token_prediction
from support import cpu_graphs
from support.gpt_of_experts import BOUNDS, micro_batches, model_of
from support.layer_graphs import BUCKETS, TOKENS, FakeEngine, Reduction
from support.plans import plan_of_shares
from torch._dynamo import config as dynamo

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import install, predictions, surroundings, versions
from thdprof.runtime.megatron.decoder import token_shift
from thdprof.runtime.megatron.decoder.prediction import PredictionLayer
from thdprof.runtime.megatron.graphs import chunk
from thdprof.runtime.megatron.graphs.transformer_engine import LayerGraphs
from thdprof.runtime.megatron.opening import MetadataForm, Openings, capture_ahead
from thdprof.runtime.megatron.refusals import settings

pytestmark = pytest.mark.usefixtures("parallel_state", "_engine_can_be_imported")
REPLAYS = {BUCKETS[0]: 3, BUCKETS[1]: 2}
FALLBACKS = {FallbackReason.too_many_seqs: 2}


@pytest.fixture
def _as_chunks(monkeypatch):
    cpu_graphs.as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))


def of_plan():
    plan = plan_of_shares([0.4, 0.4], count=8, steps=2, seq_length=TOKENS, global_batch_size=4)
    buckets = [
        part.model_copy(update={"max_seqs": bucket.max_seqs, "max_seqlen": TOKENS})
        for part, bucket in zip(plan.graphs.buckets, BUCKETS, strict=True)
    ]
    graphs = plan.graphs.model_copy(update={"impl": "chunk", "buckets": buckets})
    tokens = plan.microbatches.model_copy(update={"n_tokens_max": TOKENS})
    return plan.model_copy(update={"graphs": graphs, "microbatches": tokens})


def attached(model, make):
    """Runs of the model's layers of multi-token prediction, which `make` makes."""
    runs = []
    for layer in model.mtp.layers:
        one = PredictionLayer(layer)
        run = make(one)
        one.attach(run, cp_size=1, shards=1, tail="none")
        runs.append(run)
    return runs


def as_chunk(one):
    around = replace(surroundings.of_decoder(one.block), while_capturing=nullcontext)
    return chunk.ChunkGraphs(one, BUCKETS, num_slots=2, sample_every=0, surroundings=around)


def as_layers(one, modules=(), num_slots=2):
    engine = FakeEngine()
    engine.block = one.block
    return LayerGraphs(one, BUCKETS, num_slots=num_slots, make=engine, sample_every=0, modules=modules)


def trained(model):
    """Losses and gradients of micro-batches of which two at a time are between forward and backward."""
    reduction = Reduction(model)
    reduction.zero(resets_flags=True)
    seen, held = [], []
    for args, kwargs in micro_batches():
        held.append(model(*args, **kwargs))
        seen.append(held[-1].detach().clone())
        if len(held) == 2:
            held.pop(0).sum().backward()
    held.pop().sum().backward()
    return [*seen, *(p.main_grad.clone() for p in model.parameters())], reduction.ready


def assert_trains_alike(make, **changes):
    """Train with and without graphs; returns the runs."""
    found, runs = [], []
    for with_graphs in (False, True):
        model = model_of(**{"predictions": 2, **changes})
        runs = attached(model, make) if with_graphs else []
        found.append(trained(model))
    (eager, ready), (ours, ours_ready) = found
    names = [name for name, _ in model.named_parameters()]
    assert len(ours) == len(BOUNDS) + len(names)
    for name, a, b in zip(["loss"] * len(BOUNDS) + names, eager, ours, strict=True):
        assert torch.equal(a, b), name
    moved = {name for name, grad in zip(names, ours[len(BOUNDS) :], strict=True) if grad.any()}
    for part in ("enorm", "hnorm", "eh_proj", "mtp_model_layer.self_attention", "final_layernorm"):
        assert any(part in name and "mtp" in name for name in moved), part
    assert ours_ready == ready
    return runs


PADDED = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.usefixtures("_as_chunks")
@pytest.mark.parametrize("detached", [False, True])
def test_whole_prediction_layers_train_as_they_do_eagerly(detached):
    runs = assert_trains_alike(as_chunk, mtp_detach_heads=detached, **PADDED)
    assert [(run.stats().replays, run.stats().fallbacks) for run in runs] == [(REPLAYS, FALLBACKS)] * 2
    assert all(run.stats().captures == 4 for run in runs)


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(("modules", "changes"), [((), PADDED), (("attn", "moe_router"), {})])
def test_their_transformer_layers_train_as_they_do_eagerly(modules, changes):
    runs = assert_trains_alike(lambda one: as_layers(one, modules), **changes)
    assert [(run.stats().replays, run.stats().fallbacks) for run in runs] == [(REPLAYS, FALLBACKS)] * 2


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_one_layer_that_predicts_every_further_token_holds_a_slot_for_each():
    changes = {"mtp_use_repeated_layer": True, **PADDED}
    (run,) = assert_trains_alike(lambda one: as_layers(one, num_slots=4), **changes)
    assert run.stats().replays == {bucket: 2 * n for bucket, n in REPLAYS.items()}


@pytest.mark.usefixtures("as_if_on_a_gpu", "recomputing")
@pytest.mark.parametrize("make", [as_layers])
def test_full_recompute_changes_no_number(make):
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, **PADDED}
    for run in assert_trains_alike(make, **changes):
        assert run.stats().replays == REPLAYS


@pytest.mark.usefixtures("_as_chunks")
def test_the_call_before_training_is_the_one_that_the_model_makes():
    model = model_of(predictions=1, **PADDED)
    (run,) = attached(model, as_chunk)
    openings = Openings(of_plan(), model.config, shards=1, form=MetadataForm())
    capture_ahead([run.module], [run], openings, [True], say=lambda line: None)
    assert run.stats().captures == 4
    for args, kwargs in micro_batches():
        model(*args, **kwargs).sum().backward()
    assert run.stats().captures == 4
    assert run.stats().replays == REPLAYS


@pytest.mark.parametrize(
    ("changes", "impl", "told"),
    [
        ({"overlaps": True}, "transformer_engine", "overlap_moe_expert_parallel_comm runs it by nodes of its own"),
        ({"mtp_use_repeated_layer": True}, "chunk", "mtp_use_repeated_layer adds up the gradients of several passes"),
    ],
)
def test_what_is_left_to_run_eagerly_is_told(caplog, changes, impl, told):
    model = model_of(**{"predictions": 2, **changes})
    assert predictions.of_model(model, model.config, impl=impl) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert told in record.getMessage()


def test_a_stage_without_embedding_predicts_nothing():
    model = model_of(predictions=None, pre_process=False)
    assert not hasattr(model, "embedding")
    assert predictions.of_model(model, model.config, impl="chunk") == []


def test_parts_that_a_replay_would_leave_out_keep_a_layer_eager():
    model = model_of(predictions=1)
    assert predictions.why_eager(model.mtp.layers, model.config, impl="chunk") == ""
    model.mtp.layers[0].eh_proj.register_forward_hook(lambda *_: None)
    assert predictions.why_eager(model.mtp.layers, model.config, impl="chunk") == (
        "its eh_proj has hooks that a replay would leave out"
    )


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_an_installation_pads_predictions_too_and_gives_them_back(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(settings, "check", lambda *_: None)
    model, entry = model_of(predictions=2, **PADDED), "_proj_and_transformer_layer"
    limit = dynamo.recompile_limit
    with install(model, of_plan(), model.config, replay=False) as installation:
        assert dynamo.recompile_limit == 2 * limit
        assert all(entry in vars(layer) for layer in model.mtp.layers)
        trained(model)
        for stats in (installation.stats(), *installation.prediction_stats()):
            assert (stats.replays, stats.fallbacks) == (REPLAYS, FALLBACKS)
        assert len(installation.prediction_stats()) == 2
    assert not any(entry in vars(layer) for layer in model.mtp.layers)
    assert dynamo.recompile_limit == limit


def test_what_an_installation_changes_in_other_packages_lasts_until_the_last_one_is_closed(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(settings, "check", lambda *_: None)

    def changed():
        return dynamo.recompile_limit, multi_token_prediction._roll_tensor_packed_seq

    before = changed()
    models = [model_of(predictions=1, **PADDED) for _ in range(2)]
    first, second = (install(model, of_plan(), model.config, replay=False) for model in models)
    inside = changed()
    assert inside[0] == 2 * before[0]
    assert inside[1] is not before[1]
    first.close()
    assert changed() == inside
    second.close()
    assert changed() == before


def test_an_installation_that_fails_half_way_leaves_nothing_changed(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(settings, "check", lambda *_: None)
    model, limit = model_of(predictions=1, **PADDED), dynamo.recompile_limit
    monkeypatch.setattr(token_shift, "together", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        install(model, of_plan(), model.config, replay=False)
    assert dynamo.recompile_limit == limit
    assert "forward" not in vars(model.decoder)
    assert "_proj_and_transformer_layer" not in vars(model.mtp.layers[0])
