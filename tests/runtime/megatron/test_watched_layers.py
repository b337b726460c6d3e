"""Verified micro-batches of graphs of single layers, and of those up to a router: silent, and not blind; on a CPU."""

from __future__ import annotations

import functools
import gc
import logging
import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from support.layer_graphs import (
    LAYERS,
    MIXED,
    MODULES,
    SMALL,
    FakeGraph,
    Reduction,
    Replayed,
    forward,
    graphs_of,
    inputs,
    make_experts,
    one_f_one_b,
    train,
)

from thdprof.dispatch import FallbackReason
from thdprof.runtime.graphs.watch import twin
from thdprof.runtime.graphs.watch.findings import Evidence
from thdprof.runtime.graphs.watch.twin import Twin
from thdprof.runtime.graphs.watch.watch import Watch
from thdprof.runtime.megatron.decoder_surroundings import expert_metrics
from thdprof.runtime.megatron.kinds import layer_graphs
from thdprof.runtime.megatron.kinds.expert_layers import find_splits
from thdprof.runtime.megatron.kinds.layer_graphs import WatchedLayer
from thdprof.runtime.options import Surroundings

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu", "_engine_can_be_imported")

BATCHES = list(zip(inputs(len(MIXED)), MIXED, strict=True))
REPLAYED = 6
PREPROCESSED = [*MODULES, "moe_preprocess"]


def graphed(*, modules=MODULES, every=1, exact=True, engine=None, around=None, **settings):
    """A block with experts and its graphs, of whose micro-batches one in `every` is verified."""
    torch.manual_seed(4)
    block = make_experts(graphs=False, **settings)
    surroundings = Surroundings(extra_state=expert_metrics, deterministic=lambda: exact, **(around or {}))
    return block, graphs_of(
        block, engine, modules=modules, verify_every=every, surroundings=surroundings, name="the chunk"
    )


def numbers(block, fused=True, order=None):
    """All that a step of training gives or changes, and how often each parameter's hooks have run."""
    for metrics in expert_metrics():
        metrics.zero_()
    reduction = Reduction(block) if fused else None
    if reduction is not None:
        reduction.zero(resets_flags=True)
    torch.manual_seed(5)
    seen = train(block, BATCHES, order or one_f_one_b(len(BATCHES)))
    seen += [p.main_grad.clone() if fused else p.grad for p in block.parameters() if fused or p.grad is not None]
    seen += [buffer.clone() for buffer in block.buffers()]
    seen += [metrics.clone() for metrics in expert_metrics()]
    return [*seen, torch.get_rng_state()], reduction.ready if reduction else None


KINDS = {
    "alltoall": {"dispatcher": "alltoall"},
    "expert bias": {"dispatcher": "alltoall", "bias": True, "balancing": "seq_aux_loss"},
    "shared experts": {"dispatcher": "alltoall", "shared": 4},
    "up to the exchange": {"dispatcher": "allgather", "modules": PREPROCESSED},
    "whole layers": {
        "dispatcher": "alltoall",
        "modules": [],
        "moe_expert_capacity_factor": 2.0,
        "moe_pad_expert_input_to_capacity": True,
    },
}


@functools.cache
def unwatched_numbers(kind, fused):
    """The numbers of a run of whose micro-batches none is verified."""
    block, run = graphed(every=0, **KINDS[kind])
    found = numbers(block, fused)
    assert run.stats().replays.total() == REPLAYED
    assert not run.stats().verified
    return found


