"""Layers with dropless experts: graphs end at the router or behind the dispatcher's preprocessing, on a CPU."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    LAYERS,
    MIXED,
    MODULES,
    OVER,
    SMALL,
    TOKENS,
    FakeEngine,
    Reduction,
    described,
    forward,
    graphs_of,
    inputs,
    make_experts,
    one_f_one_b,
    train,
)

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import packed_seq_params
from thdprof.runtime.megatron.kinds.expert_layers import UpToRouter
from thdprof.runtime.megatron.refusals import SettingsError

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")


@pytest.mark.parametrize(
    ("dispatcher", "overlap", "shared"), [("allgather", True, None), ("alltoall", True, 4), ("alltoall", False, None)]
)
@pytest.mark.usefixtures("_engine_can_be_imported")
def test_dropless_experts_run_eagerly_behind_their_routers_graph(dispatcher, overlap, shared):
    plain = make_experts(graphs=False, dispatcher=dispatcher, shared=shared)
    graphed, engine = make_experts(dispatcher=dispatcher, shared=shared), FakeEngine()
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    run = graphs_of(graphed, engine, modules=MODULES)
    assert [layer.is_moe_layer for layer in graphed.layers] == [True, False, True]
    found, routed = [], Counter()
    for block in (plain, graphed):
        reduction, seen = Reduction(block, overlap=overlap), []
        for _ in range(2):
            reduction.zero(resets_flags=True)
            seen += train(block, batches, one_f_one_b(len(batches)))
            seen += [p.main_grad.clone() for p in block.parameters()]
            routed.update(name for name, p in block.named_parameters() if "experts" in name and p.main_grad.any())
            assert all(p.grad is None for p in block.parameters())
        found.append((seen, reduction.ready))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert found[0][1] == found[1][1]  # every parameter is ready as often, experts' and routers' too
    assert min(routed.values()) == 4  # every expert has had tokens
    assert len(routed) >= 2 * 4 * 2
    assert run.stats().replays == {BUCKETS[0]: 6, BUCKETS[1]: 6}
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 4}
    call = engine.calls[0]
    for layer, args in zip(graphed.layers, call.sample_args, strict=True):
        captured = {p.data_ptr() for name, p in layer.named_parameters() if not name.endswith("unused")}
        if layer.is_moe_layer:
            captured -= {p.data_ptr() for p in layer.mlp.experts.parameters()}
            assert layer.mlp.router.weight.data_ptr() in captured
            assert layer.mlp.cudagraph_tensor_store.is_empty()
            assert layer.mlp_norm_manager is None
        assert {a.data_ptr() for a in args[1:]} == captured
        assert layer.cuda_graphs == []
    outputs = [len(graph.static_outputs) for graph in engine.replays[:LAYERS]]
    assert outputs == [4 + (shared is not None), 1, 4 + (shared is not None)]


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_a_rehearsal_leaves_the_experts_alone():
    block = make_experts()
    run = graphs_of(block, modules=MODULES)
    call = run._describe(*described(block, OVER))
    for layer in block.layers:
        if layer.is_moe_layer:
            layer.mlp.experts.forward = None  # cannot be called
    run._open(call)
    assert run.stats().captures == 4


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_experts_that_fail_leave_no_trace_in_their_layer(monkeypatch):
    block = make_experts()
    graphs_of(block, modules=MODULES)
    x = inputs(1)[0].requires_grad_()
    good = forward(block, x, SMALL).detach()
    moe = block.layers[2].mlp

    def fails(*_):
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(moe.experts), "forward", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            forward(block, x, SMALL)
    assert moe.cudagraph_tensor_store.is_empty()
    assert block.layers[2].cuda_graphs == []
    gc.collect()
    assert torch.equal(forward(block, x, SMALL), good)


@pytest.fixture
def _hybrid_ep_can_be_imported(monkeypatch):
    """HybridEP's two functions on one rank: tokens in the order of their experts, and their sums."""
    from megatron.core.transformer.moe import token_dispatcher

    own_zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **more: own_zeros(*shape, **more))

    def dispatch(*, x, routing_map, probs, **_):
        _, token = routing_map.T.nonzero(as_tuple=True)
        return x[token], probs.T[routing_map.T], None, routing_map.sum(0), (token, len(x))

    def combine(*, x, handle, **_):
        token, count = handle
        return own_zeros(count, x.shape[-1]).index_add(0, token, x)

    monkeypatch.setattr(token_dispatcher, "hybrid_ep_dispatch", dispatch)
    monkeypatch.setattr(token_dispatcher, "hybrid_ep_combine", combine)


