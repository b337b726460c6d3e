"""Layer graphs by Transformer Engine, around real megatron-core layers on a CPU.

`FakeEngine` stands for `make_graphed_callables`: its graphs run the layer again over static tensors, give static
buffers out, and spoil what a real memory pool would reuse.
"""

from __future__ import annotations

import copy
import gc
import logging
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer import cuda_graphs
from support.late_mover import LateMover
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    LAYERS,
    MIXED,
    OVER,
    SMALL,
    TOKENS,
    FakeEngine,
    Reduction,
    Replayed,
    described,
    forward,
    graphs_of,
    inputs,
    make_block,
    one_f_one_b,
    train,
)
from support.random_states import FakeGenerator
from torch import nn

from thdprof.offload.plan import Choice
from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import layer_offload, packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.kinds.layer_capture import LayerPass
from thdprof.runtime.megatron.layer_offload import SavedTensors
from thdprof.runtime.megatron.refusals import SettingsError, refuse_layer_graphs
from thdprof.runtime.offload import EagerPass, HostBuffers, PassOffload
from thdprof.runtime.options import Surroundings

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")


@pytest.mark.parametrize("resets_flags", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_numbers_are_those_of_an_eager_run(resets_flags, overlap):
    plain, graphed = make_block(), make_block()
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    run = graphs_of(graphed)
    compared, found = 0, []
    for block in (plain, graphed):
        reduction, seen = Reduction(block, overlap=overlap), []
        for _ in range(2):
            reduction.zero(resets_flags)
            seen += train(block, batches, one_f_one_b(len(batches)))
            seen += [p.main_grad.clone() for p in block.parameters()]
            assert all(p.grad is None for p in block.parameters())
        found.append((seen, reduction.ready))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
        compared += bool(a.count_nonzero())
    assert compared > 60
    assert found[0][1] == found[1][1]  # every parameter is ready as often
    assert (found[1][1]["layers.0.self_attention.core_attention.scale"] == 16) is overlap
    assert found[1][1]["layers.0.self_attention.core_attention.unused"] == 0
    assert run.stats().replays == {BUCKETS[0]: 6, BUCKETS[1]: 6}
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 4}
    for p in graphed.parameters():
        p.grad_added_to_main_grad = False
    forward(graphed, batches[0][0], SMALL).sum().backward()
    marked = {name for name, p in graphed.named_parameters() if p.grad_added_to_main_grad}
    assert marked == {f"layers.{i}.self_attention.core_attention.scale" for i in range(LAYERS)}


@pytest.mark.parametrize("takes_grad", [False, True])
def test_frozen_parameters_are_left_alone(takes_grad):
    """As with adapters: behind a frozen embedding the first layer's hidden states take no gradient."""
    plain, graphed = make_block(), make_block()
    batches = [
        (x.detach().requires_grad_(takes_grad), b) for x, b in zip(inputs(4), [SMALL, LARGE, OVER, SMALL], strict=True)
    ]
    for block in (plain, graphed):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_("linear_qkv" in name)
    run = graphs_of(graphed)
    for block in (plain, graphed):
        for x, bounds in batches:
            forward(block, x, bounds).square().sum().backward()
    checked = 0
    for (name, p), q in zip(plain.named_parameters(), graphed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == ("linear_qkv" not in name), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name
            checked += 1
    assert checked >= LAYERS
    assert run.stats().replays.total() == 3


def test_captures_keep_what_layers_would_recompute():
    block = make_block()
    block.config.recompute_granularity = "selective"
    attention, seen = block.layers[0].self_attention.core_attention, []
    attention.register_forward_pre_hook(lambda *_: seen.append(cuda_graphs.is_graph_warmup()))
    graphs_of(block)
    train(block, list(zip(inputs(3), [SMALL, OVER, LARGE], strict=True)), one_f_one_b(3))
    assert seen.count(True) >= 2  # captures of two buckets
    assert False in seen  # a micro-batch that falls back
    assert not cuda_graphs.is_graph_warmup()


def test_gradients_without_main_grad_are_the_callers_to_keep():
    plain, graphed = make_block(), make_block()
    graphs_of(graphed)
    batches = list(zip(inputs(4), [SMALL, LARGE, OVER, SMALL], strict=True))
    for block in (plain, graphed):
        train(block, batches, one_f_one_b(4))
    checked = 0
    for p, q in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad)
            checked += 1
    assert checked > 30


