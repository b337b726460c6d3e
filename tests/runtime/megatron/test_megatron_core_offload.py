"""megatron-core's own offloading around layers, on a CPU: its modules and groups are real, its streams stand-ins.

A copy on a side stream happens when something waits for it, and until then the target holds garbage: what is not waited
for shows.
"""

from __future__ import annotations

import gc
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.pipeline_parallel import fine_grained_activation_offload as core
from support.layer_graphs import HIDDEN, TOKENS, make_block

from thdprof.runtime.megatron.core_offload import CoreOffloading
from thdprof.runtime.megatron.kinds.expert_layers import WholeLayer
from thdprof.runtime.megatron.layer_offload import Group, choose_staying, freed_bytes

pytestmark = pytest.mark.usefixtures("parallel_state")
MIB = 2**20
LAYERS = 4
MODULES = ("qkv_linear", "core_attn", "attn_proj")


class Streams:
    """Side streams whose copies are as late as their order allows."""

    def __init__(self):
        self.current = self.main = Stream()
        self.late = 0

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def copy(self, target, source):
        if self.current is self.main:
            target.copy_(source)
            return
        target.fill_(float("nan"))
        self.late += 1
        self.current.waiting.append(lambda: target.copy_(source))


class Stream:
    def __init__(self, *_):
        self.waiting = []

    def wait_stream(self, other):
        self.wait_event(SimpleNamespace(copies=list(other.waiting), stream=other))

    def wait_event(self, event):
        for act in event.copies:
            if act in event.stream.waiting:
                event.stream.waiting.remove(act)
                act()


class Event:
    def __init__(self, **_):
        self.copies, self.stream = [], Stream()

    def record(self, stream):
        self.copies, self.stream = list(stream.waiting), stream


class Pool(core.OffloadTensorPool):
    def __init__(self, device, pin_memory):
        super().__init__(device, pin_memory=False)


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    made = Streams()

    def offload(self, tensor, pin_memory=True, use_cpu_pool=True):
        host = self.cpu_tensor_pool.allocate(tensor.shape, dtype=tensor.dtype)
        made.copy(host, tensor.detach().clone())  # of what the memory holds now, whatever is freed until then
        return tensor.device, host, True, None

    def reload(self, state, non_blocking=None):
        host = state[1]
        assert made.current is not made.main, "reloaded only when it was asked for"
        back = torch.empty_like(host)
        made.copy(back, host)
        return back

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(core, "OffloadTensorPool", Pool)
    monkeypatch.setattr(core, "nvtx_range_push", lambda *_: None)
    monkeypatch.setattr(core, "nvtx_range_pop", lambda *_: None)
    monkeypatch.setattr(core.ChunkOffloadHandler, "offload", offload)
    monkeypatch.setattr(core.ChunkOffloadHandler, "reload", reload)
    monkeypatch.setattr(
        core.ChunkOffloadHandler,
        "_can_manage_tensor_for_offload",
        staticmethod(lambda t: not isinstance(t, torch.nn.Parameter)),
    )
    monkeypatch.setattr(extension, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    monkeypatch.setattr(core.PipelineOffloadManager, "OFFLOAD_MGR", None)
    return made


@pytest.fixture
def block():
    return make_block(
        LAYERS,
        fine_grained_activation_offloading=True,
        offload_modules=list(MODULES),
        min_offloaded_tensor_size=TOKENS * HIDDEN,
    )


def offloading_of(block, fraction=1.0, modules=MODULES):
    return CoreOffloading(block, modules=modules, fraction=fraction, min_size=TOKENS * HIDDEN)


def packed():
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, 7, TOKENS], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS
    )


def arguments():
    return {"attention_mask": None, "packed_seq_params": packed()}