@pytest.mark.parametrize("repeats", ["", "same", "noisy"])
@pytest.mark.parametrize("fused", [True, False], ids=["main_grad", "grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_changes_no_number_of_the_run_and_is_silent(kind, fused, repeats, monkeypatch):
    """Also where every tensor looks wrong at first, and its layer runs again by graphs and eagerly."""
    expected, expected_ready = unwatched_numbers(kind, fused)
    block, run = graphed(**KINDS[kind])
    if repeats:
        monkeypatch.setattr(Twin, "examine", all_suspected(seen := []))
    if repeats == "noisy":
        monkeypatch.setattr(WatchedLayer, "backward_again", noisy(WatchedLayer.backward_again))
    found, ready = numbers(block, fused)
    assert run.stats().replays.total() == run.stats().verified.total() == REPLAYED
    assert run.stats().suspicions.total() == REPLAYED * bool(repeats)
    assert not run.stats().mismatches
    assert len(expected) > 30
    for without, watched in zip(expected, found, strict=True):
        assert torch.equal(without, watched)
    assert ready == expected_ready
    if repeats == "same":
        assert len(seen) > 20 * REPLAYED
        assert not any(run.unequal for one in seen for run in (one.replay, *one.eager, *one.replayed))
        assert all(one.eager and one.replayed for one in seen)


def all_suspected(seen):
    """`Twin.examine`, for which all tensors look wrong; what is found of them is added to `seen`."""

    def examine(twin, replay, eager):
        names = list(replay.tensors())
        distances = twin.measure(names, replay, eager)
        suspects = [Evidence(name=n, elements=1, replay=d) for n, d in zip(names, distances, strict=True)]
        seen.extend(suspects)
        return names, suspects

    return examine


def noisy(own):
    """Replays a layer's backward again, which gives other gradients and spoils what the graph gave out before."""

    def backward_again(layer, output_grads):
        found = own(layer, output_grads)
        for buffer in layer._gradients.buffers:
            buffer.mul_(1.001)
        for static in layer._graph.static_grads:
            static.fill_(torch.nan)
        return found

    return backward_again


def compared(monkeypatch):
    """The names of the compared tensors of each verified micro-batch from here on."""
    names, note = [], Watch.note

    def noted(watch, finding):
        names.append([*finding.compared])
        note(watch, finding)

    monkeypatch.setattr(Watch, "note", noted)
    return names


def test_every_graph_is_compared_with_all_that_it_gives_out(monkeypatch):
    names = compared(monkeypatch)
    block, _ = graphed(dispatcher="alltoall")
    numbers(block)
    assert len(names) == REPLAYED
    for of_microbatch in names:
        assert len(set(of_microbatch)) == len(of_microbatch)
        for number, outputs in enumerate([4, 1, 4]):  # hidden states, probabilities, map and residual; hidden states
            of_layer = [n.removeprefix(f"layer {number}: ") for n in of_microbatch if n.startswith(f"layer {number}")]
            assert sum(name.startswith("output ") for name in of_layer) == outputs
            assert {"gradient of input 0", "gradient of self_attention.linear_qkv.weight"} < {*of_layer}
            assert ("gradient of mlp.router.weight" in of_layer) == (outputs == 4)
            assert not any("mlp.experts" in name for name in of_layer)


def test_every_parameter_has_its_turn_in_its_own_layer(monkeypatch):
    names = compared(monkeypatch)
    monkeypatch.setattr(twin, "WATCHED_BYTES", 1)
    block, _ = graphed(dispatcher="alltoall")
    Reduction(block).zero(resets_flags=True)
    for _ in range(9):
        train(block, BATCHES[:1], one_f_one_b(1))
    of_parameters = [[n for n in found if "gradient of" in n and "input 0" not in n] for found in names]
    assert {len(found) for found in of_parameters} == {LAYERS}
    for number in range(LAYERS):
        turns = [found[LAYERS - 1 - number] for found in of_parameters]
        assert len(set(turns)) == len(turns) == 9


class FusedPermutation:
    """Transformer Engine's fused permutation as far as its table of rows goes: parts of it are never written."""

    def __init__(self):
        self.tables = 0

    def permute(self, tokens, routing_map, *, fused, **options):
        assert fused
        permuted, probs, sorted_tokens, *rest = moe_utils.permute(tokens, routing_map, fused=False, **options)
        num_tokens, num_experts = routing_map.shape
        self.tables += 1
        table = torch.full((num_tokens, 2 * num_experts + 1), -self.tables, dtype=torch.int32)  # other memory each time
        table[:, -1] = routing_map.sum(dim=1)
        counts = torch.zeros(num_tokens, dtype=torch.int64)
        for row, token in enumerate(sorted_tokens.tolist()):
            table[token, counts[token]] = row
            counts[token] += 1
        for token, experts in enumerate(routing_map):
            chosen = experts.nonzero()[:, 0]
            table[token, num_experts : num_experts + len(chosen)] = chosen
        return permuted, probs, table, *rest

    def unpermute(self, tokens, table, *, fused, **options):
        assert fused
        rows = [table[token, : table[token, -1]] for token in range(len(table))]
        sorted_tokens = torch.empty(len(tokens), dtype=torch.int64)
        for token, of_token in enumerate(rows):
            sorted_tokens[of_token.long()] = token
        return moe_utils.unpermute(tokens, sorted_tokens, fused=False, **options)

    def sort(self, *given, fused, **options):
        return moe_utils.sort_chunks_by_idxs(*given, fused=False, **options)


@pytest.mark.parametrize("settings", [{}, {"bias": True, "balancing": "seq_aux_loss"}], ids=["", "expert bias"])
@pytest.mark.parametrize("wrong", [False, True], ids=["sound", "a row of it is wrong"])
def test_a_fused_permutations_table_is_compared_as_far_as_it_is_written(wrong, settings, monkeypatch, caplog):
    permutation = FusedPermutation()
    monkeypatch.setattr(token_dispatcher, "permute", permutation.permute)
    monkeypatch.setattr(token_dispatcher, "unpermute", permutation.unpermute)
    monkeypatch.setattr(token_dispatcher, "sort_chunks_by_idxs", permutation.sort)
    block, run = graphed(dispatcher="alltoall", modules=PREPROCESSED, **settings)
    block.config.moe_permute_fusion = True  # as Transformer Engine would be needed for
    place = 2 + bool(settings)

    def replay(graph, own):
        outputs = own()
        if of_layer(graph, 0):
            table = next(o for o in outputs if o.dtype == torch.int32 and o.ndim == 2)
            table[3, : table[3, -1]] = table[3, : table[3, -1]].flip(0)
        return outputs

    if wrong:
        broken(monkeypatch, forward=replay)
    numbers(block)
    assert permutation.tables > 2 * REPLAYED
    buckets = len(run.stats().replays)
    assert run.stats().verified.total() == (buckets if wrong else REPLAYED)
    assert run.stats().mismatches.total() == buckets * wrong
    wrong_outputs = re.findall(r"layer 0: output (\d+): 2 of", caplog.text)
    assert len(wrong_outputs) == buckets * wrong
    assert all(int(number) > place for number in wrong_outputs)


def test_eager_runs_are_no_part_of_training_and_nor_are_repeated_replays(monkeypatch):
    """The surroundings are told so, once for each micro-batch."""
    inside, made = [0], []

    @contextmanager
    def repeated():
        inside[0] += 1
        yield
        inside[0] -= 1

    def repeating():
        made.append(1)
        return repeated

    own = FakeGraph.__call__
    monkeypatch.setattr(FakeGraph, "__call__", lambda graph, *given: runs.append(inside[0]) or own(graph, *given))
    monkeypatch.setattr(Twin, "examine", all_suspected([]))
    block, run = graphed(dispatcher="alltoall", around={"repeating": repeating})
    Reduction(block).zero(resets_flags=True)
    runs, eager = [], []
    monkeypatch.setattr(block.layers[1].mlp, "forward", watched_forward(block.layers[1].mlp, eager, inside))
    train(block, BATCHES[:2], one_f_one_b(2))
    assert run.stats().suspicions.total() == 2
    assert made == [1] * 2
    assert runs == [0] * LAYERS * 2 + [1] * LAYERS * 2
    assert eager.count(1) == 6  # for each micro-batch two eager runs, and a replay, which is one on a CPU
    assert inside == [0]


def watched_forward(module, seen, inside):
    own = module.forward

    def forward(*args, **kwargs):
        seen.append(inside[0])
        return own(*args, **kwargs)

    return forward


# --- faults ----------------------------------------------------------------------------------------------------------


def of_layer(graph, number):
    return graph.mates.index(graph) == number


def broken(monkeypatch, forward=None, backward=None):
    """Let replays run `forward` and `backward` around their own passes, with the graph and what runs them."""
    own = Replayed.forward, Replayed.backward
    if forward:
        monkeypatch.setattr(
            Replayed,
            "forward",
            staticmethod(lambda ctx, graph, *given: forward(graph, lambda: own[0](ctx, graph, *given))),
        )
    if backward:
        monkeypatch.setattr(
            Replayed, "backward", staticmethod(lambda ctx, *grads: backward(ctx.graph, lambda: own[1](ctx, *grads)))
        )


def stale_weights(block, run, monkeypatch):
    """The forward of layer 1 reads a weight as it was before."""
    weight = block.layers[1].mlp.linear_fc2.weight

    def replay(graph, own):
        kept = weight.detach().clone()
        if of_layer(graph, 1):
            weight.data.mul_(0.9)
        try:
            return own()
        finally:
            weight.data.copy_(kept)

    broken(monkeypatch, forward=replay)


def no_boundary(block, run, monkeypatch):
    """One boundary between two documents is missing in the slots' memory."""
    for slot in run._slots:
        own = slot.metadata.stage

        def stage(boundaries, bucket, own=own):
            own(replace(boundaries, valid=np.delete(boundaries.valid, 1)), bucket)

        monkeypatch.setattr(slot.metadata, "stage", stage)


def changed_gradient(place, change, number=2):
    """The gradient at `place` among those that layer `number` gives, of its input and then of its parameters."""

    def fault(block, run, monkeypatch):
        def replay(graph, own):
            grads = own()
            if of_layer(graph, number):
                change(grads[1 + place])
            return grads

        broken(monkeypatch, backward=replay)

    return fault


def fused_gradient(block, run, monkeypatch):
    """What layer 2 adds to a `main_grad` has the wrong sign."""
    parameter = block.layers[2].self_attention.core_attention.scale

    def replay(graph, own):
        before = parameter.main_grad.clone()
        grads = own()
        if of_layer(graph, 2):
            parameter.main_grad.copy_(before - (parameter.main_grad - before))
        return grads

    broken(monkeypatch, backward=replay)


def wrong_probabilities(block, run, monkeypatch):
    """Layer 0 gives its experts other probabilities."""

    def replay(graph, own):
        outputs = own()
        if of_layer(graph, 0):
            outputs[1].mul_(1.2)
        return outputs

    broken(monkeypatch, forward=replay)


FAULTS = {
    "stale weights": (stale_weights, "layer 1: output 0"),
    "no boundary": (no_boundary, "layer 0: output 0"),
    "sign of a gradient": (
        changed_gradient(1, lambda grad: grad.neg_()),
        "layer 2: gradient of input_layernorm.weight",
    ),
    "a gradient x 1.2": (
        changed_gradient(1, lambda grad: grad.mul_(1.2)),
        "layer 2: gradient of input_layernorm.weight",
    ),
    "no input gradient": (changed_gradient(0, lambda grad: grad.zero_()), "layer 2: gradient of input 0"),
    "sign of a fused gradient": (fused_gradient, "layer 2: gradient of self_attention.core_attention.scale"),
    "probabilities": (wrong_probabilities, "layer 0: output 1"),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "default kernels"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_replays_are_found_in_their_layer(name, exact, caplog, monkeypatch):
    fault, told = FAULTS[name]
    block, run = graphed(dispatcher="alltoall", exact=exact)
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:3], one_f_one_b(3))
    assert run.stats().verified.total() == 2
    assert not run.stats().mismatches
    fault(block, run, monkeypatch)
    train(block, BATCHES[:1], one_f_one_b(1))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "micro-batch 3, replayed in slot 0" in line
    assert f"tensors: {told}" in line
    assert run.stats().mismatches.total() == 1
    train(block, BATCHES[:1], one_f_one_b(1))
    assert run.stats().fallbacks[FallbackReason.quarantined] == 1
    run.recapture()
    monkeypatch.undo()


def test_a_fault_of_a_single_replay_is_found_too(caplog, monkeypatch):
    """What overwrote memory once is not there when the layer is replayed again."""
    block, run = graphed(dispatcher="alltoall", exact=False)
    once = [1]

    def replay(graph, own):
        grads = own()
        if of_layer(graph, 0) and once:
            grads[1].mul_(once.pop() - 2)
        return grads

    broken(monkeypatch, backward=replay)
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:3], one_f_one_b(3))
    assert run.stats().mismatches.total() == 1
    assert "layer 0: gradient of input 0" in caplog.text


