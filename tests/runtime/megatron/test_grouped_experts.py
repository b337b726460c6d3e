"""Dropless experts as grouped products beside megatron-core's own, on a CPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support import cpu_graphs
from support.gpt_of_experts import BOUNDS, model_of, train_two_at_a_time
from support.grouped_layers import expert_layer, lay, with_main_grads
from support.layer_graphs import (
    BUCKETS,
    MIXED,
    FakeEngine,
    FakeGraph,
    FusedScale,
    Reduction,
    graphs_of,
    inputs,
    make_experts,
    one_f_one_b,
    train,
)
from support.layer_graphs import TOKENS as TOKENS_OF_LAYERS
from support.plans import plan_of_shares

from thdprof.runtime.graphs import bank
from thdprof.runtime.megatron import decoder_surroundings, grouped_experts, install, versions
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.grouped_experts import find_expert_layers, grouped, side_by_side
from thdprof.runtime.megatron.kinds import chunk
from thdprof.runtime.megatron.refusals import SettingsError

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu", "_engine_can_be_imported")

TOKENS, HIDDEN, EXPERTS = 24, 16, 8
ROUTINGS = ("even", "one", "few", "random", "random")


def micro_batch(routing, number=0):
    """Hidden states, and a bias of the router's inputs that sends tokens to all experts, to few, or to the same."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    common = torch.randn(HIDDEN, generator=generator)
    return hidden + {"even": 0.0, "random": 0.5, "few": 3.0, "one": 1000.0}[routing] * common


def trained(layer, routings=ROUTINGS):
    """Outputs and input gradients of micro-batches, and the gradients that parameters got from all of them."""
    seen, ready = [], []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: received(p, name, ready))
        for name, p in layer.named_parameters()
    ]
    counts = []
    for number, routing in enumerate(routings):
        hidden = micro_batch(routing, number).requires_grad_()
        counts.append(layer.router(hidden)[1].sum(0))
        output, bias = layer(hidden)
        assert bias is None
        output.square().sum().backward()
        seen += [output.detach(), hidden.grad]
    for hook in hooks:
        hook.remove()
    assert any(int(count.min()) == 0 for count in counts) or len(routings) == 1  # an expert without a token
    return [*seen, *(p.total for p in layer.parameters())], ready


def received(parameter, name, ready):
    """What DistributedDataParallel's hook does: it adds the gradient, unless a kernel has done so."""
    total = getattr(parameter, "main_grad", None)
    if total is None:
        total = getattr(parameter, "total", torch.zeros_like(parameter))
    if not getattr(parameter, "grad_added_to_main_grad", False):
        total.add_(parameter.grad)
    parameter.total, parameter.grad = total, None
    ready.append(name)


