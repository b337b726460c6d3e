"""Scenarios of the watch that need a GPU, each run in a process of its own: `python tests/gpu/watch_cases.py NAME`.

`NAME_in_pieces` runs a scenario with a layer a graph, `NAME_by_default` with the default kernels.
"""

from __future__ import annotations

import logging
import os
import sys

import numpy as np
import torch

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack
from thdprof.runtime.graphs import bank, slots
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN, HEADS = 512, 256, 4
BUCKETS = [Bucket(8, 512, TOKENS), Bucket(32, 512, TOKENS)]
TOLD: list[str] = []
"""What was logged as an error."""
IN_PIECES = "_in_pieces"
"""How the name of a scenario ends that is run with a layer a graph."""
BY_DEFAULT = "_by_default"
"""How it ends where kernels are the default ones, whose runs differ; torch is not told to be deterministic."""
ASKED = sys.argv[1] if __name__ == "__main__" else ""
"""The scenario."""


def cut_before(layers: torch.nn.ModuleList | torch.nn.Sequential) -> list[torch.nn.Module]:
    """The layers before which the scenario's passes are cut."""
    return list(layers)[1:] if ASKED.endswith(IN_PIECES) else []


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        TOLD.append(record.getMessage())


def stack(dropout: float = 0.0, *, verify_every: int = 1, num_slots: int = 2) -> GraphedModule:
    torch.manual_seed(0)
    module = PackedStack(num_layers=3, hidden=HIDDEN, heads=HEADS, dropout=dropout).cuda().bfloat16().train()
    module.register_buffer("calls", torch.zeros(3, device="cuda"))
    return GraphedModule(
        module, BUCKETS, num_slots=num_slots, sample_every=0, verify_every=verify_every, cuts=cut_before(module.layers)
    )


def train(model: GraphedModule, count: int = 24, *, seed: int = 1) -> list[torch.Tensor]:
    """Micro-batches in 1F1B order, two in flight; the gradients of their inputs."""
    rng, held, grads = np.random.default_rng(seed), [], []
    draws = torch.Generator().manual_seed(seed)

    def back() -> None:
        x, y = held.pop(0)
        y.float().square().mean().backward()
        grads.append(x.grad)

    for _ in range(count):
        documents = int(rng.choice([3, 8, 9, 20, 32, 60]))
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), documents - 1, replace=False))
        x = torch.randn(TOKENS, HIDDEN, generator=draws).cuda().bfloat16().requires_grad_()
        held.append((x, model(x, pack(np.concatenate(([0], cuts, [TOKENS])).astype(np.int32)))))
        if len(held) == 2:
            back()
    while held:
        back()
    torch.cuda.synchronize()
    return grads


def errors(model: GraphedModule) -> list[str]:
    """What the watch has told, after all results were read."""
    torch.cuda.synchronize()
    model.stats()
    return list(TOLD)