def test_a_parameter_that_the_graphs_lack_is_compared(caplog, monkeypatch):
    """Its gradient, which eager runs give, counts against zeros."""
    gone = []
    block, run = graphed(dispatcher="alltoall")
    own = layer_graphs.LayerCapture._rehearse

    def rehearse(self, slot, bucket):
        recorded, touched = own(self, slot, bucket)
        gone[:] = [block.layers[1].mlp.linear_fc1.weight]
        return recorded, touched - {id(gone[0])}

    monkeypatch.setattr(layer_graphs.LayerCapture, "_rehearse", rehearse)
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:1], one_f_one_b(1))
    assert gone
    assert "layer 1: gradient of mlp.linear_fc1.weight" in caplog.text
    assert run.stats().mismatches.total() == 1


# --- surroundings ----------------------------------------------------------------------------------------------------


def test_ranks_that_communicate_agree_on_the_micro_batch_and_on_every_layer():
    asked = []

    def agreed(here):
        asked.append(here)
        return here

    block, run = graphed(dispatcher="alltoall", every=1000, around={"communicates": True, "agreed": agreed})
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:2], one_f_one_b(2))
    assert asked == [True] * (2 + 2 * LAYERS)  # two that replay, and every layer of each is clear
    asked.clear()
    train(block, BATCHES[2:4], one_f_one_b(2))
    assert asked == [False]  # number 2 fits no bucket, and it is not the turn of number 3
    assert run.stats().verified.total() == 2


