"""Activations on the host on a GPU, a process each: `python tests/gpu/gpu_cases_offload.py NAME`."""

from __future__ import annotations

import gc
import itertools
import sys

import numpy as np
import torch

from thdprof.offload.allocator import Segments
from thdprof.offload.plan import Choice
from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack
from thdprof.runtime.padding import boundaries_of, pad_cu_seqlens, to_device
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN, HEADS, LAYERS = 4096, 1024, 16, 8
BUCKETS = [Bucket(8, TOKENS, TOKENS), Bucket(32, TOKENS, TOKENS)]
WHOLE, HALF = Choice(), Choice(fraction=0.5)
SEGMENT_BYTES = 20 * 2**20
"""By which a pool grows where tensors are below 10 MiB."""


def make_stack(dropout: float = 0.0) -> PackedStack:
    torch.manual_seed(0)
    return PackedStack(num_layers=LAYERS, hidden=HIDDEN, heads=HEADS, dropout=dropout).cuda().bfloat16().train()


def make_graphs(offload: Choice | None, *, slots: int = 1, dropout: float = 0.0, buckets=BUCKETS) -> GraphedModule:
    return GraphedModule(make_stack(dropout), buckets, num_slots=slots, sample_every=0, offload=offload)


def boundaries(rng: np.random.Generator, documents: int) -> np.ndarray:
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), documents - 1, replace=False))
    return np.concatenate(([0], cuts, [TOKENS])).astype(np.int32)


def batches_of(documents, seed: int = 1):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    return [(boundaries(rng, n), torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)) for n in documents]


