"""Captures that fail, on a GPU, each case in a process of its own: `python tests/gpu/capture_cases.py NAME`."""

from __future__ import annotations

import gc
import itertools
import sys

import torch

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack
from thdprof.runtime.padding import boundaries_of, to_device
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN, HEADS = 512, 256, 4
BUCKETS = [Bucket(8, TOKENS, TOKENS), Bucket(16, TOKENS, TOKENS), Bucket(32, TOKENS, TOKENS)]
SMALL, MIDDLE, LARGE = ([*range(0, TOKENS, TOKENS // n), TOKENS] for n in (8, 16, 32))


class Failing(torch.nn.Module):
    """A stack with dropout that fails as `how` says while it is captured for 16 documents."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = PackedStack(num_layers=2, hidden=HIDDEN, heads=HEADS, dropout=0.1).cuda().bfloat16().train()
        self.how = how

    def forward(self, x, packed):
        y = self.stack(x, packed)
        if len(packed.cu_seqlens) == 17 and torch.cuda.is_current_stream_capturing():
            self.how(y)
        return y


def reads_on_the_host(y) -> None:
    """What a capture does not allow: it is invalidated."""
    y.sum().item()


def takes_too_much(y) -> None:
    """Takes all memory in pieces of a GiB, inside the graph's pool, and then asks for more."""
    taken = []
    for _ in itertools.count():
        taken.append(torch.empty(1 << 30, dtype=torch.uint8, device=y.device))


def raises_in_python(y) -> None:
    """An error that leaves the capture itself valid."""
    raise ValueError("not while it is captured")


def on_a_side_stream(y) -> None:
    """Work that never joins the captured stream: the capture cannot end."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.detach().clone()


def input_like(seed: int = 1):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
    return x.requires_grad_()


def eager(module, x, cu):
    """The module run eagerly, on the kernels of the bucket that is replayed, or of a micro-batch that falls back."""
    metadata = pack(cu) if cu is MIDDLE else pack(cu, max_seqlen=TOKENS)
    return module(x, to_device(metadata, boundaries_of(metadata, TOKENS, "none"), TOKENS, x.device))


def goes_on(how, *, num_slots: int = 1, captures: int) -> None:
    """One of three buckets cannot be captured: the others replay, it runs eagerly, and every number is eager's."""
    module = Failing(how)
    stream = torch.cuda.current_stream()
    plain = Failing(how).stack
    graphs = GraphedModule(module, BUCKETS, num_slots=num_slots, sample_every=0)
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    results = []
    for run in (graphs, None):
        torch.cuda.set_rng_state(state)
        seen = []
        for cu in (SMALL, MIDDLE, LARGE, MIDDLE, SMALL):
            x = input_like()
            y = graphs(x, pack(cu)) if run is not None else eager(plain, x, cu)
            assert torch.cuda.current_stream() == stream
            assert not torch.cuda.is_current_stream_capturing()
            y.float().square().mean().backward()
            seen += [y.detach().clone(), x.grad.clone(), torch.rand(4, device="cuda")]  # generators draw, and alike
        parameters = list((module.stack if run is not None else plain).parameters())
        seen += [p.grad.clone() for p in parameters]
        results.append(seen)
    differing = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    print(graphs.stats())
    assert not differing, f"tensors {differing} of {len(results[0])} differ"
    assert len(results[0]) > 15
    stats = graphs.stats()
    assert stats.captures == captures, stats.captures
    assert stats.replays == {BUCKETS[0]: 2, BUCKETS[2]: 1}
    assert stats.fallbacks == {FallbackReason.capture_failed: 2}
    graphs.close()
    again = GraphedModule(plain, BUCKETS, sample_every=0)  # the next captures of the process are as good as ever
    again(input_like(), pack(MIDDLE)).float().square().mean().backward()
    assert again.stats().replays.total() == 1
    assert again.stats().captures == 3
    again.close()


def a_read_on_the_host() -> None:
    """The largest bucket is captured, captured again after the failure, and the smallest after it; in two slots."""
    goes_on(reads_on_the_host, num_slots=2, captures=5)


def an_error_in_python() -> None:
    """A capture that ends in order, though what ran in it did not."""
    goes_on(raises_in_python, captures=3)


def a_stream_that_never_joins() -> None:
    """A capture that fails only where it should end."""
    goes_on(on_a_side_stream, captures=3)


def too_little_memory() -> None:
    """What the failed capture took is given back: the eager micro-batch that follows finds the memory free."""
    module = Failing(takes_too_much)
    graphs = GraphedModule(module, BUCKETS, sample_every=0)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (8 << 30) / total))  # a small GPU, so that it is quick
    for cu, replays, fallbacks in ((SMALL, 1, 0), (MIDDLE, 0, 1), (LARGE, 1, 0)):
        with graphs.stats().expect(captures=3 if cu is SMALL else 0, replays=replays, fallbacks=fallbacks):
            graphs(input_like(), pack(cu)).float().square().mean().backward()
    assert graphs.stats().fallbacks == {FallbackReason.capture_failed: 1}
    assert graphs.pool_bytes() < 1 << 30, graphs.pool_bytes()
    torch.empty(6 << 30, dtype=torch.uint8, device="cuda")  # of 8 GiB
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1 << 30  # by this process: others may share the GPU
    graphs.close()


def blocks_of_other_streams_are_reused() -> None:
    """After a failed capture the allocator takes back memory that other streams used; else it would grow for ever."""
    module = Failing(reads_on_the_host)
    graphs = GraphedModule(module, BUCKETS, sample_every=0)
    graphs(input_like(), pack(SMALL)).float().square().mean().backward()
    side = torch.cuda.Stream()
    for round_ in range(40):
        block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
        if round_ == 4:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved
    graphs.close()


def a_peer_that_fails() -> None:
    """What succeeded here is dropped where a peer has failed, and the other buckets stay."""
    module, said = Failing(lambda y: None), []

    def agreed(succeeded: bool) -> bool:
        said.append(succeeded)
        return succeeded and len(said) != 2  # the peer fails at the second bucket

    graphs = GraphedModule(module, BUCKETS, sample_every=0, agreed=agreed)
    for cu, replays in ((LARGE, 1), (MIDDLE, 0), (SMALL, 1)):
        with graphs.stats().expect(captures=3 if cu is LARGE else 0, replays=replays, fallbacks=1 - replays):
            graphs(input_like(), pack(cu)).float().square().mean().backward()
    assert said == [True] * 5  # large, middle, that it was no bug, large again, small
    graphs.close()


def captured_ahead() -> None:
    """Graphs that were captured before training serve its first micro-batch; one of another form captures anew."""
    torch.manual_seed(0)
    stack = PackedStack(num_layers=2, hidden=HIDDEN, heads=HEADS, dropout=0.1).cuda().bfloat16().train()
    said: list[str] = []
    graphs = GraphedModule(stack, BUCKETS, sample_every=0, say=said.append)
    torch.manual_seed(5)
    state = torch.cuda.get_rng_state()
    with graphs.ahead_of_training(), graphs.stats().expect(captures=3):
        assert graphs(input_like(), pack([0, TOKENS])) is None
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(p.grad is None for p in stack.parameters())
    assert len(said) == 3
    assert said[0].startswith("captured 1 of 3: 32 documents of 512 tokens in ")
    with graphs.stats().expect(replays=1):
        graphs(input_like(), pack(SMALL)).float().square().mean().backward()
    graphs.recapture()
    with graphs.ahead_of_training():
        graphs(input_like(), pack([0, TOKENS]))
    with graphs.stats().expect(captures=3, replays=1):
        graphs(input_like().detach(), pack(SMALL)).float().square().mean().backward()  # a frozen embedding
    assert any("take a gradient" in line for line in said), said
    graphs.recapture()
    with graphs.ahead_of_training():
        graphs(input_like(), pack([0, TOKENS]))
    parameter = next(stack.parameters())
    parameter.data = parameter.data.clone()  # a checkpoint that is loaded after all
    with graphs.stats().expect(captures=3, replays=1):
        graphs(input_like(), pack(SMALL)).float().square().mean().backward()
    assert any("moved in memory" in line for line in said), said
    graphs.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