def assert_alike(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
SIGMOID = {"moe_router_score_function": "sigmoid"}
GROUPS = {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2}


def squared_relu(x):
    return torch.relu(x).square()


CONFIGS = {
    "gelu": {},
    "gated": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "gated, fused": {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": True,
    },
    "gated, clamped": {"gated_linear_unit": True, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "interleaved": {"gated_linear_unit": True, "moe_mlp_glu_interleave_size": 4},
    "squared relu": {"activation_func": squared_relu},
    "one of one": {"num_moe_experts": 1, **TOP_1},
    "top 1, before": {**TOP_1, "moe_apply_probs_on_input": True},
    "top 8": {"moe_router_topk": 8},
    "z loss, no auxiliary": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1},
    "by sequence": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "groups": GROUPS,
    "expert bias": {**SIGMOID, "moe_router_enable_expert_bias": True},
    "fp32 router": {"moe_router_dtype": "fp32"},
    "shared": {"moe_shared_expert_intermediate_size": 16},
    "shared, gated": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_products_give_what_the_experts_of_megatron_core_give(name):
    routings = ("random",) if name in ("one of one", "top 8") else ROUTINGS
    theirs, order = trained(expert_layer(**CONFIGS[name]), routings)
    layer = expert_layer(**CONFIGS[name])
    own = dict(vars(layer)), dict(vars(layer.experts.linear_fc1)), dict(vars(layer.router))
    with grouped(find_expert_layers([layer])):
        ours, ready = trained(layer, routings)
    assert_alike(ours, theirs)
    assert ready == order  # every parameter once a micro-batch, in the same order
    assert (dict(vars(layer)), dict(vars(layer.experts.linear_fc1)), dict(vars(layer.router))) == own
    if name == "expert bias":
        other = expert_layer(**CONFIGS[name])
        trained(other)
        assert torch.equal(layer.router.local_tokens_per_expert, other.router.local_tokens_per_expert)


LAID = ("own", "in order", "reversed", "gaps", "unevenly")


@pytest.mark.parametrize("sums", LAID)
@pytest.mark.parametrize("how", LAID)
@pytest.mark.parametrize("fuses", [True, False])
def test_weights_and_their_sums_are_used_where_they_lie(how, sums, fuses, monkeypatch):
    theirs, order = trained(expert_layer())
    layer = expert_layer(gradient_accumulation_fusion=fuses)
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        lay(list(linear.parameters()), how)
    with_main_grads(layer, sums)
    before = [p.data_ptr() for p in layer.experts.parameters()]
    with grouped(find_expert_layers([layer])):
        assert ([p.data_ptr() for p in layer.experts.parameters()] == before) is (how != "own")
        if how != "unevenly":  # then a pass copies no weight
            monkeypatch.setattr(torch, "stack", None)
        ours, ready = trained(layer)
        assert all(p.grad_added_to_main_grad for p in layer.experts.parameters())
    assert_alike(ours, theirs)
    assert ready == order
    added = {p.grad_added_to_main_grad for p in layer.experts.parameters()}
    assert added == {fuses}  # hooks of Megatron's own passes go by these marks from here on


def test_a_gradient_that_autograd_must_hand_on_is_not_added_before():
    layer = expert_layer(gradient_accumulation_fusion=True)
    with_main_grads(layer, "reversed")
    for weight in layer.experts.parameters():
        weight.zero_out_wgrad = True
    with grouped(find_expert_layers([layer])):
        ours, _ = trained(layer)
    assert_alike(ours, trained(expert_layer())[0])
    assert not any(p.grad_added_to_main_grad for p in layer.experts.parameters())


def test_frozen_experts_get_no_gradient():
    layer = expert_layer()
    for weight in layer.experts.parameters():
        weight.requires_grad_(False)
    hidden = micro_batch("random").requires_grad_()
    found = []
    for ours in (False, True):
        with grouped(find_expert_layers([layer]) if ours else []):
            found.append(torch.autograd.grad(layer(hidden)[0].square().sum(), [hidden, layer.router.weight]))
    assert_alike(found[1], found[0])


def test_overlapped_shared_experts_run_before_the_router():
    found = []
    for overlap in (False, True):
        layer = expert_layer(moe_shared_expert_intermediate_size=16, moe_shared_expert_overlap=overlap)
        with grouped(find_expert_layers([layer])):
            found.append(trained(layer)[0])
        assert layer.shared_expert_overlap is overlap
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_pass_makes_no_host_wait_for_a_count(monkeypatch):
    layer = expert_layer(moe_shared_expert_intermediate_size=16)
    with grouped(find_expert_layers([layer])):
        layer(micro_batch("random"))
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, None)
        layer(micro_batch("few", 1))


def test_every_run_of_a_micro_batch_gives_the_same_bits():
    layer = expert_layer(gated_linear_unit=True)
    with_main_grads(layer, "reversed")
    found = []
    with grouped(find_expert_layers([layer])):
        for _ in range(2):
            for p in layer.parameters():
                vars(p).pop("total", None)
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
            found.append([t.clone() for t in trained(layer)[0]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("modules", [["moe"], ["moe_act"], ["shared_experts"]])
@pytest.mark.usefixtures("recomputing")
def test_recomputed_experts_give_the_same_bits(modules, monkeypatch):
    from megatron.core.tensor_parallel import random

    def share_storage(output, again):
        output.untyped_storage().resize_(again.untyped_storage().nbytes())
        output.untyped_storage().copy_(again.untyped_storage())

    monkeypatch.setattr(random, "_get_share_storage", lambda: share_storage)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)
    engine = SimpleNamespace(is_fp8_enabled=lambda: False)  # of which the recomputed activation asks, also without FP8
    monkeypatch.setattr(random, "FP8GlobalStateManager", engine, raising=False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        monkeypatch.setattr(random, name, lambda **_: nullcontext(), raising=False)
    settings = {"gated_linear_unit": True, "moe_shared_expert_intermediate_size": 16}
    recomputed = {"recompute_granularity": "selective", "recompute_modules": modules}
    found, calls = [], []
    for more in ({}, recomputed):
        layer = expert_layer(**settings, **more)
        calls.append([])
        own = layer.config.activation_func
        layer.config.activation_func = lambda x, own=own, seen=calls[-1]: (seen.append(x.shape), own(x))[1]
        with grouped(find_expert_layers([layer])):
            found.append(trained(layer)[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(calls[1]) > len(calls[0]) or modules == ["shared_experts"]


def test_a_replay_counts_tokens_for_the_experts_bias_outside_of_its_graph(monkeypatch):
    layer = expert_layer(**SIGMOID, moe_router_enable_expert_bias=True)
    eager = expert_layer(**SIGMOID, moe_router_enable_expert_bias=True)
    eager.router(micro_batch("few"))
    routers = grouped_experts.find_counting_routers(layer)
    assert routers == [layer.router]
    with grouped(find_expert_layers([layer])):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            layer(micro_batch("few"))
        assert not layer.router.local_tokens_per_expert.any()
        with torch.no_grad():
            grouped_experts.count_replayed(routers)
        assert not layer.router.local_tokens_per_expert.any()
        grouped_experts.count_replayed(routers)
    assert torch.equal(layer.router.local_tokens_per_expert, eager.router.local_tokens_per_expert)
    grouped_experts.count_replayed(routers)  # nothing is attached any more
    assert torch.equal(layer.router.local_tokens_per_expert, eager.router.local_tokens_per_expert)


def test_tensors_that_lie_otherwise_are_no_view():
    memory = torch.arange(40.0)
    parts = [memory[8 * n : 8 * n + 8].view(2, 4) for n in range(5)]
    assert torch.equal(side_by_side(parts), memory.view(5, 2, 4))
    assert torch.equal(side_by_side(parts[::2]), memory.view(5, 2, 4)[::2])
    assert side_by_side(parts[:1]).shape == (1, 2, 4)
    for others in (
        parts[::-1],
        [parts[0], parts[1], parts[3]],
        [parts[0], parts[0]],
        [parts[0], memory[4:12].view(2, 4)],
        [parts[0], parts[1].view(4, 2)],
        [parts[0], parts[1].clone()],
        [parts[0].t(), parts[1].t()],
    ):
        assert side_by_side(others) is None


def refused(layer, change):
    change(layer.experts)
    with pytest.raises(SettingsError, match=r"graphs.modules is \[\]") as caught:
        find_expert_layers([layer])
    return str(caught.value)


def test_gradients_are_added_between_those_of_other_weights(monkeypatch):
    """By Triton's interpreter, which runs a kernel on a CPU."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from thdprof.runtime.megatron import gradient_sums

    kernel = interpreter.InterpretedFunction(gradient_sums.add_kernel.fn)
    monkeypatch.setattr(gradient_sums, "add_kernel", kernel)
    memory, found = torch.randn(3, 5000), torch.randn(3, 60, 70).bfloat16()
    totals = memory.as_strided((3, 60, 70), (5000, 70, 1))
    sums, between = totals + found, memory[:, 4200:].clone()
    gradient_sums.add_gradients(totals, found)
    assert torch.equal(totals, sums)
    assert torch.equal(memory[:, 4200:], between)


def test_the_sum_of_gradients_compiles_for_hopper_and_moves_sixteen_bytes_at_a_time():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thdprof.runtime.megatron.gradient_sums import add_kernel

    types = {"totals": "*fp32", "gradients": "*bf16", "number": "i32", "step": "i32", "block": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(fn=add_kernel, signature=types, constexprs={"block": 2048}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert compiled.count("ld.global.v4.b32") == 3
    assert "ld.global.b" not in compiled


def test_experts_that_grouped_products_cannot_serve_are_refused():
    def renamed(experts):
        experts.linear_fc2.register_parameter("weight", experts.linear_fc2.weight0)
        del experts.linear_fc2.weight0

    def replaced(experts):
        experts.linear_fc1.forward = experts.linear_fc1.forward

    assert "set moe_grouped_gemm to True" in refused(expert_layer(), lambda e: setattr(e, "_with_fused_impl", True))
    assert "target_modules" in refused(expert_layer(), renamed)
    assert "target_modules" in refused(expert_layer(), replaced)
    assert "target_modules" in refused(expert_layer(), lambda e: setattr(e.linear_fc1, "use_bias", True))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.nn.functional, "grouped_mm")
        assert "torch 2.10 or newer" in refused(expert_layer(), lambda e: None)


WHOLE = {
    "unfused": {},
    "fused": {},
    "shared, with a bias": {"shared": 8, "bias": True},
    "groups": {"bias": True, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "balancing": "seq_aux_loss"},
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers_of_dropless_experts_are_replayed_as_they_run_eagerly(name, monkeypatch, caplog):
    """Every micro-batch, also one that fits no bucket, runs by the same products."""
    own = grouped_experts.accumulate

    def accumulate(weights, found):
        return own(weights, torch.zeros_like(found) if FusedScale.capturing else found)  # a capture runs no kernel

    monkeypatch.setattr(grouped_experts, "accumulate", accumulate)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeGraph.replaying)
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found, engine = [], FakeEngine()
    for graphs, verify_every in ((False, 0), (True, 0), (True, 1)):
        block = make_experts(graphs=False, dispatcher="alltoall", grouped=True, moe_grouped_gemm=True, **WHOLE[name])
        for part in block.modules():
            if hasattr(part, "fuse_wgrad_accumulation"):
                part.fuse_wgrad_accumulation = name == "fused"
        around = decoder_surroundings.surround_decoder(block, layers=True)
        options = {"surroundings": replace(around, while_capturing=nullcontext), "verify_every": verify_every}
        run = graphs_of(block, engine, modules=(), **options) if graphs else None
        reduction = Reduction(block)
        reduction.zero(resets_flags=True)
        with grouped(find_expert_layers([block])):
            seen = train(block, batches, one_f_one_b(len(batches)))
        routers = [layer.mlp.router for layer in block.layers if layer.is_moe_layer]
        seen += [router.local_tokens_per_expert for router in routers if router.enable_expert_bias]
        found.append([*seen, *(p.main_grad.clone() for p in block.parameters()), reduction.ready])
    assert run.stats().replays.total() == run.stats().verified.total() == 6
    assert [len(graph.static_outputs) for graph in engine.replays[:3]] == [1, 1, 1]
    ready = [one.pop() for one in found]
    assert ready[0] == ready[1] == ready[2]  # every parameter is ready as often
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.fixture
def _as_chunks(as_if_on_a_gpu, monkeypatch):
    cpu_graphs.as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    capture_pass, is_running = cpu_graphs.capture_pass_that_is_known()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_running)
    monkeypatch.setattr(bank, "capture_pass", capture_pass)


def plan_of_chunks(experts="dropless", **changes):
    plan = plan_of_shares([0.4, 0.4], count=8, steps=2, seq_length=TOKENS_OF_LAYERS, experts=experts)
    buckets = [
        part.model_copy(update={"max_seqs": bucket.max_seqs, "max_seqlen": TOKENS_OF_LAYERS})
        for part, bucket in zip(plan.graphs.buckets, BUCKETS, strict=True)
    ]
    changes = {"impl": "chunk", "buckets": buckets, "slots": [[2]], "capture": "first_use", **changes}
    graphs = plan.graphs.model_copy(update=changes)
    tokens = plan.microbatches.model_copy(update={"n_tokens_max": TOKENS_OF_LAYERS})
    return plan.model_copy(update={"graphs": graphs, "microbatches": tokens})


def losses_and_gradients(model):
    """Those of micro-batches of which two at a time are between forward and backward, and how often each came."""
    seen, ready = train_two_at_a_time(model)
    return [*seen, *(r.local_tokens_per_expert for r in grouped_experts.find_counting_routers(model))], ready


def find_layers(model):
    return [part for part in model.modules() if hasattr(part, "token_dispatcher")]


GPT = {"grouped": True, "moe_grouped_gemm": True}


@pytest.mark.parametrize("predictions", [None, 1])
@pytest.mark.usefixtures("_as_chunks")
def test_an_installation_replays_chunks_of_dropless_experts_and_watches_them(predictions, monkeypatch, caplog):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(decoder_surroundings, "marked_as_capturing", nullcontext)  # hooks of reductions run in replays
    monkeypatch.setattr(parts, "has_graph_safe_rng", lambda: True)
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    found = []
    for replay in (None, False, True):
        model = model_of(predictions=predictions, **GPT, **bias)
        plan, lines = plan_of_chunks(verify="1/1"), []
        following = (
            nullcontext() if replay is None else install(model, plan, model.config, replay=replay, say=lines.append)
        )
        with following as installation:
            found.append(losses_and_gradients(model))
            number = len(find_layers(model))
            assert (
                f"dropless experts of {number} layers run as grouped products, in every pass of the run" in lines
            ) is (replay is not None)
            if replay:
                stats = [installation.stats(), *installation.prediction_stats()]
                assert [(one.replays.total(), one.verified.total(), one.mismatches) for one in stats] == [
                    (5, 5, type(one.mismatches)()) for one in stats
                ]
        assert all("token_dispatcher" in vars(part) for part in find_expert_layers([model]))
        assert not any("forward" in vars(part) for part in model.modules())
    (plain, _), (padded, of_padded), (ours, ready) = found
    assert_alike(padded, plain)
    names = [*(f"loss {n}" for n in range(len(BOUNDS))), *(name for name, _ in model.named_parameters())]
    names += [f"counts {n}" for n in range(len(padded) - len(names))]
    assert [name for name, a, b in zip(names, padded, ours, strict=True) if not torch.equal(a, b)] == []
    assert ready == of_padded
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("bucket", [None, 1500])
def test_megatrons_own_buffers_hold_weights_and_sums_in_reverse_order(distributed, bucket, monkeypatch):
    """megatron-core's own DistributedDataParallel reduces, with overlap, what a pass has added in one sum."""
    pytest.importorskip("megatron.training")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.training.training import wrap_model_chunks_with_ddp

    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: SimpleNamespace(wait_stream=lambda other: None))
    found, ready = [], []
    for ours in (False, True):
        layer = expert_layer(moe_ffn_hidden_size=32, num_moe_experts=4, moe_router_topk=2)
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.fuse_wgrad_accumulation = ours
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=bucket
        )
        (model,) = wrap_model_chunks_with_ddp([layer], layer.config, settings, bucket_sizes=[bucket])
        reductions = []
        for group in {id(g): g for g in model.param_to_bucket_group.values()}.values():
            note = partial(lambda into, group, **_: into.append(len(group.params)), reductions, group)
            monkeypatch.setattr(group, "start_grad_sync", note)
        if distributed:
            weights = list(layer.experts.linear_fc1.parameters())
            assert side_by_side(weights[::-1]) is not None
        with grouped(find_expert_layers([layer]) if ours else []):
            if ours:  # no weight is copied, and the sums are one view
                monkeypatch.setattr(torch, "stack", None if distributed else torch.stack)
                assert side_by_side([p.main_grad for p in layer.experts.linear_fc2.parameters()][::-1]) is not None
            for number in range(6):  # in the first step Megatron counts how often each gradient comes
                hidden = micro_batch("random", number)
                with model.no_sync() if number % 3 < 2 else nullcontext():
                    model(hidden)[0].square().sum().backward()
                if number == 2:
                    model.zero_grad_buffer()
        found.append([p.main_grad.clone() for p in layer.parameters()])
        ready.append(reductions)
        assert all(p.grad is None for p in layer.parameters())
    assert_alike(found[1], found[0])
    assert ready[0] == ready[1]
    assert sum(ready[0]) == len(found[0])
    assert len(ready[0]) == (1 if bucket is None else 3)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_expert_capacity_factor", 1.0),
        ("expert_tensor_parallel_size", 2),
        ("fp8", "hybrid"),
        ("moe_ffn_hidden_size", 20),
        ("moe_shared_expert_overlap", True),
    ],
)
@pytest.mark.usefixtures("_as_chunks")
def test_what_grouped_products_cannot_serve_is_refused_without_replays_too(name, value, replay, monkeypatch):
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(parts, "has_graph_safe_rng", lambda: True)
    model, plan = model_of(predictions=None, **GPT), plan_of_chunks(verify="1/1")
    monkeypatch.setattr(model.config, name, value)
    if name == "moe_shared_expert_overlap":  # alone it is served
        find_expert_layers([model])
        monkeypatch.setattr(model.config, "tensor_model_parallel_size", 2)
    with pytest.raises(SettingsError, match=name):
        install(model, plan, model.config, replay=replay, say=lambda line: None)