@pytest.mark.parametrize("step", ["__init__", "forward_ended", "backward_begins", "_run_eagerly"])
@pytest.mark.parametrize("communicates", [True, False])
def test_an_eager_run_that_fails_ends_the_watch(communicates, step, caplog, monkeypatch):
    expected, _ = unwatched_numbers("alltoall", True)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Twin, step, fails)
    around = {"communicates": communicates, "agreed": lambda here: here}
    block, run = graphed(dispatcher="alltoall", around=around)
    if communicates:
        with pytest.raises(RuntimeError, match="failed on this rank"):
            numbers(block)
        return
    found, _ = numbers(block)
    assert not run.stats().verified
    assert caplog.text.count("no more micro-batches are verified (graphs.verify)") == 1
    for without, watched in zip(expected, found, strict=True):
        assert torch.equal(without, watched)


def test_a_verification_leaves_the_layers_attributes_as_they_were():
    """A forward may have begun whose experts still read what their token dispatcher keeps."""
    block, run = graphed(dispatcher="allgather", modules=PREPROCESSED)
    Reduction(block).zero(resets_flags=True)
    x = inputs(1)[0].requires_grad_()
    output = forward(block, x, SMALL)
    layer = block.layers[2]
    owners = [layer, layer.mlp, layer.mlp.token_dispatcher]
    layer.mlp_norm_manager = layer.mlp.token_dispatcher.local_map = marker = object()
    before = [dict(vars(owner)) for owner in owners]
    output.sum().backward()
    assert run.stats().verified.total() == 1
    for owner, kept in zip(owners, before, strict=True):
        assert vars(owner).keys() == kept.keys()
        assert all(vars(owner)[name] is value for name, value in kept.items())
    assert layer.mlp_norm_manager is marker
    layer.mlp_norm_manager = None


