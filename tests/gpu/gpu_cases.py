"""Scenarios that need a GPU, each run in a process of its own: `python tests/gpu/gpu_cases.py NAME`."""

from __future__ import annotations

import gc
import itertools
import sys
from contextlib import contextmanager

import numpy as np
import torch

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, PackedSequence, pack
from thdprof.runtime.padding import pad_cu_seqlens
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN, HEADS = 512, 256, 4
BUCKETS = [Bucket(8, 512, TOKENS), Bucket(32, 512, TOKENS)]


def make_stack(dropout: float = 0.0, layers: int = 3) -> PackedStack:
    torch.manual_seed(0)
    return PackedStack(num_layers=layers, hidden=HIDDEN, heads=HEADS, dropout=dropout).cuda().bfloat16().train()


def boundaries(rng: np.random.Generator, documents: int, tokens: int = TOKENS) -> np.ndarray:
    cuts = np.sort(rng.choice(np.arange(1, tokens), documents - 1, replace=False))
    return np.concatenate(([0], cuts, [tokens])).astype(np.int32)


def padded_for(stack: GraphedModule, cu: np.ndarray):
    """The metadata that an eager run must get to use the same kernels: padded to the bucket that would be replayed."""
    documents = len(cu) - 1
    for bucket in sorted(BUCKETS):
        if documents <= bucket.max_seqs:
            host = pad_cu_seqlens(cu, max_seqs=bucket.max_seqs, n_tokens=TOKENS)
            return pack(host, max_seqlen=bucket.max_seqlen)
    return pack(cu)


def run_orders(dropout: float, num_microbatches: int = 60) -> None:
    """Mixed buckets, fallbacks and 1F1B orders: bit for bit equal to eager of the same padded input."""
    rng = np.random.default_rng(1)
    plain, wrapped = make_stack(dropout), make_stack(dropout)
    graphs = GraphedModule(wrapped, BUCKETS, num_slots=2, sample_every=0)
    batches = []
    for _ in range(num_microbatches):
        documents = int(rng.choice([3, 8, 9, 20, 32, 33, 60]))
        batches.append((boundaries(rng, documents), torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)))
    orders = []  # forward 1, forward 2, backward 1, forward 3, backward 2, ...
    for first in range(0, num_microbatches, 6):
        group = list(range(first, first + 6))
        orders += [("f", group[0])]
        for left, right in itertools.pairwise(group):
            orders += [("f", right), ("b", left)]
        orders += [("b", group[-1]), ("step", 0)]
    results = []
    for model, replayed in ((plain, False), (graphs, True)):
        torch.manual_seed(7)
        held, seen = {}, []
        for kind, index in orders:
            if kind == "f":
                cu, x = batches[index]
                x = x.clone().requires_grad_()
                y = model(x, pack(cu)) if replayed else eager_of_same_shape(model, x, cu)
                held[index] = (x, y)
                seen.append(y.detach().clone())
            elif kind == "b":
                x, y = held.pop(index)
                y.float().square().mean().backward()
                seen.append(x.grad.clone())
            else:
                parameters = list((model.module if replayed else model).parameters())
                seen += [p.grad.clone() for p in parameters]
                for p in parameters:
                    p.grad = None
        results.append(seen)
    compared = 0
    differing = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    compared = len(results[0])
    print(graphs.stats())
    assert not differing, f"{len(differing)} of {compared} tensors differ, first {differing[:5]}"
    assert compared > 400
    stats = graphs.stats()
    assert stats.fallbacks[FallbackReason.too_many_seqs] > 5
    assert len(stats.replays) == 2
    assert stats.fallbacks[FallbackReason.no_free_slot] == 0
    graphs.close()


def eager_of_same_shape(model, x, cu):
    metadata = padded_for(model, cu)
    device = x.device
    from thdprof.runtime.padding import boundaries_of, to_device

    return model(x, to_device(metadata, boundaries_of(metadata, TOKENS, "none"), TOKENS, device))


@contextmanager
def pytest_raises(kind, text):
    """pytest.raises, where pytest may be missing."""
    caught = ""
    try:
        yield
    except kind as error:
        caught = str(error)
    assert text in caught, f"expected {kind.__name__} with {text!r}, got {caught!r}"


def orders_without_dropout() -> None:
    run_orders(0.0)


def orders_with_dropout() -> None:
    run_orders(0.1)