def test_parts_of_a_layer_are_where_the_plan_looks_for_them():
    block = make_block()
    decoder = Decoder(block)
    found = {}
    for part in (
        "attn_norm",
        "qkv_linear",
        "core_attn",
        "attn_proj",
        "mlp_norm",
        "mlp_fc1",
        "mlp_act",
        "mlp_fc2",
        "all",
    ):
        offload = PassOffload(decoder, Choice(modules=(part,), min_bytes=64), LateMover(), HostBuffers())
        with offload.forward():
            y = forward(block, inputs(1)[0].requires_grad_(), SMALL)
        found[part] = {n for n, place in enumerate(offload.plan.places) if place is not None}
        with offload.backward():
            y.sum().backward()
    assert all(found.values())
    rest = found.pop("all") - set.union(*found.values())
    elsewhere = [offload.plan.storages[n].modules for n in sorted(rest)]
    assert all(set(modules) == {"block.final_layernorm"} for modules in elsewhere), elsewhere
    assert not found["mlp_act"] & found["mlp_fc1"]


def test_eager_micro_batches_of_a_decoder_move_what_its_graphs_do():
    block, mover, static = make_block(), LateMover(), inputs(1)[0].requires_grad_()
    offload = PassOffload(Decoder(block), Choice(min_bytes=256), mover, HostBuffers(), [static])
    with offload.forward():
        y = forward(block, static, SMALL)
    with offload.backward():
        y.sum().backward()
    embedding = nn.Linear(HIDDEN, HIDDEN)
    moved, found = sum(place is not None for place in offload.plan.places), []
    for moves in (False, True):
        block.zero_grad()
        x = embedding(inputs(1)[0])
        with EagerPass(offload.plan, HostBuffers(), mover, [x], []).forward() if moves else nullcontext():
            y = forward(block, x, [0, 3, 16])
        y.square().sum().backward()
        found.append([p.grad.clone() for p in block.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert mover.out_copies == mover.back_copies == moved > 20


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_activations_on_the_host_change_no_number(monkeypatch, fraction):
    mover = LateMover()
    monkeypatch.setattr(layer_offload, "Mover", lambda *_: mover)
    plain, graphed, kept = make_block(), make_block(), make_block()
    run = graphs_of(graphed, offload=SavedTensors(Choice(fraction=fraction, min_bytes=64)))
    graphs_of(kept)
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    seen = [train(block, batches, one_f_one_b(len(batches))) for block in (plain, graphed, kept)]
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert all(
        p.grad is None or torch.equal(p.grad, q.grad)
        for p, q in zip(kept.parameters(), graphed.parameters(), strict=True)
    )
    assert sum(p.grad is not None for p in graphed.parameters()) > 30
    assert run.stats().replays == {BUCKETS[0]: 3, BUCKETS[1]: 3}
    assert mover.out_copies == mover.back_copies > 30
    assert not mover.unwaited
    moves = [slot.moves for slot in run._slots]
    for one in moves:
        moved = [plan.offloaded_bytes for plan in one._plans]
        assert moved[0] > 0
        assert (moved[-1] > 0) is (fraction == 1.0)  # the first layers' activations go first
        hosts = [slab.data_ptr() for buffers in one._buffers for slab in buffers.slabs]
        assert len(set(hosts)) == len(hosts) > 0
    assert not {s.data_ptr() for b in moves[0]._buffers for s in b.slabs} & {
        s.data_ptr() for b in moves[1]._buffers for s in b.slabs
    }
    assert run.host_bytes() == sum(b.nbytes() for one in moves for b in one._buffers)
    run.recapture()
    assert run.host_bytes() == 0


def test_captures_share_a_pool_and_static_tensors_within_a_slot():
    block, engine = make_block(), FakeEngine()
    run = graphs_of(block, engine)
    forward(block, inputs(1)[0].requires_grad_(), OVER)  # captures although it does not fit
    assert run.stats().captures == 4
    assert [call.pool for call in engine.calls] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    metadata = [[m._constants["packed_seq_params"].cu_seqlens_q for m in call.modules] for call in engine.calls]
    assert [len(m[0]) - 1 for m in metadata] == [6, 3, 6, 3]  # the largest first
    pointers = [{cu.data_ptr() for cu in m} for m in metadata]
    assert pointers[0] == pointers[1] != pointers[2] == pointers[3]
    assert all(len(p) == 1 for p in pointers)  # all layers read the same
    hidden = [[args[0].data_ptr() for args in call.sample_args] for call in engine.calls]
    assert hidden[0] == hidden[1]
    assert hidden[2] == hidden[3]
    assert len({*hidden[0], *hidden[2]}) == 2 * LAYERS
    for call in engine.calls:
        assert call.settings == {
            "allow_unused_input": True,
            "enabled": False,
            "_order": [1, -1],
            "_num_layers_per_chunk": [LAYERS],
            "_reuse_graph_input_output_buffers": True,
        }
        for layer, args in zip(block.layers, call.sample_args, strict=True):
            own = {p.data_ptr() for name, p in layer.named_parameters() if not name.endswith("unused")}
            assert {a.data_ptr() for a in args[1:]} == own
            assert not {id(a) for a in args} & {id(p) for p in layer.parameters()}  # aliases


def test_first_use_captures_what_is_used():
    block, engine = make_block(), FakeEngine()
    run = graphs_of(block, engine, capture="first_use")
    x = inputs(1)[0].requires_grad_()
    forward(block, x, OVER)
    assert not engine.calls
    forward(block, x, SMALL).sum().backward()
    forward(block, x, SMALL).sum().backward()
    assert len(engine.calls) == run.stats().captures == 1


def test_a_capture_changes_no_number():
    block = make_block()
    Reduction(block)
    for i, p in enumerate(block.parameters()):
        p.main_grad.fill_(i + 1.0)
    before = [p.main_grad.clone() for p in block.parameters()]
    run = graphs_of(block)
    call = run._describe(*described(block, SMALL))
    calls = [layer.self_attention.core_attention.calls.clone() for layer in block.layers]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    run._open(call)
    assert run.stats().captures == 4
    assert torch.equal(torch.get_rng_state(), state)
    for p, saved in zip(block.parameters(), before, strict=True):
        assert torch.equal(p.main_grad, saved)
        assert p.grad is None
        assert not p.grad_added_to_main_grad
    assert [layer.self_attention.core_attention.calls for layer in block.layers] == calls
    assert not any("forward" in vars(layer) for layer in block.layers)


def test_a_slot_is_held_until_the_whole_backward_is_over():
    block = make_block()
    run = graphs_of(block)
    x = inputs(1)[0].requires_grad_()
    first = forward(block, x, SMALL)
    second = forward(block, x, LARGE)
    assert run._busy_slots() == [True, True]
    third = forward(block, x, SMALL)
    assert run.stats().fallbacks == {FallbackReason.no_free_slot: 1}
    third.sum().backward()
    assert run._busy_slots() == [True, True]
    first.sum().backward()
    assert run._busy_slots() == [False, True]
    del second
    gc.collect()
    assert run._busy_slots() == [False, False]
    fourth = forward(block, x, LARGE)
    (grad,) = torch.autograd.grad(fourth.sum(), block.layers[-1].mlp.linear_fc2.weight)  # the last layer's alone
    assert grad.isfinite().all()
    del fourth
    gc.collect()
    assert run._busy_slots() == [False, False]
    assert run.stats().replays == {BUCKETS[0]: 1, BUCKETS[1]: 2}


def test_a_slot_is_given_back_where_the_input_takes_no_gradient(monkeypatch):
    from megatron.core.transformer import transformer_block

    monkeypatch.setattr(transformer_block, "make_viewless_tensor", lambda inp, **_: inp)  # as a HybridStack has it
    block = make_block()
    run = graphs_of(block)
    y = forward(block, inputs(1)[0], SMALL)
    y.sum().backward()
    assert y.grad_fn is not None  # still held
    assert run._busy_slots() == [False, False]
    assert run.stats().replays == {BUCKETS[0]: 1}


def test_a_second_backward_is_refused():
    block = make_block()
    graphs_of(block)
    y = forward(block, inputs(1)[0].requires_grad_(), SMALL)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a replayed micro-batch was backpropagated a second time"):
        y.sum().backward()


def test_a_failed_capture_runs_eagerly(caplog):
    block, engine = make_block(), FakeEngine()
    engine.fails = True
    run = graphs_of(block, engine)
    with caplog.at_level(logging.WARNING):
        y = forward(block, inputs(1)[0].requires_grad_(), SMALL)
    assert torch.equal(y, forward(make_block(), inputs(1)[0], SMALL))
    assert run.stats().fallbacks == {FallbackReason.capture_failed: 1}
    assert (run.stats().captures, len(engine.calls)) == (0, 2)  # each bucket is tried once
    assert "run eagerly: RuntimeError: operation not permitted when stream is capturing" in caplog.text
    assert gc.isenabled()
    assert LayerPass.__call__ is nn.Module.__call__


def test_closing_frees_the_graphs_and_leaves_the_layers_as_they_were():
    block, engine = make_block(), FakeEngine()
    x = inputs(1)[0].requires_grad_()
    forward(block, x, SMALL)  # layers keep what their first pass sets
    attributes = [dict(vars(layer)) for layer in block.layers]
    run = graphs_of(block, engine)
    y = forward(block, x, SMALL)
    graphs = {graph for slot in run._slots for replays in slot.replays.values() for graph in replays.graphs}
    assert len(graphs) == 4 * LAYERS
    run.close()
    assert all(graph.is_reset for graph in graphs)
    with pytest.raises(RuntimeError, match="the graphs were closed or dropped before the backward"):
        y.sum().backward()
    assert [dict(vars(layer)) for layer in block.layers] == attributes
    forward(block, x, SMALL).sum().backward()
    assert run.stats().fallbacks == {FallbackReason.disabled_by_user: 1}
    run.close()


def test_a_forward_that_was_replaced_before_is_put_back_and_captured():
    block, engine = make_block(), FakeEngine()
    own = block.layers[1].forward

    def doubled(hidden_states, **kwargs):
        found, context = own(hidden_states=hidden_states, **kwargs)
        return 2 * found, context

    block.layers[1].forward = doubled
    x = inputs(1)[0].requires_grad_()
    eager = forward(block, x, SMALL)
    graphs_of(block, engine)
    assert torch.equal(forward(block, x, SMALL), eager)
    assert len(engine.replays) == LAYERS
    assert block.layers[1].forward is doubled


class Between(nn.Module):
    """A layer that is not captured; keeps the boundaries that it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.seen = []

    def forward(self, hidden_states, packed_seq_params, **_):
        self.seen.append(packed_seq_params.cu_seqlens_q.tolist())
        return hidden_states * self.weight, None


@pytest.mark.parametrize("where", [0, 1, 2])
def test_other_layers_run_eagerly_between(where):
    plain, graphed, engine = make_block(), make_block(), FakeEngine()
    for block in (plain, graphed):
        block.layers[where] = Between()
    run = graphs_of(graphed, engine)
    batches = list(zip(inputs(4), [SMALL, LARGE, LARGE, SMALL], strict=True))
    found = [train(block, batches, one_f_one_b(4)) for block in (plain, graphed)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(plain.layers[where].weight.grad, graphed.layers[where].weight.grad)
    assert len(engine.replays) == 4 * (LAYERS - 1)
    assert run.stats().replays == {BUCKETS[0]: 2, BUCKETS[1]: 2}
    assert graphed.layers[where].seen[-4:] == [SMALL, LARGE, LARGE, SMALL]  # unpadded, as in an eager run


def delta_net(attention):
    """`attention` as one that reads the boundaries on the host, which are those of an eager run then."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    class Net(GatedDeltaNet):
        def __init__(self):
            nn.Module.__init__(self)
            self.inner, self.seen = attention, []

        def forward(self, hidden_states, attention_mask, packed_seq_params, **given):
            self.seen.append(packed_seq_params.cu_seqlens_q.tolist())
            return self.inner(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **given)

    return Net()


def test_a_layer_with_a_gated_delta_net_runs_eagerly_between():
    plain, graphed, engine = make_block(), make_block(), FakeEngine()
    for block in (plain, graphed):
        block.layers[1].self_attention = delta_net(block.layers[1].self_attention)
    run = graphs_of(graphed, engine)
    batches = list(zip(inputs(4), [SMALL, LARGE, LARGE, SMALL], strict=True))
    found = [train(block, batches, one_f_one_b(4)) for block in (plain, graphed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)
    assert len(engine.replays) == 4 * (LAYERS - 1)
    assert run.stats().replays.total() == 4
    assert graphed.layers[1].self_attention.seen[-4:] == [SMALL, LARGE, LARGE, SMALL]


class FusedOperations(nn.Module):
    """Stands for an MLP of Transformer Engine's operations, which keep the parameters of their first pass."""

    def __init__(self, mlp):
        super().__init__()
        self.weight = nn.Parameter(torch.full((HIDDEN,), 0.5))
        self.mlp, self._fused_impl = mlp, None

    def forward(self, hidden_states, **_):
        if self._fused_impl is None:
            self._fused_impl = (self.weight,)
        output, bias = self.mlp(hidden_states)
        return output * self._fused_impl[0], bias


def test_fused_operations_of_an_eager_layer_train_the_models_own_parameters():
    plain, graphed = make_block(), make_block()
    for block in (plain, graphed):
        block.layers[1].mlp = FusedOperations(block.layers[1].mlp)
    run = graphs_of(graphed)
    batches = list(zip(inputs(4), [SMALL, LARGE, LARGE, SMALL], strict=True))  # the first pass comes before a capture
    found = [train(block, batches, one_f_one_b(4)) for block in (plain, graphed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert run.stats().replays.total() == 4
    assert graphed.layers[1].mlp._fused_impl[0] is graphed.layers[1].mlp.weight
    assert torch.equal(graphed.layers[1].mlp.weight.grad, plain.layers[1].mlp.weight.grad)


@pytest.mark.parametrize(("method", "layers", "runs"), [("uniform", 1, 2), ("uniform", 3, 2), ("block", 1, 1)])
@pytest.mark.usefixtures("recomputing")
def test_an_eager_layer_between_graphs_is_recomputed_where_whole_layers_are(method, layers, runs):
    plain, graphed, engine = make_block(), make_block(), FakeEngine()
    for block in (plain, graphed):
        block.layers[1].self_attention = delta_net(block.layers[1].self_attention)
        config = block.config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", method, layers
    run = graphs_of(graphed, engine)
    batches = list(zip(inputs(5), [SMALL, LARGE, OVER, LARGE, SMALL], strict=True))
    found = [train(block, batches, one_f_one_b(5)) for block in (plain, graphed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert a.grad is b.grad is None or torch.equal(a.grad, b.grad)
    assert run.stats().replays.total() == 4
    eager, replayed = (block.layers[1].self_attention.seen for block in (plain, graphed))
    assert len(eager) == 5 * runs
    assert replayed[-len(eager) :] == eager  # with the same boundaries, forward and again in the backward
    assert graphed.config.recompute_granularity == "full"


def test_parameters_are_gathered_layer_by_layer():
    block, engine = make_block(), FakeEngine()
    graphs_of(block, engine)
    reduction = Reduction(block)
    x = inputs(1)[0].requires_grad_()
    forward(block, x, SMALL)  # opens
    reduction.gathered.clear()
    counts = []
    real = Replayed.forward

    def watched(ctx, graph, *given):
        counts.append({int(name.split(".")[1]) for name in reduction.gathered if name.startswith("layers.")})
        missing = {f"layers.{len(counts) - 1}.{name}" for name, _ in block.layers[0].named_parameters()}
        assert missing <= set(reduction.gathered)
        return real(ctx, graph, *given)

    Replayed.forward = staticmethod(watched)
    try:
        forward(block, x, SMALL)
    finally:
        Replayed.forward = staticmethod(real)
    assert counts == [{0}, {0, 1}, {0, 1, 2}]


def test_memory_is_that_of_pools_and_static_inputs(monkeypatch):
    block = make_block()
    run = graphs_of(block, num_slots=2)
    Reduction(block)
    assert run.pool_bytes() == 0
    x, mask = inputs(1)[0].requires_grad_(), torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    params = packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")
    block(hidden_states=x, attention_mask=mask, packed_seq_params=params).sum().backward()
    segments = [
        {"segment_pool_id": slot.pool, "device": None, "total_size": size}
        for slot, size in zip(run._slots, (1 << 30, 1 << 20), strict=True)
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert run.pool_bytes() == (1 << 30) + (1 << 20) + 2 * (LAYERS * x.nbytes + mask.nbytes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"extract_layer_indices": {0}}, "extract_layer_indices"),
        ({"attention_bias": torch.zeros(1)}, "attention_bias"),
        ({"context": torch.zeros(1), "sequence_len_offset": torch.zeros(1)}, "context, sequence_len_offset"),
    ],
)
def test_an_argument_that_is_not_known_makes_its_micro_batch_eager(caplog, given, named):
    block, plain = make_block(), make_block()
    run = graphs_of(block)
    Reduction(block)
    x = inputs(1)[0].requires_grad_()

    def called(decoder, **more):
        params = packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")
        y = decoder(hidden_states=x, attention_mask=None, packed_seq_params=params, **more)
        return y[0] if isinstance(y, tuple) else y

    for _ in range(2):
        assert torch.equal(called(block, **given), called(plain, **given))
    assert run.stats().fallbacks == {FallbackReason.argument_not_known: 2}
    assert run.stats().captures == 0
    assert [f"got {named}, which no graph takes" in line for line in caplog.messages].count(True) == 1
    at_defaults = {"extract_layer_indices": set(), "context": None, "dynamic_inference_decode_only": None}
    called(block, **at_defaults).sum().backward()
    called(block).sum().backward()
    assert run.stats().replays.total() == 2


def test_random_states_that_a_checkpoint_replaced_are_refused_until_graphs_are_captured_anew():
    block, tracker = make_block(), {"model-parallel": FakeGenerator(), "experts": FakeGenerator()}
    run = graphs_of(block, generators=lambda: tuple(tracker.values()))
    Reduction(block)
    x = inputs(1)[0].requires_grad_()
    forward(block, x, SMALL).sum().backward()
    tracker["experts"] = tracker["experts"].graphsafe_get_state()  # as every use of the tracker leaves it
    forward(block, x, SMALL).sum().backward()
    tracker |= {name: state.clone_state() for name, state in tracker.items()}
    with pytest.raises(RuntimeError, match=r"random state 1 of 3 was replaced .* call recapture\(\)"):
        forward(block, x, SMALL)
    run.recapture()
    forward(block, x, SMALL).sum().backward()
    assert run.stats().replays.total() == 3


def test_moved_and_replaced_tensors_are_refused():
    block = make_block()
    run = graphs_of(block)
    Reduction(block)
    x = inputs(1)[0].requires_grad_()
    y = forward(block, x, SMALL)
    scale = block.layers[0].self_attention.core_attention.scale
    scale.main_grad = scale.main_grad.clone()
    with pytest.raises(RuntimeError, match=r"main_grad of a parameter of shape \(8,\) was replaced"):
        y.sum().backward()
    weight = block.layers[0].mlp.linear_fc1.weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match=r"of shape \(32, 8\) moved in memory"):
        forward(block, x, SMALL)
    run.recapture()
    forward(block, x, SMALL).sum().backward()
    assert run.stats().captures == 8


def test_megatrons_own_graphs_of_the_layers_are_refused():
    block = make_block()
    graphs_of(block)
    x = inputs(1)[0].requires_grad_()
    forward(block, x, SMALL)
    block.layers[1].cuda_graphs.append(lambda *_: None)
    with pytest.raises(RuntimeError, match="TECudaGraphHelper has captured these layers too"):
        forward(block, x, SMALL)


def test_what_cannot_be_captured_is_refused_at_once():
    with pytest.raises(ValueError, match="num_slots 0: at least 1 slot is needed"):
        graphs_of(make_block(), num_slots=0)
    block = make_block(num_layers=1)
    block.layers[0] = Between()
    with pytest.raises(SettingsError, match="this chunk of 1 layers has none; set it to chunk"):
        graphs_of(block)
    block = make_block()
    block.layers[0].mlp.linear_fc1.weight = block.layers[1].mlp.linear_fc1.weight
    with pytest.raises(SettingsError, match="two layers share a parameter"):
        graphs_of(block)


def test_settings():
    from megatron.core.transformer.enums import CudaGraphModule

    plan = SimpleNamespace(graphs=SimpleNamespace(impl="transformer_engine", modules=[]))
    good = SimpleNamespace(
        cuda_graph_impl="transformer_engine", cuda_graph_modules=[], cuda_graph_retain_backward_graph=False
    )
    assert list(refuse_layer_graphs(good, plan)) == []
    assert list(refuse_layer_graphs(make_block().config, plan)) == []
    bad = copy.copy(good)
    bad.cuda_graph_modules, bad.cuda_graph_retain_backward_graph = [CudaGraphModule.attn], True
    assert list(refuse_layer_graphs(bad, plan)) == [
        "cuda_graph_modules is ['attn']: the plan captures whole layers; set it to []",
        "cuda_graph_retain_backward_graph is True: a slot's memory is given back after its backward; set it to False",
    ]
    plan.graphs.modules = ["attn", "moe_router"]
    assert list(refuse_layer_graphs(good, plan)) == [
        "cuda_graph_modules is []: the plan's graphs.modules is ['attn', 'moe_router']; set it to ['attn', "
        "'moe_router']"
    ]
    built_for_none = copy.copy(good)
    built_for_none.cuda_graph_impl = "none"
    assert list(refuse_layer_graphs(built_for_none, plan)) == []
    good.cuda_graph_modules = [CudaGraphModule.moe_router, CudaGraphModule.attn]
    assert list(refuse_layer_graphs(good, plan)) == []
    plan.graphs.impl = "chunk"
    assert list(refuse_layer_graphs(good, plan)) == [
        "graphs.modules is ['attn', 'moe_router']: a part of a layer is captured by graphs.impl transformer_engine "
        "alone; set graphs.impl to it, or graphs.modules to []"
    ]
    plan.graphs.modules = []
    assert list(refuse_layer_graphs(bad, plan)) == []


def test_the_static_metadata_hold_the_micro_batch():
    block, engine = make_block(), FakeEngine()
    run = graphs_of(block, engine, num_slots=1)
    forward(block, inputs(1)[0].requires_grad_(), LARGE)
    (slot,) = run._slots
    assert np.array_equal(slot.metadata.packed(BUCKETS[1]).cu_seqlens.numpy(), [*LARGE, TOKENS])


def test_quantized_weights_are_kept_around_captures_and_ready_before_replays():
    told, held = [], []

    @contextmanager
    def quantizing():
        held.append("capture")
        yield
        held.pop()
        told.append("captured")

    @contextmanager
    def inside_graph(layer):
        if held:  # a replay of the fake runs the layer again
            told.append([*block.layers].index(layer))
        yield

    around = Surroundings(
        quantizing=quantizing,
        inside_graph=inside_graph,
        before_forward=lambda: told.append("replay"),
        changed=lambda: "a weight moved",
        forget=lambda: told.append("forgotten"),
    )
    block = make_block()
    run = graphs_of(block, surroundings=around)
    forward(block, inputs(1)[0].requires_grad_(), SMALL).sum().backward()
    layers = [*range(LAYERS)] * 2  # a warm-up and the capture
    assert told == [*layers, "captured"] * len(BUCKETS) * 2 + ["replay"]
    told.clear()
    forward(block, inputs(1)[0].requires_grad_(), OVER).sum().backward()
    assert told == []
    forward(block, inputs(1)[0].requires_grad_(), LARGE).sum().backward()
    assert told == ["replay"]
    assert run._changed() == "a weight moved"
    run.recapture()
    assert told == ["replay", "forgotten"]
