"""Multi-token prediction behind a decoder, on a CPU: replayed as the decoder is, it trains as it does eagerly."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer import multi_token_prediction
from support import cpu_graphs
from support.gpt_of_experts import BOUNDS, micro_batches, model_of, train_two_at_a_time
from support.layer_graphs import BUCKETS, TOKENS, FakeEngine
from support.plans import plan_of_shares
from torch._dynamo import config as dynamo

from thdprof.plan import OffloadPart
from thdprof.runtime import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron import (
    Installation,
    decoder_surroundings,
    install,
    refusals,
    rotary,
    versions,
)
from thdprof.runtime.megatron.decoder import decoder as prediction
from thdprof.runtime.megatron.decoder.decoder import Decoder, PredictionLayer
from thdprof.runtime.megatron.install import runner_of
from thdprof.runtime.megatron.kinds import chunk
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs
from thdprof.runtime.megatron.opening import MetadataForm, Openings
from thdprof.runtime.megatron.quantized import find_quantization

pytestmark = pytest.mark.usefixtures("parallel_state", "_engine_can_be_imported")
ENTRIES = ("_proj_and_transformer_layer", "_checkpointed_forward")
REPLAYS = {BUCKETS[0]: 3, BUCKETS[1]: 2}
FALLBACKS = {FallbackReason.too_many_seqs: 2}


@pytest.fixture
def _as_chunks(monkeypatch):
    cpu_graphs.as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda *_: None))


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
        one.attach(run, cp_size=1)
        runs.append(run)
    return runs


def as_chunk(one):
    around = replace(decoder_surroundings.surround_decoder(one.block), while_capturing=nullcontext)
    return chunk.ChunkGraphs(one, BUCKETS, num_slots=2, sample_every=0, surroundings=around)


def as_layers(one, modules=(), num_slots=2):
    engine = FakeEngine()
    engine.block = one.block
    return LayerGraphs(one, BUCKETS, num_slots=num_slots, make=engine, sample_every=0, modules=modules)


def assert_trains_alike(make, **changes):
    """Train with and without graphs; returns the runs."""
    found, runs = [], []
    for with_graphs in (False, True):
        model = model_of(**{"predictions": 2, **changes})
        runs = attached(model, make) if with_graphs else []
        found.append(train_two_at_a_time(model))
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
    openings.capture([(run.module, run, True)], say=lambda line: None)
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
    assert prediction.find_replayed_predictions(model, model.config, impl=impl) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert told in record.getMessage()


def test_a_stage_without_embedding_predicts_nothing():
    model = model_of(predictions=None, pre_process=False)
    assert not hasattr(model, "embedding")
    assert prediction.find_replayed_predictions(model, model.config, impl="chunk") == []


def test_layers_that_no_graph_can_hold_keep_prediction_eager(monkeypatch):
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    model = model_of(predictions=1)
    inner = model.mtp.layers[0].mtp_model_layer
    inner.mlp._fused_impl = None  # as Megatron's fused MLP has it
    assert "fused operations" in prediction.why_eager(model.mtp.layers, model.config, impl="chunk")
    assert prediction.why_eager(model.mtp.layers, model.config, impl="transformer_engine") == (
        "none of its layers can be a graph"
    )
    inner.self_attention = object.__new__(GatedDeltaNet)
    torch.nn.Module.__init__(inner.self_attention)
    assert "GatedDeltaNet" in prediction.why_eager(model.mtp.layers, model.config, impl="chunk")


@pytest.mark.parametrize(("detached", "frozen"), [(False, False), (True, False), (False, True)])
@pytest.mark.usefixtures("_as_chunks")
def test_the_embedding_takes_a_gradient_in_the_first_call_as_in_training(detached, frozen):
    model = model_of(predictions=1, mtp_detach_heads=detached, **PADDED)
    model.embedding.requires_grad_(not frozen)
    (one,) = prediction.find_replayed_predictions(model, model.config, impl="chunk")
    run = as_chunk(one)
    one.attach(run, cp_size=1)
    openings = Openings(of_plan(), model.config, shards=1, form=MetadataForm())
    openings.capture([(one, run, True)], say=lambda line: None)
    for args, kwargs in micro_batches():
        model(*args, **kwargs).sum().backward()
    assert run.stats().captures == 4
    assert run.stats().replays == REPLAYS


def test_parts_that_a_replay_would_leave_out_keep_a_layer_eager():
    model = model_of(predictions=1)
    assert prediction.why_eager(model.mtp.layers, model.config, impl="chunk") == ""
    model.mtp.layers[0].eh_proj.register_forward_hook(lambda *_: None)
    assert prediction.why_eager(model.mtp.layers, model.config, impl="chunk") == (
        "its eh_proj has hooks that a replay would leave out"
    )


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_an_installation_pads_predictions_too_and_gives_them_back(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    model, entry = model_of(predictions=2, **PADDED), "_proj_and_transformer_layer"
    limit = dynamo.recompile_limit
    with install(model, of_plan(), model.config, replay=False) as installation:
        assert dynamo.recompile_limit == 2 * limit
        assert all(entry in vars(layer) for layer in model.mtp.layers)
        train_two_at_a_time(model)
        for stats in (installation.stats(), *installation.prediction_stats()):
            assert (stats.replays, stats.fallbacks) == (REPLAYS, FALLBACKS)
        assert len(installation.prediction_stats()) == 2
    assert not any(entry in vars(layer) for layer in model.mtp.layers)
    assert dynamo.recompile_limit == limit


def test_what_an_installation_changes_in_other_packages_lasts_until_the_last_one_is_closed(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)

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
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    model, limit = model_of(predictions=1, **PADDED), dynamo.recompile_limit
    monkeypatch.setattr(rotary, "shifting_together", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as held:  # whose frames keep alive what was not taken back
        install(model, of_plan(), model.config, replay=False)
    assert held
    assert dynamo.recompile_limit == limit
    assert "forward" not in vars(model.decoder)
    assert "_proj_and_transformer_layer" not in vars(model.mtp.layers[0])


class Opened(DispatchedModule):
    """Counts captures, and replays by running the module."""

    dropped = 0

    def _open(self, call):
        self._stats.captures += 1

    def _replay(self, bucket, call):
        args, kwargs = call.substitute(call.tensors, call.packed)
        return self.module(*args, **kwargs)

    def pool_bytes(self):
        return 7

    def recapture(self):
        self.dropped += 1
        super().recapture()


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(("repeated", "offloads"), [(False, False), (True, False), (False, True)])
def test_an_installation_captures_predictions_ahead_and_drops_them_with_the_decoder(
    monkeypatch, caplog, repeated, offloads
):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    made = []

    def runner_of(part, plan, config, *, slots, common, **_):
        made.append((type(part).__name__, slots, "on_decision" in common, Opened(part, plan.captured, **common)))
        return made[-1][-1]

    monkeypatch.setattr(sys.modules["thdprof.runtime.megatron.install"], "runner_of", runner_of)
    model, plan = model_of(predictions=2, mtp_use_repeated_layer=repeated, **PADDED), of_plan()
    changes = {"impl": "transformer_engine", "slots": [[3]]}
    if offloads:
        changes["offload"] = OffloadPart(modules=["mlp"])
    plan, lines = plan.model_copy(update={"graphs": plan.graphs.model_copy(update=changes)}), []
    model.config.test_mode = repeated
    with install(model, plan, model.config, say=lines.append) as installation:
        assert ["is not watched" in line for line in lines].count(True) == offloads
        assert caplog.text.count("thdprof has never looked at are off their default") == repeated
        assert ("test_mode=True; compare" in caplog.text) == repeated
        layers = (
            [] if offloads else [("PredictionLayer", 6, False)] if repeated else [("PredictionLayer", 3, False)] * 2
        )
        assert [one[:3] for one in made] == [("Decoder", 3, True), *layers]
        runs = [one[-1] for one in made]
        assert [run.stats().captures for run in runs] == [1] * len(runs)
        assert installation.pool_bytes() == 7 * len(runs)
        installation.recapture()
        assert [run.dropped for run in runs] == [1] * len(runs)
        assert len(installation.prediction_stats()) == len(layers)
    assert not any(entry in vars(layer) for layer in model.mtp.layers for entry in ENTRIES)


def test_a_failing_attach_gives_every_layer_back(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    attach, attached = PredictionLayer.attach, []

    def failing(self, *args, **kwargs):
        attach(self, *args, **kwargs)
        if isinstance(self, PredictionLayer):
            attached.append(self)
        if len(attached) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoder, "attach", failing)
    model = model_of(predictions=2, **PADDED)
    with pytest.raises(RuntimeError, match="out of memory"):
        install(model, of_plan(), model.config, replay=False)
    assert len(attached) == 2
    assert not any(entry in vars(layer) for layer in model.mtp.layers for entry in ENTRIES)


def test_a_group_of_layers_is_none_of_prediction():
    plan, model = of_plan(), model_of(predictions=1, **PADDED)
    plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"layers_per_graph": 1})})
    run = runner_of(PredictionLayer(model.mtp.layers[0]), plan, model.config, slots=1, common={"sample_every": 0})
    assert run._options.cuts == ()


def test_layers_draw_from_the_random_state_in_which_prediction_runs_them():
    layer = model_of(predictions=1).mtp.layers[0]
    assert not PredictionLayer(layer).draws_apart()
    layer.config.sequence_parallel = True
    assert PredictionLayer(layer).draws_apart()


@pytest.mark.parametrize(
    ("fp8", "in_stack", "entered"),
    [(True, False, ("fp8",)), (True, True, ("fp8",)), (False, False, None), (False, True, ("fp4", 0))],
)
def test_layers_of_prediction_are_quantized_as_it_runs_them(monkeypatch, fp8, in_stack, entered):
    from megatron.core import fp4_utils, fp8_utils

    monkeypatch.setattr(fp8_utils, "get_fp8_context", lambda config, *number: ("fp8", *number))
    monkeypatch.setattr(fp4_utils, "get_fp4_context", lambda config, *number: ("fp4", *number))
    of_engine = ModuleType("transformer_engine.pytorch.quantization")
    of_engine.FP8GlobalStateManager = SimpleNamespace(reduce_and_update_fp8_tensors=None)
    monkeypatch.setitem(sys.modules, of_engine.__name__, of_engine)
    block, layer = torch.nn.Module(), SimpleNamespace(layer_number=1)
    config = SimpleNamespace(fp8="hybrid" if fp8 else None, fp4=None if fp8 else "e2m1")
    assert find_quantization(block, config, layers=True)._of_layer(layer) == (("fp8", 0) if fp8 else ("fp4", 0))
    block.mtp_model_layer = torch.nn.Module()
    if in_stack:
        block.mtp_model_layer.layers = torch.nn.ModuleList()
    found = find_quantization(block, config, layers=True)._of_layer(layer)
    assert (None if isinstance(found, nullcontext) else found) == entered


def test_an_installation_that_is_not_kept_goes_on(monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(refusals, "check", lambda *_: None)
    model, limit, kept = model_of(predictions=1, **PADDED), dynamo.recompile_limit, []
    monkeypatch.setattr(Installation, "__init__", partialmethod(_noted, kept, Installation.__init__))
    install(model, of_plan(), model.config, replay=False)
    (changes,) = kept
    gc.collect()
    try:
        assert dynamo.recompile_limit == 2 * limit
    finally:
        changes().close()
    assert dynamo.recompile_limit == limit


def _noted(self, kept, own, *args):
    own(self, *args)
    kept.append(weakref.ref(self._changes))