def changes_nothing(dropout: float, *, main_grad: bool) -> None:
    results = []
    for every in (0, 1):
        model = stack(dropout, verify_every=every)
        for p in model.parameters():
            if main_grad:
                p.main_grad = torch.full(p.shape, 0.25, device="cuda", dtype=torch.float32)
        torch.manual_seed(7)
        grads = train(model)
        sums = [p.main_grad if main_grad else p.grad for p in model.parameters()]
        results.append([*grads, *sums, torch.cuda.get_rng_state()])
        stats = model.stats()
        assert stats.verified.total() == (stats.replays.total() if every else 0), str(stats)
        assert stats.replays.total() > 10
        assert len(stats.replays) == 2
        assert not errors(model), errors(model)[0]
        model.close()
    assert len(results[0]) > 40
    differing = [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
    assert not differing, f"{len(differing)} of {len(results[0])} tensors differ, first {differing[:5]}"


def reduced_in_place(model: GraphedModule) -> list[str]:
    """Let hooks halve each parameter's gradient, as a reduction with a rank of zeros; names in the hooks' order."""
    order: list[str] = []
    for name, p in model.module.named_parameters():
        p.main_grad = torch.zeros(p.shape, device="cuda")

        def reduce(*unused, p=p, name=name):
            p.main_grad.mul_(0.5)
            order.append(name)

        p.node = p.expand_as(p).grad_fn.next_functions[0][0]
        p.node.register_hook(reduce)
    return order


def silent_with_reductions() -> None:
    """Hooks change gradients in place, between the graphs of pieces: the watch compares what was there before."""
    results, orders = [], []
    for every in (0, 1):
        model = stack(0.1, verify_every=every)
        orders.append(reduced_in_place(model))
        torch.manual_seed(7)
        grads = train(model)
        results.append([*grads, *(p.main_grad for p in model.parameters())])
        assert model.stats().verified.total() == (model.stats().replays.total() if every else 0)
        assert model.stats().replays.total() > 10
        assert not errors(model), errors(model)[0]
        model.close()
    assert orders[0] == orders[1]
    assert len(orders[0]) > 100
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(p.abs().sum() > 0 for p in results[1][-5:])


def reduced_too_early() -> None:
    """A reduction begins before its gradient is complete: when the last layer's backward has ended."""
    model = stack()
    order = reduced_in_place(model)
    train(model)
    assert not errors(model), errors(model)[0]
    first, last = (model.module.layers[n].down for n in (0, -1))

    def too_early(*unused):
        first.weight.main_grad.mul_(0.5)

    last.weight.node.register_hook(too_early)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    order.clear()
    model(x, pack([0, 100, TOKENS])).float().square().mean().backward()
    assert order.index("layers.2.down.weight") < order.index("layers.0.down.weight")
    found(model, "gradient of layers.0.down.weight", not_text="output 0")


def silent() -> None:
    """Replays equal eager runs bit for bit, and the run is as without a watch."""
    changes_nothing(0.0, main_grad=False)


def silent_with_dropout() -> None:
    """Likewise with dropout: the twin draws the replay's numbers, and the run's go on as without it."""
    changes_nothing(0.1, main_grad=False)


def silent_with_main_grad() -> None:
    """Likewise with main_grad in float32, whose hooks are the run's own."""
    changes_nothing(0.1, main_grad=True)


def silent_within_the_spread() -> None:
    """Two eager runs, where nothing promises bit equality."""
    torch.use_deterministic_algorithms(False)
    model = stack(0.1)
    train(model)
    stats = model.stats()
    assert stats.verified.total() == stats.replays.total() > 10, str(stats)
    assert not errors(model), errors(model)[0]
    model.close()


def found(model: GraphedModule, text: str, *, not_text: str = "nothing else") -> None:
    told = errors(model)
    assert told, "the fault was not found"
    print(told[0])
    assert text in told[0], told[0]
    assert not_text not in told[0], told[0]
    assert model.stats().mismatches.total() >= 1
    before = model.stats().fallbacks[FallbackReason.quarantined]
    train(model, 8)
    assert model.stats().fallbacks[FallbackReason.quarantined] > before
    model.close()


def stale_boundaries() -> None:
    """A slot's boundaries are those of an earlier micro-batch."""

    class OfSlots(slots.Metadata):
        stale = False

        def stage(self, boundaries, bucket):
            if not OfSlots.stale:
                super().stage(boundaries, bucket)

    slots.Metadata = OfSlots
    model = stack()
    train(model)
    assert not errors(model), errors(model)[0]
    OfSlots.stale = True
    train(model, seed=2)
    found(model, "output 0")


def slot_given_back_early() -> None:
    """A second micro-batch overwrites the activations of one that waits for its backward."""
    model = stack(num_slots=1)
    x = torch.randn(2, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    model(x[0].clone().requires_grad_(), pack([0, 100, TOKENS])).sum().backward()
    assert not errors(model), errors(model)[0]
    copied = slots.Lease.copied_outputs

    def gives_back(self):
        self.slot.busy = False
        return copied(self)

    slots.Lease.copied_outputs = gives_back
    one = model(x[0].clone().requires_grad_(), pack([0, 100, TOKENS]))
    two = model(x[1].clone().requires_grad_(), pack([0, 7, 300, TOKENS]))
    slots.Lease.copied_outputs = copied
    one.float().square().sum().backward()
    two.float().square().sum().backward()
    found(model, "gradient of", not_text="output 0")


def moved_weight() -> None:
    """A weight is elsewhere, and graphs read where it was."""

    class Blind(bank.Placement):
        def check(self) -> None:
            """Sees nothing."""

    bank.Placement = Blind
    model = stack()
    train(model)
    parameter = next(p for p in model.parameters() if p.dim() == 2)
    old = parameter.data  # kept, so that graphs read numbers and not memory of others
    parameter.data = parameter.data.clone()
    train(model)
    assert not errors(model), errors(model)[0]
    with torch.no_grad():
        parameter.mul_(1.01)
    train(model)
    assert not torch.equal(old, parameter)
    found(model, "output 0")


def idle_generator() -> None:
    """Replays leave the generator where it was, so that the next one draws the same numbers."""
    model = stack(0.1)
    train(model)
    assert not errors(model), errors(model)[0]
    stage, copied, states = slots.Lease.stage, slots.Lease.copied_outputs, []

    def begins(self, tensors, boundaries):
        states.append(torch.cuda.get_rng_state())
        stage(self, tensors, boundaries)

    def idle(self):
        torch.cuda.set_rng_state(states[-1])
        return copied(self)

    slots.Lease.stage, slots.Lease.copied_outputs = begins, idle
    train(model)
    found(model, "random state 0", not_text="output 0")


def fused_accumulation() -> None:
    """Kernels that add to main_grad themselves write to the twin's scratch memory, not to main_grad."""
    import transformer_engine.pytorch as te

    class Takes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(
                *(
                    kind(HIDDEN, HIDDEN, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16)
                    for kind in (te.LayerNormLinear, te.Linear)
                )
            )

        def forward(self, x, packed):
            return self.inner(x)

    sums = []
    for every in (0, 1):
        torch.manual_seed(0)
        module = Takes().cuda().train()
        model = GraphedModule(
            module, BUCKETS, num_slots=2, sample_every=0, verify_every=every, cuts=cut_before(module.inner)
        )
        for p in model.parameters():
            p.main_grad = torch.zeros(p.shape, device="cuda")
            p.grad_added_to_main_grad = False

            def accumulate(*unused, p=p):  # as megatron-core's DistributedDataParallel
                if p.grad is not None and not p.grad_added_to_main_grad:
                    p.main_grad.add_(p.grad)
                p.grad = None

            p.node = p.expand_as(p).grad_fn.next_functions[0][0]
            p.node.register_hook(accumulate)
        train(model)
        assert not errors(model), errors(model)[0]
        assert model.stats().verified.total() == (model.stats().replays.total() if every else 0)
        sums.append([p.main_grad for p in model.parameters()])
        model.close()
    assert len(sums[0]) == 4
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*sums, strict=True))


