"""What is moved to the host, where to and when; on the CPU, with copies as late and as early as order allows."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from support.late_mover import LateMover
from torch import nn
from torch.nn import functional

from thdprof.offload.plan import NOT_MOVED, SLAB_BYTES, Choice, SavedStorage, freed_in_turn, plan_in_turn, plan_offload
from thdprof.runtime import offload as offload_passes
from thdprof.runtime.offload import Discovery, EagerOffload, EagerPass, HostBuffers, OffloadError, PassOffload

KIB, MIB = 2**10, 2**20


def storage(nbytes, first, last=None, *, module="layers.0.mlp", released=True):
    last = first if last is None else last
    return SavedStorage(nbytes=nbytes, modules=(module,), first=first, last=last, released=released)


def planned(storages, **choice):
    positions = max(s.last for s in storages) + 1
    at = [NOT_MOVED] * positions
    for number, s in enumerate(storages):
        at[s.first] = at[s.last] = number
    return plan_offload(at, storages, Choice(**{"min_bytes": 1, **choice}))


def test_only_what_moving_frees_is_moved():
    plan = planned([storage(4096, 0), storage(4096, 1, released=False), storage(100, 2)], min_bytes=512)
    assert [place is not None for place in plan.places] == [True, False, False]
    assert plan.offloaded_bytes == 4096
    assert plan.saved_bytes == 4196


@pytest.mark.parametrize(("fraction", "moved"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_a_fraction_moves_what_is_saved_first(fraction, moved):
    plan = planned([storage(1000, n) for n in range(4)], fraction=fraction)
    assert [place is not None for place in plan.places] == [True] * moved + [False] * (4 - moved)


@pytest.mark.parametrize(
    ("chosen", "module", "taken"),
    [
        ("all", "", True),
        ("core_attn", "block.layers.3.self_attention.core_attention", True),
        ("core_attn", "block.layers.3.self_attention.core_attention.fused_attention", True),
        ("core_attn", "block.layers.3.self_attention.linear_proj", False),
        ("qkv_linear", "block.layers.3.self_attention.linear_kv_up_proj", True),
        ("qkv_linear", "block.layers.3.self_attention.linear_proj", False),
        ("mlp_act", "block.layers.3.mlp.router", True),
        ("mlp_act", "block.layers.3.mlp.experts.linear_fc1", False),
        ("attention", "layers.0.attention.qkv", True),
        ("mlp_act", "block.layers.3.mlp", True),
        ("mlp_act", "block.layers.3.mlp.linear_fc1", False),
        ("mlp_fc1", "block.layers.3.mlp.linear_fc1", True),
        ("expert_fc1", "block.layers.3.mlp.experts.linear_fc1", True),
        ("moe_act", "block.layers.3.mlp.experts", True),
        ("moe_act", "block.layers.3.mlp.shared_experts", False),
        ("attention.qkv", "layers.0.attention.qkv", True),
        ("attention.qkv", "layers.0.other_attention.qkv", False),
    ],
)
def test_modules_are_named_as_megatron_names_them_or_by_the_end_of_their_names(chosen, module, taken):
    assert Choice(modules=(chosen,)).takes(module) is taken


def test_a_storage_that_a_chosen_module_saves_too_is_moved():
    shared = SavedStorage(nbytes=10, modules=("a.core_attention", "a.linear_proj"), first=0, last=1, released=True)
    assert plan_offload([0, 0], [shared], Choice(modules=("attn_proj",), min_bytes=1)).offloaded_bytes == 10


def test_the_host_holds_all_that_is_moved_without_overlap():
    sizes = [SLAB_BYTES // 3 + n for n in range(5)] + [3 * SLAB_BYTES + 1, 1000]
    plan = planned([storage(size, n) for n, size in enumerate(sizes)])
    taken = {}
    for place, size in zip(plan.places, sizes, strict=True):
        assert place.offset % 512 == 0
        assert place.offset + size <= plan.slabs[place.slab]
        for begin, end in taken.get(place.slab, []):
            assert place.offset >= end or place.offset + size <= begin
        taken.setdefault(place.slab, []).append((place.offset, place.offset + size))
    assert sum(map(len, taken.values())) == len(sizes)
    assert all(slab & (slab - 1) == 0 for slab in plan.slabs)
    assert plan.host_bytes == sum(plan.slabs)


def test_what_is_freed_is_the_difference_of_what_is_reserved():
    equal = [storage(16 * MIB, n) for n in range(80)]  # of a size whose segments have no rest
    assert planned(equal, fraction=0.0).device_bytes_freed == 0
    all_moved = planned(equal)
    assert all_moved.window_bytes == 8 * 16 * MIB
    # kept: all, and a gradient beside them. moved: at the begin of the backward 8 ahead, and 1 that is used; for the
    # first 3 of them another is reloaded before they go, and then 4 gradients are there
    assert all_moved.device_bytes_freed == (80 + 1 - 9 - 4) * 16 * MIB
    half = planned(equal, fraction=0.5)
    assert half.window_bytes == 5 * 16 * MIB
    assert half.device_bytes_freed == (80 + 1 - 40 - 5 - 1) * 16 * MIB  # 40 kept, 5 on their way, and a gradient


def test_passes_in_turn_have_copies_under_way_one_at_a_time():
    parts = [planned([storage(16 * MIB, n) for n in range(16)]) for _ in range(3)]
    assert freed_in_turn([]) == 0
    (one, three) = (freed_in_turn(parts[:1]), freed_in_turn(parts))
    assert one == parts[0].device_bytes_freed > 0
    assert three == one + 2 * 16 * 16 * MIB  # what the others save is away while one runs
    assert freed_in_turn(plan_in_turn(parts, Choice(fraction=0.0, min_bytes=1))) == 0


def test_small_tensors_share_segments_or_fit_them():
    plan = planned([storage(8 * MIB, n) for n in range(40)], fraction=0.5)
    # shared, two in 20 MiB: 20 segments and one for a gradient, or 12 of them with 20 kept, 2 on their way and a
    # gradient; fitting: 41 and 23 of 8 MiB. The middle of both is taken
    assert plan.device_bytes_freed == ((420 + 328) - (240 + 184)) // 2 * MIB


class Layer(nn.Module):
    """Saves views of one storage, a strided view, one tensor twice, an output that stays, and small ones."""

    def __init__(self, width, *, returns_inner=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.returns_inner = returns_inner

    def forward(self, x):
        gate, value, third = self.up(self.norm(x)).chunk(3, dim=-1)
        inner = functional.gelu(gate) * value * torch.tanh(third)
        return x + self.down(inner) * inner.sigmoid()


class Stack(nn.Module):
    def __init__(self, layers=6, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def passes(stack, offload, count=3, tokens=64, seed=1):
    """Outputs and gradients of some passes, the same with and without offloading."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        x = torch.randn(tokens, 32, generator=generator).requires_grad_()
        with offload.forward() if offload else nullcontext():
            y = stack(x)
        loss = y.square().mean()
        with offload.backward() if offload else nullcontext():
            loss.backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in stack.parameters())]
        stack.zero_grad()
    return found