@pytest.fixture
def _streams_can_be_awaited(monkeypatch):
    """Overlapped shared experts run on a stream of their own, for which their output waits."""
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    stream, own = SimpleNamespace(wait_stream=lambda other: None), SharedExpertMLP.get_output

    def get_output(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
            return own(self)

    monkeypatch.setattr(SharedExpertMLP, "get_output", get_output)


FLEX = {"moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}
OVERLAPPED = {"shared": 4, "moe_shared_expert_overlap": True}


@pytest.mark.parametrize(
    ("dispatcher", "modules", "settings"),
    [
        ("flex", MODULES, FLEX),
        ("flex", [*MODULES, "moe_preprocess"], FLEX),
        ("flex", MODULES, {**FLEX, **OVERLAPPED}),
        ("flex", [*MODULES, "moe_preprocess"], {**FLEX, **OVERLAPPED}),
        ("alltoall", MODULES, OVERLAPPED),
        ("allgather", [*MODULES, "moe_preprocess"], {}),
    ],
)
@pytest.mark.usefixtures("_engine_can_be_imported", "_hybrid_ep_can_be_imported", "_streams_can_be_awaited")
def test_other_dispatchers_and_overlapped_shared_experts_go_on_from_the_graph(dispatcher, modules, settings):
    found = []
    batches = list(zip(inputs(4), [SMALL, LARGE, OVER, SMALL], strict=True))
    for graphs in (False, True):
        block = make_experts(graphs=False, dispatcher=dispatcher, **settings)
        run = graphs_of(block, modules=modules) if graphs else None
        Reduction(block).zero(resets_flags=True)
        seen = train(block, batches, one_f_one_b(len(batches)))
        found.append([*seen, *(p.main_grad.clone() for p in block.parameters())])
    assert run.stats().replays.total() == 3
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 1}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.fixture
def _recomputation_needs_no_gpu(monkeypatch):
    """megatron-core's checkpoints put CUDA's random states back, of which a CPU has none."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", tuple)
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *_: None)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)


def counted(own, calls, key):
    """`own`, whose calls are counted."""

    def run(*args, **kwargs):
        calls[key] += 1
        return own(*args, **kwargs)

    return run


MOE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ALL_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FLEX_PREPROCESSED = {"dispatcher": "flex", "modules": [*MODULES, "moe_preprocess"], **FLEX}


@pytest.mark.parametrize("recomputed", [MOE_RECOMPUTED, ALL_RECOMPUTED], ids=["moe", "full"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dispatcher": "alltoall"},
        {"dispatcher": "alltoall", "shared": 4},
        {"dispatcher": "allgather"},
        FLEX_PREPROCESSED,
    ],
    ids=["alltoall", "shared experts", "allgather", "flex, preprocessed"],
)
@pytest.mark.usefixtures("_engine_can_be_imported", "_hybrid_ep_can_be_imported", "_recomputation_needs_no_gpu")
def test_experts_are_recomputed_from_the_outputs_of_their_routers_graph(settings, recomputed):
    found, calls = [], Counter()
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    given = {**settings}
    modules = given.pop("modules", MODULES)
    for graphs in (False, True):
        block = make_experts(graphs=False, **given, **recomputed)
        run = graphs_of(block, modules=modules) if graphs else None
        Reduction(block).zero(resets_flags=True)
        experts = block.layers[2].mlp.experts
        experts.forward = counted(experts.forward, calls, graphs)
        seen = train(block, batches, one_f_one_b(len(batches)))
        found.append([*seen, *(p.main_grad.clone() for p in block.parameters())])
    assert run.stats().replays.total() == 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert calls == {False: 2 * len(MIXED), True: 2 * len(MIXED)}  # once in each forward and in each backward
    for layer in block.layers:
        if layer.is_moe_layer:
            assert layer.mlp.cudagraph_tensor_store.is_empty()
            assert layer.mlp.moe_layer_recompute is (recomputed is MOE_RECOMPUTED)
    assert block.config.recompute_granularity == recomputed["recompute_granularity"]


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_experts_padded_to_capacity_go_on_from_their_routers_graph():
    found = []
    batches = list(zip(inputs(4), [SMALL, LARGE, OVER, SMALL], strict=True))
    padded = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    for graphs in (False, True):
        block = make_experts(graphs=False, dispatcher="alltoall", **padded)
        run = graphs_of(block, modules=MODULES) if graphs else None
        Reduction(block).zero(resets_flags=True)
        seen = train(block, batches, one_f_one_b(len(batches)))
        found.append([*seen, *(p.main_grad.clone() for p in block.parameters())])
    assert run.stats().replays.total() == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def several_samples(x, bounds, mask=None):
    """Arguments of a block for a micro-batch of two samples, with the padding mask of its tokens."""
    params = packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu")
    params.tokens_per_sample = TOKENS // 2
    more = {} if mask is None else {"padding_mask": mask}
    return {"hidden_states": x, "attention_mask": None, "packed_seq_params": params, **more}


def masks(count):
    """Padding masks, of shape (1, tokens): another part of the tokens is padding in each."""
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(1, TOKENS, generator=generator) < 0.3 for _ in range(count)]


def trained_by_sample(modules, masked, **settings):
    """Outputs and gradients of micro-batches of two samples, eagerly and through graphs, and the graphs' counters."""
    found = []
    for graphs in (False, True):
        block = make_experts(graphs=False, dispatcher="alltoall", **settings)
        run = graphs_of(block, modules=modules) if graphs else None
        Reduction(block).zero(resets_flags=True)
        seen = []
        for x, mask, bounds in zip(inputs(4), masks(4), [SMALL, LARGE, OVER, SMALL], strict=True):
            x = x.clone().requires_grad_()
            output = block(**several_samples(x, bounds, mask if masked else None))
            output.square().sum().backward()
            seen += [output.detach(), x.grad]
        routers = [layer.mlp.router for layer in block.layers if layer.is_moe_layer]
        seen += [router.local_tokens_per_expert for router in routers if router.enable_expert_bias]
        found.append([*seen, *(p.main_grad.clone() for p in block.parameters())])
    return *found, run.stats()


@pytest.mark.parametrize("modules", [MODULES, [*MODULES, "moe_preprocess"]], ids=["router", "preprocess"])
@pytest.mark.usefixtures("_engine_can_be_imported")
def test_samples_and_padding_masks_reach_the_router_of_every_micro_batch(modules):
    """Of two samples the loss is balanced for each; tokens of the mask are left out of the router's losses."""
    by_sample = {"balancing": "seq_aux_loss", "moe_z_loss_coeff": 0.1}
    eager, ours, stats = trained_by_sample(modules, True, **by_sample)
    assert stats.replays.total() == 3
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    without, *_ = trained_by_sample(modules, False, **by_sample)
    assert not all(torch.equal(a, b) for a, b in zip(eager, without, strict=True))  # or the masks say nothing


@pytest.mark.parametrize("modules", [MODULES, [*MODULES, "moe_preprocess"]], ids=["router", "preprocess"])
@pytest.mark.usefixtures("_engine_can_be_imported")
def test_group_limited_routing_and_its_bias_count_the_tokens_of_every_micro_batch(modules):
    groups = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "balancing": "seq_aux_loss", "bias": True}
    eager, ours, stats = trained_by_sample(modules, False, **groups)
    assert stats.replays.total() == 3
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    assert any(counts.shape == (4,) and int(counts.sum()) == 2 * 4 * TOKENS for counts in ours)