def hidden(seed=1):
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(block):
    found = [p.grad for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    return found


@contextmanager
def moving_nothing():
    """Lets modules turn to a manager that moves nothing."""
    before = core.PipelineOffloadManager.OFFLOAD_MGR
    core.PipelineOffloadManager.OFFLOAD_MGR = core.PipelineOffloadManager()
    yield
    core.PipelineOffloadManager.OFFLOAD_MGR = before


def plain(block, *seeds):
    """Gradients of eager micro-batches that keep everything: of their inputs, and of the weights."""
    inputs = [hidden(seed) for seed in seeds]
    with moving_nothing():
        for x in inputs:
            block(x, **arguments()).square().mean().backward()
    return [x.grad for x in inputs], gradients(block)


def settled(block, fraction=1.0):
    """What eager micro-batches follow once a slot was rehearsed."""
    offloading = offloading_of(block, fraction)
    rehearsed(block, offloading)
    return offloading


def rehearsed(block, offloading):
    """Moves of a slot whose layers have run once."""
    layers = [WholeLayer(layer) for layer in block.layers]
    moves = offloading.slot(list(block.layers), torch.device("cpu"))
    with moves.capturing():
        run_layers(layers, lambda n, layer, x: moves.rehearse(n, layer.layer, x, layer_of(layer)))
        moves.settle()
    block.zero_grad()
    return moves


def layer_of(layer):
    return lambda x: layer.captured(x, **arguments())


def run_layers(layers, run, seed=1):
    x = given = hidden(seed)
    for number, layer in enumerate(layers):
        x = run(number, layer, x)
    x.square().mean().backward()
    return given


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_captured_layers_wait_for_what_they_move(block, streams, fraction):
    offloading = offloading_of(block, fraction)
    moves = rehearsed(block, offloading)
    streams.late = 0
    layers = [WholeLayer(layer) for layer in block.layers]
    with moves.capturing():
        warm = run_layers(layers, lambda n, layer, x: moves.layer(n)(x, layer_of(layer)))
        assert streams.late == 0, "a warm-up moves nothing"
        assert warm.grad is not None
        block.zero_grad()
        moves.begin()
        x = run_layers(layers, lambda n, layer, x: moves.layer(n)(x, layer_of(layer)))
    found = [x.grad, *gradients(block)]
    assert len(offloading.stays) == {1.0: 3, 0.5: 3 + 4, 0.0: 3 * LAYERS}[fraction]
    assert (streams.late > 0) is (fraction > 0)
    with moving_nothing():
        given = run_layers(layers, lambda n, layer, x: layer_of(layer)(x))
    assert_equal(found, [given.grad, *gradients(block)])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_eager_micro_batches_in_flight_have_host_memory_of_their_own(block, streams, fraction, order):
    offloading = settled(block, fraction)
    streams.late = 0
    for _ in range(2):
        inputs, losses = [hidden(1), hidden(2)], []
        for x in inputs:
            with offloading.eagerly():
                losses.append(block(x, **arguments()).square().mean())
        for number in order:
            losses[number].backward()
        del losses, x
        found, (expected_inputs, expected) = gradients(block), plain(block, *(1 + number for number in order))
        assert_equal([inputs[number].grad for number in order], expected_inputs)
        assert_equal(found, expected)
        gc.collect()
        assert len(offloading._free) == len(offloading._all) == 2
    assert streams.late > 20
    assert offloading.host_bytes() > 0


def test_an_eager_micro_batch_that_is_dropped_gives_its_memory_back(block):
    offloading = settled(block)
    for _ in range(3):
        with offloading.eagerly():
            dropped = block(hidden(), **arguments())
        assert not offloading._free
        del dropped
        gc.collect()
        assert len(offloading._free) == 1
        assert offloading.host_bytes() == (LAYERS - 1) * (1 + 1 + 1) * TOKENS * HIDDEN * 4


def test_without_gradients_nothing_is_moved(block, streams):
    offloading = settled(block)
    streams.late = 0
    with torch.no_grad(), offloading.eagerly():
        block(hidden(), **arguments())
    assert streams.late == 0


def test_before_a_rehearsal_everything_is_moved(block, streams):
    offloading, x = offloading_of(block), hidden()
    with offloading.eagerly():
        loss = block(x, **arguments()).square().mean()
    assert streams.late == LAYERS * len(MODULES)
    loss.backward()
    found, ((expected,), weights) = gradients(block), plain(block, 1)
    assert torch.equal(x.grad, expected)
    assert_equal(found, weights)


def test_a_second_backward_says_what_it_is(block):
    offloading = settled(block)
    with offloading.eagerly():
        loss = block(hidden(), **arguments()).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="was backpropagated a second time"):
        loss.backward()


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_a_slot_pins_what_it_moves(block, fraction):
    offloading = offloading_of(block, fraction)
    moves = rehearsed(block, offloading)
    a_copy = TOKENS * HIDDEN * 4
    assert moves.host_bytes() == (LAYERS * len(MODULES) - len(offloading.stays)) * a_copy
    before = [id(t) for pool in moves._manager.cpu_tensor_pool._pools.values() for t in pool["all"]]
    with moves.capturing():  # another bucket's: graphs of the first hold on to this memory
        layers = [WholeLayer(layer) for layer in block.layers]
        run_layers(layers, lambda n, layer, x: moves.rehearse(n, layer.layer, x, layer_of(layer)))
        moves.settle()
    after = [id(t) for pool in moves._manager.cpu_tensor_pool._pools.values() for t in pool["all"]]
    assert after == before