def capture_changes_nothing() -> None:
    """Weights, gradients, buffers and random state are as they were."""
    stack = make_stack(0.1)
    stack.register_buffer("calls", torch.zeros(3, device="cuda"))
    for p in stack.parameters():
        p.grad = torch.randn_like(p)
    before = [(p.detach().clone(), p.grad.clone()) for p in stack.parameters()]
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    graphs = GraphedModule(stack, BUCKETS, num_slots=2)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    graphs._decide(graphs._describe((x, pack([0, TOKENS])), {}))
    assert graphs.stats().captures == 4
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for p, (weight, grad) in zip(stack.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(p.grad, grad)
    graphs.close()


def slots_and_leases() -> None:
    """A slot in use is never replayed; a dropped output gives it back; a second backward is refused."""
    graphs = GraphedModule(make_stack(), BUCKETS, num_slots=2)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = pack([0, 100, TOKENS])
    with graphs.stats().expect(captures=4, replays=2, fallbacks=1):
        first, second, third = (graphs(x, packed) for _ in range(3))
    assert graphs.stats().fallbacks[FallbackReason.no_free_slot] == 1
    kept = first.detach().clone()
    with graphs.stats().expect(replays=1):
        del second
        gc.collect()
        graphs(x * 2, packed)
    assert torch.equal(first, kept)
    first.sum().backward(retain_graph=True)
    with pytest_raises(RuntimeError, "second time"):
        first.sum().backward()
    third.sum().backward()
    graphs.close()


def hooks_and_main_grad() -> None:
    """Post-accumulate hooks fire once a backward; main_grad gets what a hook would add."""
    stack = make_stack()
    fired = []
    for i, p in enumerate(stack.parameters()):
        p.main_grad = torch.zeros(p.shape, device="cuda", dtype=torch.float32)

        def add(parameter, i=i):
            fired.append(i)
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

        p.register_post_accumulate_grad_hook(add)
    graphs = GraphedModule(stack, BUCKETS)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rng = np.random.default_rng(0)
    batches = [boundaries(rng, n) for n in (4, 40, 20)]
    for cu in batches:
        graphs(x, pack(cu)).float().square().mean().backward()
    count = len(list(stack.parameters()))
    assert sorted(fired) == sorted(list(range(count)) * 3)
    ours = [p.main_grad.clone() for p in stack.parameters()]
    for p in stack.parameters():
        p.main_grad.zero_()
    for cu in batches:
        eager_of_same_shape(stack, x, cu).float().square().mean().backward()
    assert all(torch.equal(p.main_grad, o) for p, o in zip(stack.parameters(), ours, strict=True))
    assert any(o.abs().sum() > 0 for o in ours)
    graphs.close()


def memory() -> None:
    """Three buckets cost hardly more than the largest, two slots twice one."""
    buckets = [Bucket(n, 512, 2048) for n in (16, 64, 256)]
    measured = {}
    for name, chosen, slots in (("largest", buckets[-1:], 1), ("three", buckets, 1), ("two slots", buckets, 2)):
        torch.manual_seed(0)
        stack = PackedStack(num_layers=8, hidden=1024, heads=16).cuda().bfloat16().train()
        graphs = GraphedModule(stack, chosen, num_slots=slots)
        x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cu = pack(np.arange(9) * 256)
        graphs(x, cu).sum().backward()
        measured[name] = sum(slot.pool_bytes() for slot in graphs._bank.slots)
        graphs.close()
        del graphs, stack, x
        gc.collect()
        torch.cuda.empty_cache()
    print({k: f"{v / 2**20:.0f} MiB" for k, v in measured.items()})
    assert measured["three"] <= 1.05 * measured["largest"]
    assert measured["two slots"] <= 2.05 * measured["three"]


def weights_are_read_anew() -> None:
    """After an optimizer step a replay uses the new weights, under autocast too."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    stack = PackedStack(num_layers=2, hidden=HIDDEN, heads=HEADS).cuda().train()  # float32 weights
    graphs = GraphedModule(stack, BUCKETS)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    for _ in range(4):
        cu = boundaries(rng, 5)
        x = torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = graphs(x, pack(cu))
            with torch.no_grad():
                expected = eager_of_same_shape(stack, x, cu)
        assert torch.equal(y, expected)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphs.stats().replays.total() == 4
    graphs.close()


def what_changes_is_noticed() -> None:
    """Another dtype runs eagerly; weights that moved, a gradient hook and a late backward are refused."""
    stack = make_stack()
    graphs = GraphedModule(stack, BUCKETS, capture="first_use")
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = pack([0, 7, TOKENS])
    with graphs.stats().expect(captures=1, replays=1):
        graphs(x, packed).sum().backward()
    with graphs.stats().expect(fallbacks=1):
        graphs(x.detach(), packed).sum().backward()
    assert graphs.stats().fallbacks[FallbackReason.input_differs] == 1
    graphs.eval()
    with graphs.stats().expect(fallbacks=1), torch.no_grad():
        graphs(x, packed)
    graphs.train()
    late = graphs(x, packed)
    graphs.recapture()
    with pytest_raises(RuntimeError, "closed or dropped"):
        late.sum().backward()
    with graphs.stats().expect(captures=1, replays=1):
        graphs(x, packed).sum().backward()
    parameter = next(stack.parameters())
    parameter.data = parameter.data.clone()
    with pytest_raises(RuntimeError, "moved in memory"):
        graphs(x, packed)
    graphs.recapture()
    graphs(x, packed).sum().backward()
    parameter.requires_grad_(False)
    with pytest_raises(RuntimeError, "requires_grad of parameter"):
        graphs(x, packed)
    parameter.requires_grad_(True)
    graphs.recapture()
    next(stack.parameters()).register_hook(lambda grad: grad * 2)
    with graphs.stats().expect(fallbacks=1):
        graphs(x, packed).sum().backward()
    assert graphs.stats().fallbacks[FallbackReason.capture_failed] == 1
    graphs.close()


def random_states_that_were_replaced() -> None:
    """Replays go on over random states that were set in place, and are refused over others, even over equal ones."""
    named = torch.Generator("cuda").manual_seed(3)
    stack = make_stack(dropout=0.1)
    graphs = GraphedModule(stack, BUCKETS, generators=[named])
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = pack([0, 7, TOKENS])

    def output() -> torch.Tensor:
        y = graphs(x, packed)
        y.sum().backward()
        return y.detach()

    torch.cuda.manual_seed(5)
    first = output()
    for restore in (
        lambda: torch.cuda.manual_seed(5),
        lambda: default.set_state(torch.Generator("cuda").manual_seed(5).get_state()),
        lambda: default.manual_seed(5).graphsafe_set_state(default.graphsafe_get_state()),
    ):
        restore()
        before = named.get_state()
        assert torch.equal(output(), first)  # the check has not changed what is drawn
        assert torch.equal(named.get_state(), before)
    assert not torch.equal(output(), first)
    own = default.graphsafe_get_state()
    try:
        for generator, number in ((named, 1), (default, 0)):
            generator.graphsafe_set_state(generator.clone_state())
            with pytest_raises(RuntimeError, f"random state {number} of 2 was replaced"):
                graphs(x, packed)
            graphs.recapture()
            torch.cuda.manual_seed(5)
            assert torch.equal(output(), first)
    finally:
        graphs.close()
        default.graphsafe_set_state(own)


def passes_without_gradients() -> None:
    """Under no_grad a replay gives its slot back at once, and the module's own numbers."""
    stack = make_stack()
    graphs = GraphedModule(stack, BUCKETS, no_grad="replay")
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = boundaries(np.random.default_rng(0), 5)
    with torch.no_grad(), graphs.stats().expect(fallbacks=1):
        graphs(x, pack(cu))  # nothing is captured yet, and a capture needs gradients
    graphs(x, pack(cu)).sum().backward()
    with torch.no_grad(), graphs.stats().expect(replays=3):
        for _ in range(3):
            y = graphs(x, pack(cu))
        assert torch.equal(y, eager_of_same_shape(stack, x, cu))
    graphs.eval()
    with torch.no_grad(), graphs.stats().expect(fallbacks=1):
        graphs(x, pack(cu))
    graphs.close()


def teardown_before_process_groups() -> None:
    """Graphs that hold a communicator are closed first, then the process group goes; nothing hangs or fails."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))

    class Reduced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = make_stack(layers=1)

        def forward(self, x, packed):
            y = self.stack(x, packed)
            dist.all_reduce(y.detach())
            return y

    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dist.all_reduce(x.detach().clone())
    with GraphedModule(Reduced(), BUCKETS) as graphs, graphs.stats().expect(captures=2, replays=2):
        for _ in range(2):
            graphs(x, pack([0, 9, TOKENS])).sum().backward()
    dist.destroy_process_group()
    assert not dist.is_initialized()


def document_indexes() -> None:
    """seq_idx reaches a captured module, padded, and changes with every micro-batch."""

    class Add(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), device="cuda"))

        def forward(self, x, packed):
            return x * self.scale + packed.seq_idx[:, None] + packed.cu_seqlens[1]

    graphs = GraphedModule(Add(), [Bucket(8, TOKENS, TOKENS)], tail_policy="append_dummy_seq")
    x = torch.zeros(TOKENS, 4, device="cuda", requires_grad=True)
    for cu in ([0, 3, 10], [0, 100, 200, TOKENS], [0, TOKENS]):
        y = graphs(x, pack(cu, with_seq_idx=True))
        y.sum().backward()
        ends = [*cu[1:], TOKENS] if cu[-1] < TOKENS else cu[1:]
        expected = torch.searchsorted(torch.tensor(ends), torch.arange(TOKENS), right=True) + cu[1]
        assert torch.equal(y[:, 0].cpu().long(), expected)
    assert graphs.stats().replays.total() == 3
    graphs.close()


class Boundaries(torch.nn.Module):
    """Shows the boundaries that a graph reads."""

    def forward(self, x, packed):
        weights = torch.arange(1, len(packed.cu_seqlens) + 1, device=x.device, dtype=torch.float32)
        told = (packed.cu_seqlens * weights).sum() + 1e5 * (packed.cu_seqlens_padded * weights).sum()
        return x * told


def padded_documents() -> None:
    """Valid and padded boundaries reach a graph, from the host with every tail policy, from the device without one."""
    valid, padded = np.array([0, 3, 9], np.int32), np.array([0, 4, 12], np.int32)
    compared = 0
    for policy in ("none", "append_dummy_seq", "extend_last"):
        for where in ("host", "device") if policy == "none" else ("host",):
            module = GraphedModule(
                Boundaries().cuda(), [Bucket(6, 16, 16)], tail_policy=policy, sample_every=0, capture="first_use"
            )
            x = torch.ones(16, device="cuda", requires_grad=True)
            on_device = {
                "cu_seqlens": torch.from_numpy(valid).cuda(),
                "cu_seqlens_padded": torch.from_numpy(padded).cuda(),
            }
            host = {"host": valid, "host_padded": padded} if where == "host" else {}
            packed = PackedSequence(max_seqlen=8, **on_device, **host)
            y = module(x, packed)
            tail = {"none": (valid, padded), "extend_last": (valid, [0, 4, 16])}
            wanted, memory = tail.get(policy, ([0, 3, 9, 9], [0, 4, 12, 16]))
            wanted, memory = (np.append(v, [v[-1]] * (7 - len(v))) for v in (wanted, memory))
            weights = np.arange(1, 8)
            expected = float((wanted * weights).sum() + 1e5 * (memory * weights).sum())
            assert y[0].item() == np.float32(expected), (policy, where, y[0].item(), expected)
            assert module.stats().replays.total() == 1, str(module.stats())
            y.sum().backward()
            compared += 1
            module.close()
    assert compared == 4


def capture_at_a_misfit() -> None:
    """Under `startup` the first micro-batch captures even if it falls back itself."""
    rng = np.random.default_rng(0)
    graphs = GraphedModule(make_stack(), BUCKETS)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with graphs.stats().expect(captures=2, fallbacks=1):
        graphs(x, pack(boundaries(rng, 60))).sum().backward()
    with graphs.stats().expect(replays=1):
        graphs(x, pack(boundaries(rng, 20))).sum().backward()
    graphs.close()


def fused_accumulation() -> None:
    """Kernels that add to main_grad themselves: replayed and eager micro-batches add up as eager ones alone do."""
    import transformer_engine.pytorch as te

    def make():
        torch.manual_seed(0)
        made = torch.nn.Sequential(
            te.LayerNormLinear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16),
            te.Linear(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16),
        ).cuda()
        for parameter in made.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False

            def accumulate(*unused, parameter=parameter):  # as megatron-core's DistributedDataParallel
                if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                    parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

            parameter.node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            parameter.node.register_hook(accumulate)
        return made

    class Takes(torch.nn.Module):
        def __init__(self, inner) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x, packed):
            return self.inner(x)

    rng = np.random.default_rng(0)
    plain, model = Takes(make()), Takes(make())
    graphs = GraphedModule(model, BUCKETS, sample_every=0)
    for documents in (3, 60, 20, 8, 33, 5):
        x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        for run in (plain, graphs):
            given = x.clone().requires_grad_()
            run(given, pack(boundaries(rng, documents))).float().square().mean().backward()
    assert graphs.stats().replays.total() == 4, str(graphs.stats())
    compared = 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None
        assert theirs.main_grad.abs().sum() > 0
        assert torch.equal(ours.main_grad, theirs.main_grad), ours.shape
        compared += 1
    assert compared == 4
    graphs.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