@pytest.mark.parametrize("recomputed", [{}, MOE_RECOMPUTED, ALL_RECOMPUTED], ids=["kept", "moe", "full"])
@pytest.mark.parametrize("modules", [MODULES, [*MODULES, "moe_preprocess"]], ids=["router", "preprocess"])
@pytest.mark.usefixtures("_engine_can_be_imported", "_recomputation_needs_no_gpu")
def test_a_router_counts_for_its_bias_outside_of_its_graph_as_in_eager_training(modules, recomputed, monkeypatch):
    """As often, in the same order, and with gradients where eager passes have them: whether dynamo has compiled the
    counting, and rounds its sums alike, depends on that. In a graph it would stay as it was at the capture.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    own, calls = TopKRouter._apply_expert_bias, []

    def counts(self, routing_map, padding_mask=None):
        calls.append((self.layer_number, torch.is_grad_enabled(), routing_map.sum(dim=0).tolist()))
        own(self, routing_map, padding_mask=padding_mask)

    monkeypatch.setattr(TopKRouter, "_apply_expert_bias", counts)
    found = []
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    for graphs in (False, True):
        block = make_experts(graphs=False, dispatcher="alltoall", bias=True, moe_permute_fusion=False, **recomputed)
        run = graphs_of(block, modules=modules) if graphs else None
        Reduction(block).zero(resets_flags=True)
        if run is not None:
            call = run._describe(*described(block, OVER))
            calls.clear()
            run._open(call)
            assert (run.stats().captures, calls) == (4, [])
        seen = train(block, batches, one_f_one_b(len(batches)))
        found.append((seen, calls.copy(), [layer.mlp.router.local_tokens_per_expert for layer in block.layers[::2]]))
        calls.clear()
    (plain, eager, tokens), (graphed, ours, theirs) = found
    assert run.stats().replays.total() == 6
    assert all(torch.equal(a, b) for a, b in zip([*plain, *tokens], [*graphed, *theirs], strict=True))
    assert eager == ours
    assert Counter(gradients for _, gradients, _ in ours) == Counter(
        {True: 2 * len(MIXED), **({False: 2 * len(MIXED)} if recomputed else {})}
    )


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_what_an_eager_micro_batch_of_another_length_leaves_in_the_dispatcher_is_not_taken():
    """The sizes that a replay goes on with are its own, though evaluation had fewer tokens since."""
    layer = make_experts(graphs=False, dispatcher="alltoall").layers[0]
    split = UpToRouter(layer, [*MODULES, "moe_preprocess"])
    x = inputs(1)[0]
    given = {"attention_mask": None, "packed_seq_params": packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")}
    expected = layer(hidden_states=x, **given)[0]
    outputs = tuple(o.detach() for o in split.captured(x, **given))
    kept = [name for name, value in vars(layer.mlp.token_dispatcher).items() if value is outputs[0]]
    assert not kept  # tensors of a graph
    short = TOKENS // 2
    layer.mlp(torch.randn(short, 1, HIDDEN))
    assert layer.mlp.token_dispatcher.hidden_shape[0] == short
    assert torch.equal(split.replay(lambda _: outputs, x), expected)


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_layers_are_left_as_the_model_was_built():
    block = make_experts(graphs=False)
    graphs_of(block, modules=MODULES)
    forward(block, inputs(1)[0].requires_grad_(), SMALL).sum().backward()
    for layer in block.layers:
        assert (layer.config.cuda_graph_impl, layer.config.cuda_graph_modules) == ("none", [])
        assert not {"cuda_graphs", "cuda_graph_manual_hooks"} & {*vars(layer)}
        assert "forward" not in vars(layer.mlp)


def test_a_replaced_forward_is_not_gone_past():
    block = make_experts()
    block.layers[0].forward = block.layers[0].forward
    with pytest.raises(SettingsError, match="the forward of TransformerLayer 1 is replaced"):
        graphs_of(block, modules=MODULES)


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_parameters_before_the_experts_are_gathered_for_the_graph_and_experts_by_their_own_hooks():
    block = make_experts()
    graphs_of(block, modules=MODULES)
    reduction = Reduction(block)
    x = inputs(1)[0].requires_grad_()
    forward(block, x, SMALL)
    reduction.gathered.clear()
    forward(block, x, SMALL)
    asked = Counter(name for name in reduction.gathered if name.startswith("layers.0."))
    assert set(asked) == {f"layers.0.{name}" for name, _ in block.layers[0].named_parameters()}
    assert {n for name, n in asked.items() if "experts" in name} == {1}


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_a_latent_projection_in_the_preprocessing_is_gathered_with_it():
    layer = make_experts(graphs=False).layers[0]
    layer.mlp.fc1_latent_proj = torch.nn.Linear(HIDDEN, 4)
    asked = []
    layer.mlp.fc1_latent_proj.register_forward_pre_hook(lambda part, _: asked.append(part))
    UpToRouter(layer, MODULES).gather()
    assert asked == []  # it runs eagerly, with its own hook
    UpToRouter(layer, [*MODULES, "moe_preprocess"]).gather()
    assert asked == [layer.mlp.fc1_latent_proj]