def test_a_name_that_moves_nothing_is_told(block, caplog):
    offloading = offloading_of(block, modules=(*MODULES, "mlp_norm"))
    rehearsed(block, offloading)
    assert "moves no mlp_norm in this model chunk" in caplog.text


def test_closing_leaves_megatrons_own_manager_at_its_beginning(block):
    offloading = settled(block)
    own = core.PipelineOffloadManager.get_instance()
    own._is_warmup = False
    offloading.close()
    assert core.PipelineOffloadManager.get_instance()._is_warmup


def test_memory_of_experts_is_counted_too(block):
    offloading = settled(block)
    with offloading.eagerly():
        part = core.FineGrainedActivationOffloadingInterface(True, hidden(), "expert_fc1")
        with part as x:
            y = x.sin()
        part.group_offload(y)
    (manager,) = offloading._all
    pooled = sum(t.numel() * 4 for pool in manager.cpu_tensor_pool._pools.values() for t in pool["all"])
    assert offloading.host_bytes() - pooled == TOKENS * HIDDEN * 4


def test_megatrons_own_manager_sees_nothing_of_it(block):
    own = core.PipelineOffloadManager.get_instance()
    offloading = settled(block)
    with offloading.eagerly():
        assert core.PipelineOffloadManager.get_instance() is not own
        block(hidden(), **arguments()).sum().backward()
    assert core.PipelineOffloadManager.get_instance() is own
    assert not own._cached_chunks_forward
    with pytest.raises(ZeroDivisionError), offloading.eagerly():
        raise ZeroDivisionError
    assert core.PipelineOffloadManager.get_instance() is own


def test_delayed_copies_begin_before_the_forward_ends(block, streams):
    offloading = settled(block)
    streams.late = 0
    given = x = hidden()
    with offloading.eagerly():
        manager = core.PipelineOffloadManager.get_instance()
        for _ in range(3):
            part = core.FineGrainedActivationOffloadingInterface(True, x, "qkv_linear")
            with part as y:
                y = y.sin()
            manager._in_replay = True
            x = part.group_offload(y, delay_offload=True)
            manager._in_replay = False
        assert streams.late == 0
    assert streams.late == 3
    x.sum().backward()
    again = hidden()
    again.sin().sin().sin().sum().backward()
    assert torch.equal(given.grad, again.grad)


def reference(groups, fraction):
    """What megatron-core's manager keeps after a first step of one micro-batch with these groups."""
    manager = core.PipelineOffloadManager()
    core.PipelineOffloadManager.OFFLOAD_MGR = manager
    manager.init_model_chunk_offload_handler(0, 1, None, activation_offload_fraction=fraction)
    (handler,) = manager._cached_chunks_forward
    for group in groups:
        handler.on_group_start_forward(group.name)
        handler.offload_groups[-1].total_offload_bytes = sum(group.copies)
    manager.post_warmup_callback()
    return [group.offload and group.total_offload_bytes > 0 for group in handler.offload_groups]


def test_what_stays_is_what_megatron_core_would_keep(monkeypatch):
    monkeypatch.setattr(core, "print_offload_summary_table", lambda *_, **options: None)
    rng = random.Random(4)
    for _ in range(200):
        names = rng.sample(["qkv_linear", "core_attn", "attn_proj", "mlp_norm"], rng.randint(1, 4))
        groups = [Group(name, (rng.choice([0, 8]),)) for _ in range(rng.randint(1, 6)) for name in names]
        groups = [Group(g.name, tuple(n for n in g.copies if n)) for g in groups]
        fraction = rng.choice([0, 0.25, 0.3, 0.5, 0.75, 1])
        stays = choose_staying(groups, fraction)
        seen = dict.fromkeys(names, 0)
        found = []
        for group in groups:
            found.append((group.name, seen[group.name]) not in stays and bool(group.copies))
            seen[group.name] += 1
        assert found == reference(groups, fraction)


def test_what_graphs_of_layers_reserve_less():
    layer = [
        Group("qkv_linear", (16 * MIB, 16 * MIB), (16 * MIB,)),  # the other is the layer's input, which is static
        Group("core_attn", (16 * MIB,) * 4, (16 * MIB,) * 4),
        Group("attn_proj", (16 * MIB,), ()),  # moved already
    ]
    layers = [layer] * 10
    groups = [group for layer in layers for group in layer]
    # kept: all, and 4 gradients. moved: one layer's, the last's, which stay; 4 gradients; and a group coming back
    assert freed_bytes(layers, choose_staying(groups, 1.0)) == ((50 + 4) - (5 + 4 + 4)) * 16 * MIB
    assert freed_bytes(layers, choose_staying(groups, 0.0)) == 0
    assert freed_bytes([[], []], frozenset()) == 0