def nothing_waits() -> None:
    """Replays that are not verified do not wait for the GPU."""
    model = stack(0.1)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = pack([0, 100, TOKENS])
    for _ in range(3):
        model(x, packed).sum().backward()
    torch.cuda.synchronize()
    model._watch.every, model._watch.number = 10**9, 100
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(10):
        model(x, packed).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not errors(model), errors(model)[0]
    assert model.stats().verified.total() == 3, str(model.stats())
    assert model.stats().replays.total() == 13, str(model.stats())
    model.close()


def no_room() -> None:
    """Without memory for an eager run, micro-batches are replayed and not verified."""
    model = stack()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x, pack([0, 100, TOKENS])).sum().backward()
    torch.cuda.synchronize()
    seen = model.stats().verified.total()
    free, _ = torch.cuda.mem_get_info()
    hold = torch.empty(free - 300 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        model(x, pack([0, 100, TOKENS])).sum().backward()
    torch.cuda.synchronize()
    assert not errors(model), errors(model)[0]
    assert model.stats().verified.total() == seen == 1, str(model.stats())
    assert model.stats().replays.total() == 4, str(model.stats())
    del hold
    torch.cuda.empty_cache()
    model(x, pack([0, 100, TOKENS])).sum().backward()
    torch.cuda.synchronize()
    assert model.stats().verified.total() == 2
    model.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(_Told(level=logging.ERROR))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # the backward of attention adds in any order without
    torch.use_deterministic_algorithms(not ASKED.endswith(BY_DEFAULT))
    globals()[ASKED.removesuffix(BY_DEFAULT).removesuffix(IN_PIECES)]()
    print("ok")