def one_f_one_b(model, batches, *, in_flight: int, run=None) -> list[torch.Tensor]:
    """Outputs, input gradients, then weights' gradients, all copies, with `in_flight` micro-batches at a time."""
    run = run or (lambda x, cu: model(x, pack(cu)))
    torch.manual_seed(7)
    seen, held = [], []
    for cu, x in [*batches, *[(None, None)] * in_flight]:
        if len(held) == in_flight or x is None:
            given, y = held.pop(0)
            y.float().square().mean().backward()
            seen.append(given.grad.clone())
        if x is not None:
            given = x.clone().requires_grad_()
            y = run(given, cu)
            held.append((given, y))
            seen.append(y.detach().clone())
        if not held:
            break
    parameters = list((model.module if isinstance(model, GraphedModule) else model).parameters())
    seen += [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    return seen


def differing(ours, theirs) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


def padded(stack: PackedStack):
    """Runs `stack` eagerly, padded as the bucket that would be replayed."""

    def run(x, cu):
        for bucket in BUCKETS:
            if len(cu) - 1 <= bucket.max_seqs:
                host = pad_cu_seqlens(cu, max_seqs=bucket.max_seqs, n_tokens=TOKENS)
                metadata = pack(host, max_seqlen=bucket.max_seqlen)
                break
        else:
            metadata = pack(cu)
        return stack(x, to_device(metadata, boundaries_of(metadata, TOKENS, "none"), TOKENS, x.device))

    return run


def release(*graphs: GraphedModule) -> None:
    for one in graphs:
        one.close()
    gc.collect()
    torch.cuda.empty_cache()


def allocator() -> None:
    """The model of torch's allocator reserves what torch's does, whatever comes and goes."""
    rng, model, held = np.random.default_rng(2), Segments(), {}
    torch.cuda.init()
    start = torch.cuda.memory_reserved()
    for number in range(4000):
        if held and rng.random() < 0.48:
            name = int(rng.choice(list(held)))
            del held[name]
            model.give_back(name)
        else:
            size = int(2 ** rng.uniform(9, 26))
            held[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            model.take(number, size)
        found = torch.cuda.memory_reserved() - start
        allowed = 0 if number < 1000 else 0.02 * found  # of blocks of one size it takes that of the lowest address
        assert abs(found - model.reserved_bytes) <= allowed, f"{found}, {model.reserved_bytes} after {number + 1} steps"
    print(f"{model.reserved_bytes / 2**20:.0f} MiB reserved, {sum(map(len, held.values())) / 2**20:.0f} taken")


def graph_memory() -> None:
    """Of all, of shares, and of some modules."""
    parts = Choice(modules=("up", "attention.qkv"))
    pools_are_smaller(WHOLE, HALF, Choice(fraction=0.75), Choice(fraction=0.3), parts)


def graph_memory_of_one_module() -> None:
    """Of the inputs of one linear layer."""
    pools_are_smaller(Choice(modules=("down",)))


def pools_are_smaller(*choices: Choice) -> None:
    """Pools are smaller by what the first passes predicted, within 10%; numbers are those of graphs that keep all."""
    batches = batches_of([3, 8, 20, 32, 5, 9])
    plain = make_graphs(None)
    expected = one_f_one_b(plain, batches, in_flight=1)
    assert not differing(one_f_one_b(plain, batches, in_flight=1), expected), "the kernels are not deterministic"
    before = plain.pool_bytes()
    release(plain)
    for choice in choices:
        graphs = make_graphs(choice)
        found = one_f_one_b(graphs, batches, in_flight=1)
        plan, after = graphs.offloaded(), graphs.pool_bytes()
        freed = before - after
        print(
            f"{choice}: {before / 2**20:.0f} -> {after / 2**20:.0f} MiB, {freed / 2**20:.1f} less, predicted "
            f"{plan.device_bytes_freed / 2**20:.1f} of {plan.offloaded_bytes / 2**20:.1f} moved, "
            f"{graphs.host_bytes() / 2**20:.0f} on the host"
        )
        assert graphs.stats().captures == 2, str(graphs.stats())
        assert not (wrong := differing(found, expected)), f"{len(wrong)} of {len(found)} differ, first {wrong[:5]}"
        assert plan.offloaded_bytes <= plan.host_bytes == graphs.host_bytes()
        allowed = max(0.1 * plan.device_bytes_freed, SEGMENT_BYTES)
        assert abs(freed - plan.device_bytes_freed) <= allowed
        release(graphs)


def peak_of(graphs: GraphedModule, cu: np.ndarray, x: torch.Tensor) -> int:
    """Bytes that a forward and a backward allocate at most, where the weights' gradients are there already."""
    for p in graphs.parameters():
        p.grad = torch.zeros_like(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    given = x.clone().requires_grad_()
    graphs(given, pack(cu)).float().square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - start
    for p in graphs.parameters():
        p.grad = None
    return peak


def eager_memory() -> None:
    """A micro-batch that fits no bucket moves its activations too, and its peak is lower by as much."""
    (small, large), peaks, results = batches_of([8, 60]), [], []
    for choice in (None, WHOLE):
        graphs = make_graphs(choice, buckets=BUCKETS[:1])
        one_f_one_b(graphs, [small], in_flight=1)
        peaks.append([peak_of(graphs, *large) for _ in range(2)][-1])  # the second finds its host memory pinned
        results.append(one_f_one_b(graphs, [large, large], in_flight=2))
        assert graphs.stats().fallbacks[FallbackReason.too_many_seqs] == 4
        if choice is not None:
            plan = graphs.offloaded()
            print(f"{[p / 2**20 for p in peaks]} MiB, predicted {plan.device_bytes_freed / 2**20:.1f} less")
            assert abs(peaks[0] - peaks[1] - plan.device_bytes_freed) <= 0.1 * plan.device_bytes_freed
            assert graphs.host_bytes() == 3 * plan.host_bytes  # the slot's, and two eager ones' in flight
        release(graphs)
    assert not differing(*results)


def orders() -> None:
    """Two slots in 1F1B order, mixed buckets, fallbacks and dropout: bit for bit as eager of the same padded input."""
    batches = batches_of(np.random.default_rng(3).choice([3, 8, 9, 20, 32, 33, 60], 24))
    for dropout, choice in itertools.product((0.0, 0.1), (WHOLE, HALF)):
        plain, graphs = make_stack(dropout), make_graphs(choice, slots=2, dropout=dropout)
        expected = one_f_one_b(plain, batches, in_flight=2, run=padded(plain))
        again = one_f_one_b(plain, batches, in_flight=2, run=padded(plain))
        found = one_f_one_b(graphs, batches, in_flight=2)
        itself = set(differing(again, expected))
        wrong = [i for i in differing(found, expected) if i not in itself]
        print(dropout, choice.fraction, graphs.stats(), f"eager differs from itself in {len(itself)} of {len(found)}")
        assert not wrong, f"{len(wrong)} of {len(found)} differ, first {wrong[:5]}"
        assert len(itself) < len(found) // 4
        assert graphs.stats().fallbacks[FallbackReason.too_many_seqs] > 2
        assert graphs.stats().fallbacks[FallbackReason.no_free_slot] == 0
        release(graphs)


def soak() -> None:
    """100 steps of training with fallbacks, two slots: losses are those of a twin that keeps all, all finite."""
    results = []
    for choice in (None, WHOLE):
        graphs = make_graphs(choice, slots=2)
        optimizer = torch.optim.SGD(graphs.parameters(), lr=0.05)
        rng, losses = np.random.default_rng(5), []
        torch.manual_seed(5)
        for _ in range(100):
            held = []
            for _ in range(2):
                cu = boundaries(rng, int(rng.choice([3, 8, 20, 40])))
                x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                held.append(graphs(x, pack(cu)).float().square().mean())
            for loss in held:
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.stack(losses))
        print(graphs.stats())
        assert graphs.stats().replays.total() > 100
        assert graphs.stats().fallbacks[FallbackReason.too_many_seqs] > 20
        release(graphs)
    assert torch.isfinite(results[0]).all()
    assert results[0][-1] < results[0][0]
    equal = (results[0] == results[1]).sum().item()
    assert equal == len(results[0]) == 200, f"{equal} losses equal"


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # which torch takes for attention only where it raises
    globals()[sys.argv[1]]()
    print("ok")