class Scaled(torch.autograd.Function):
    """Saves a view that it makes of its input, as Transformer Engine's linear layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        flat = x.view(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        return (flat * weight).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        flat, weight = ctx.saved_tensors
        grad = grad.reshape(flat.shape)
        return (grad * weight).view(*grad.shape), (grad * flat).sum(0)


class Scaling(nn.Module):
    """Layers whose functions save views of what the layers before them gave out."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((32,), 1.5 + n) for n in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = Scaled.apply(x, weight) + x
        return x


def test_views_that_a_function_makes_of_its_input_are_moved():
    stack, mover = Scaling(), LateMover()
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    expected, found = passes(stack, None), passes(stack, offload)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.plan is not None
    assert offload.plan.offloaded_bytes == 2 * 64 * 32 * 4  # not the first's, which is the input
    assert mover.back_copies == 2 * 2


def test_views_of_weights_are_not_looked_at():
    class Weighed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight.view(-1, 32))
            return x * weight.view(-1, 32)[0]

        @staticmethod
        def backward(ctx, grad):
            (flat,) = ctx.saved_tensors
            return grad * flat[0], torch.zeros_like(flat).view(-1)

    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64 * KIB))

        def forward(self, x):
            return Weighed.apply(x, self.weight).tanh()

    stack, mover = Weighing(), LateMover()
    discovery = Discovery(stack, mover, Choice(min_bytes=4 * KIB), [])
    with discovery.forward():
        stack(torch.randn(64, 32, requires_grad=True))
    assert [s.nbytes for s in discovery.plan.storages] == [64 * 32 * 4]  # what tanh gives out
    assert discovery.plan.storage_at[0] == NOT_MOVED


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("modules", [("all",), ("up",), ("norm", "down")])
def test_gradients_are_those_without_offloading(fraction, modules):
    stack, mover = Stack(), LateMover()
    choice = Choice(modules=modules, fraction=fraction, min_bytes=4 * KIB)
    offload = PassOffload(stack, choice, mover, HostBuffers())
    expected, found = passes(stack, None), passes(stack, offload)
    assert len(found) == len(expected) > 60
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.plan is not None
    moved = sum(place is not None for place in offload.plan.places)
    assert moved > 0
    assert mover.out_copies == mover.back_copies == 2 * moved  # the first pass shows what to move
    assert mover.most_waiting <= 2 * offload.plan.window_bytes
    assert not mover.unwaited
    assert offload.plan.offloaded_bytes <= offload.plan.saved_bytes