def test_a_verified_micro_batch_whose_outputs_are_dropped_gives_its_slot_back():
    block, run = graphed(dispatcher="alltoall")
    Reduction(block).zero(resets_flags=True)
    gc.disable()
    try:
        for _ in range(5):
            forward(block, inputs(1)[0].requires_grad_(), SMALL)
    finally:
        gc.enable()
    assert run.stats().replays.total() == 5
    assert not run.stats().fallbacks


def test_evaluation_is_not_verified():
    block, run = graphed(dispatcher="alltoall")
    with torch.no_grad():
        forward(block, inputs(1)[0], SMALL)
    assert not run.stats().verified


def test_where_there_is_no_room_the_micro_batch_is_not_verified(caplog, monkeypatch):
    given = {}

    def missing(device, *, slot_bytes, others):
        given.update(slot_bytes=slot_bytes, others=others)
        return 2**30

    monkeypatch.setattr(layer_graphs, "missing_bytes", missing)
    monkeypatch.setattr(layer_graphs, "pool_bytes", lambda *_: 3000)
    block, run = graphed(dispatcher="alltoall")
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:2], one_f_one_b(2))
    assert given == {"slot_bytes": 1000, "others": 5 * 128 * 2**20 + 5 * LAYERS * BATCHES[0][0].nbytes}
    assert not run.stats().verified
    assert "there is no room to run it eagerly beside graphs, 1.0 GiB are missing" in caplog.text


def test_the_twin_of_a_layer_runs_what_is_captured_alone(monkeypatch):
    block, _ = graphed(dispatcher="alltoall")
    assert [len(split.parts()) > 1 for split in find_splits(block.layers, MODULES)] == [True, False, True]
    calls = []
    own = block.layers[2].mlp.experts.forward
    monkeypatch.setattr(block.layers[2].mlp.experts, "forward", lambda *given: calls.append(1) or own(*given))
    Reduction(block).zero(resets_flags=True)
    train(block, BATCHES[:1], one_f_one_b(1))
    assert calls == [1]