def test_the_pass_keeps_what_the_plan_says():
    stack, mover = Stack(), LateMover()
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, offload, count=1)
    x = torch.randn(64, 32, requires_grad=True)
    with offload.forward():
        y = stack(x)
    entries = offload._moves._entries.values()
    held = sum(len(e.device) for e in entries if e.device is not None)
    assert held == 0
    assert len(entries) == sum(place is not None for place in offload.plan.places)
    with offload.backward():
        y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in stack.parameters())


def test_what_stays_alive_anyway_is_not_moved():
    stack = Stack(layers=2)
    stack.layers[0].register_forward_hook(lambda module, args, output: setattr(stack, "seen", output))
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), LateMover(), HostBuffers())
    passes(stack, offload, count=1)
    plain = PassOffload(without := Stack(layers=2), Choice(min_bytes=4 * KIB), LateMover(), HostBuffers())
    passes(without, plain, count=1)
    assert plain.plan.offloaded_bytes - offload.plan.offloaded_bytes == 64 * 32 * 4  # the first layer's output


def test_a_choice_that_moves_nothing_is_told(caplog):
    stack = Stack(layers=2)
    for choice in (Choice(modules=("core_attn",), min_bytes=4 * KIB), Choice()):
        caplog.clear()
        offload = PassOffload(stack, choice, LateMover(), HostBuffers())
        passes(stack, offload, count=2)
        (record,) = caplog.records
        assert "offloading moves nothing: " + choice.modules[0] in record.getMessage()


def test_a_pass_that_saves_other_tensors_is_refused():
    stack = Stack(layers=2)
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), LateMover(), HostBuffers())
    passes(stack, offload, count=1)
    with pytest.raises(OffloadError, match=r"a storage of \d+ bytes was saved"):
        passes(stack, offload, count=1, tokens=72)
    stack.layers.append(Layer(32))
    with pytest.raises(OffloadError, match=r"saved tensor|tensors were saved"):
        passes(stack, offload, count=1)


def test_reloads_that_nothing_asks_for_are_waited_for():
    stack, mover = Stack(), LateMover()
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, offload, count=1)
    x = torch.randn(64, 32, requires_grad=True)
    with offload.forward():
        y = stack(x)
    with offload.backward():
        torch.autograd.grad(y.sum(), stack.layers[-1].down.bias)
    assert mover.back_copies > 0
    assert not mover.unwaited


def test_a_backward_may_be_asked_twice():
    stack, mover = Stack(layers=2), LateMover()
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, offload, count=1)
    x = torch.randn(64, 32, requires_grad=True)
    with offload.forward():
        y = stack(x)
    with offload.backward():
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(stack(x).sum(), x)[0])


def test_compiled_functions_save_the_same_in_their_first_pass():
    compiled = torch.compile(lambda x, y: functional.gelu(x) * torch.tanh(y) + x.sigmoid(), backend="aot_eager")

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = compiled(one(x), other(x))
            return x

    stack, mover = Compiled(), LateMover()
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    found, expected = passes(stack, offload), passes(stack, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert mover.out_copies > 4


def test_buckets_of_a_slot_share_its_host_memory():
    mover, buffers = LateMover(), HostBuffers()
    large = buffers.reserve(mover, (1024, 4096))
    assert buffers.nbytes() == 5120
    assert [len(s) for s in buffers.reserve(mover, (512, 2048))] == [1024, 4096]
    assert {id(s) for s in buffers.reserve(mover, (4096,))} == {id(large[1])}
    assert mover.pins == 2
    buffers.reserve(mover, (4096, 4096))
    assert buffers.nbytes() == 5120 + 4096


@pytest.mark.parametrize(("tokens", "moves"), [(64, True), (48, False)])
def test_eager_passes_move_what_agrees_with_the_plan_and_give_their_host_memory_back(tokens, moves):
    stack, mover, free = Stack(), LateMover(), []
    made = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, made, count=1)
    expected = passes(stack, None, count=1, tokens=tokens)
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    session = EagerPass(made.plan, HostBuffers(), mover, [x], free)
    with session.forward():
        y = stack(x)
    del session
    assert not free
    y.square().mean().backward()
    found = [y.detach(), x.grad, *(p.grad for p in stack.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (mover.out_copies > 0) is moves
    assert not mover.unwaited
    del y
    gc.collect()
    assert len(free) == 1


def test_an_eager_pass_may_get_its_input_from_another_module():
    """A graph's input is a leaf; outside it may be an embedding's output, saved all the same."""
    stack, mover, embed = Stack(), LateMover(), nn.Linear(32, 32)
    static = torch.zeros(64, 32, requires_grad=True)
    made = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers(), [static])
    with made.forward():
        y = stack(static)
    with made.backward():
        y.sum().backward()
    found = []
    for offloads in (False, True):
        embed.zero_grad()
        x = embed(torch.ones(64, 32))
        with EagerPass(made.plan, HostBuffers(), mover, [x], []).forward() if offloads else nullcontext():
            y = stack(x)
        y.square().mean().backward()
        found.append(embed.weight.grad.clone())
    assert torch.equal(*found)
    assert mover.out_copies == sum(place is not None for place in made.plan.places) > 10


def test_an_eager_pass_of_other_code_is_right_too():
    stack, mover = Stack(layers=4), LateMover()
    made = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, made, count=1)
    other = Stack(layers=4)
    other.layers[1].norm = nn.Identity()
    expected = passes(other, None, count=1)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with EagerPass(made.plan, HostBuffers(), mover, [x], []).forward():
        y = other(x)
    y.square().mean().backward()
    found = [y.detach(), x.grad, *(p.grad for p in other.parameters() if p.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert mover.out_copies > 0


def test_host_memory_that_cannot_be_had_is_asked_for_again(monkeypatch):
    """An eager pass that finds none raises, and the next one begins anew."""
    stack, mover = Stack(), LateMover()
    made = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    passes(stack, made, count=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(offload_passes, "Mover", lambda *streams: mover)
    eager = EagerOffload(SimpleNamespace(device=mover.device), None)
    with monkeypatch.context() as full:
        full.setattr(mover, "pinned", lambda nbytes: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            eager.forward(made.plan, [])
    assert len(eager._free) == len(eager._all) == 1
    x = torch.randn(64, 32, requires_grad=True)
    with eager.forward(made.plan, [x]):
        y = stack(x)
    assert eager.nbytes() == made.plan.host_bytes
    del y
    gc.collect()
    with eager.forward(made.plan, [x]):
        stack(x)
    assert eager.nbytes() == made.plan.host_bytes  # given back by a pass that was never backpropagated


def test_what_is_saved_on_another_stream_stays_on_the_device():
    """As of shared experts, which run beside the others: nothing would order their copies."""
    stack, mover = Stack(), LateMover()
    beside = stack.layers[2]
    own = beside.forward

    def forward(x):
        mover.elsewhere = True
        try:
            return own(x)
        finally:
            mover.elsewhere = False

    beside.forward = forward
    offload = PassOffload(stack, Choice(min_bytes=4 * KIB), mover, HostBuffers())
    found, expected = passes(stack, offload), passes(stack, None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    named = {name for s in offload.plan.storages for name in s.modules}
    assert any(name.startswith("layers.1") for name in named)
    assert not any(name.startswith("layers.2") for name in named)
