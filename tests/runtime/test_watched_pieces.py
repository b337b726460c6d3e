"""The watch over passes in pieces, whose gradients are reduced between the pieces; no GPU is needed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import recorded_graphs  # noqa: E402
from support.recorded_graphs import RecordedGraph  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.dispatch import WATCHED_BYTES, WATCHED_COPIES  # noqa: E402
from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack  # noqa: E402
from thdprof.runtime.graphs import bank, slots  # noqa: E402
from thdprof.runtime.graphs.watch.twin import Twin  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, HIDDEN, LAYERS = 12, 4, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 5, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12])


class Layer(nn.Module):
    """A residual layer whose output depends on the document of every token, with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.linear, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(dropout)

    def forward(self, hidden, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(hidden)), right=True)
        return hidden + self.dropout(torch.tanh(self.linear(hidden)) * (1 + document[:, None]))


class Stack(nn.Module):
    """Layers, which count their passes, and a norm."""

    error: Exception | None = None

    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.register_buffer("passes", torch.zeros(2))

    def forward(self, hidden, packed):
        self.passes += 1
        if self.error is not None:
            raise self.error
        for layer in self.layers:
            hidden = layer(hidden, packed)
        return self.norm(hidden)


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)


def graphed(layers_per_piece=1, *, dropout=0.0, exact=True, verify_every=1, num_slots=2, around=None):
    torch.manual_seed(1)
    module = Stack(dropout)
    return GraphedModule(
        module,
        [SMALL, LARGE],
        num_slots=num_slots,
        sample_every=0,
        verify_every=verify_every,
        cuts=list(module.layers)[layers_per_piece::layers_per_piece],
        surroundings=Surroundings(deterministic=lambda: exact, **(around or {})),
    )


def draw(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def train(model, count=8):
    """Forwards and backwards in 1F1B order, two in flight; returns inputs' gradients."""
    held, grads = [], []
    for seed in range(count + 1):
        if seed < count:
            x = draw(seed).requires_grad_()
            held.append((x, model(x, pack(BOUNDS[seed % len(BOUNDS)]))))
        if len(held) == 2 or seed == count:
            x, y = held.pop(0)
            y.square().sum().backward()
            grads.append(x.grad)
    return grads


def reduced_in_place(model, order=None):
    """Let the hooks of parameters halve their `main_grad`, as a reduction with a rank whose gradients are zeros."""
    for name, p in model.module.named_parameters():
        p.main_grad = torch.full_like(p, 0.25)
        node = p.expand_as(p).grad_fn.next_functions[0][0]

        def reduce(*_, p=p, name=name):
            p.main_grad.mul_(0.5)
            if order is not None:
                order.append(name)

        node.register_hook(reduce)
        p.kept = node  # as Megatron keeps the nodes


def told(model, caplog):
    """The mismatches that were logged, after all results were read."""
    model.stats()
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


@pytest.mark.parametrize("layers_per_piece", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_a_watch_changes_no_number_of_the_run_and_is_silent(layers_per_piece, dropout, exact, reduced, caplog):
    results, orders = [], []
    for every in (0, 1):
        model = graphed(layers_per_piece, dropout=dropout, exact=exact, verify_every=every)
        orders.append([])
        if reduced:
            reduced_in_place(model, orders[-1])
        else:
            for name, p in model.module.named_parameters():
                p.register_post_accumulate_grad_hook(lambda _, name=name, seen=orders[-1]: seen.append(name))
        torch.manual_seed(3)
        grads = train(model)
        sums = [p.main_grad if reduced else p.grad for p in model.module.parameters()]
        results.append([*grads, *sums, model.module.passes, torch.get_rng_state()])
        stats = model.stats()
        assert stats.replays.total() == 8
        assert stats.verified.total() == 8 * every
        assert not told(model, caplog)
    assert len(results[0]) == 8 + 10 + 2
    for without, watched in zip(*results, strict=True):
        assert torch.equal(without, watched)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 8 * 10


def test_pieces_are_replayed_and_reduced_in_the_same_order_while_they_are_verified():
    orders = []
    for every in (0, 1):
        model, order = graphed(2, verify_every=every, num_slots=1), []
        reduced_in_place(model, order)
        y = model(draw().requires_grad_(), pack(BOUNDS[0]))
        for number, graph in enumerate(RecordedGraph.made):
            replay = graph.replay
            graph.replay = lambda replay=replay, number=number, order=order: (replay(), order.append(f"graph {number}"))
        y.sum().backward()
        RecordedGraph.made.clear()
        orders.append(order)
    assert orders[0] == orders[1]
    assert orders[0].index("graph 6") < orders[0].index("layers.3.linear.weight") < orders[0].index("graph 7")
    assert orders[0].index("graph 7") < orders[0].index("layers.0.linear.weight")


def test_gradients_are_compared_as_they_were_before_they_were_reduced(caplog, monkeypatch):
    """Without what a piece has completed being kept, the watch would compare sums over ranks with this rank's own."""
    monkeypatch.setattr(Twin, "gradients_complete", lambda *_: None)
    model = graphed(1)
    reduced_in_place(model)
    train(model, 1)
    assert "in 8 of " in told(model, caplog)[0]  # of all parameters but the first layer's two


def test_what_a_piece_completes_is_copied_before_reductions_may_begin(monkeypatch):
    """Megatron's reductions wait for the event that is recorded in `on_piece`, and for nothing that is queued later."""
    order = []
    for step in ("gradients_complete", "repeated"):
        own = getattr(Twin, step)
        monkeypatch.setattr(Twin, step, lambda *args, own=own, step=step: (order.append(step), own(*args))[1])
    model = graphed(2, around={"on_piece": lambda complete: order.append(len(complete))})
    model(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    assert order == ["gradients_complete", 6, "repeated", 4]
    assert model.stats().verified.total() == 1


def test_a_gradient_that_is_reduced_before_it_is_complete_is_found(caplog):
    model = graphed(1)
    reduced_in_place(model)
    train(model, 2)
    assert not told(model, caplog)
    early, late = (model.module.layers[n].linear.weight for n in (0, 3))

    def too_early(*_):
        early.main_grad.mul_(0.5)

    late.kept.register_hook(too_early)
    train(model, 1)
    (line,) = told(model, caplog)
    assert "differs from the same micro-batch run eagerly in 1 of " in line
    assert "gradient of layers.0.linear.weight" in line


def test_a_piece_whose_backward_is_not_replayed_is_found(caplog):
    model = graphed(2, num_slots=1)
    x = draw().requires_grad_()
    y = model(x, pack(BOUNDS[0]))
    # the small bucket was captured after the large one: its backward graphs are 6 (the last layers) and 7
    RecordedGraph.made[7].replay = lambda: None
    y.square().sum().backward()
    (line,) = told(model, caplog)
    assert "output" not in line
    assert "gradient of input 0" in line
    assert model.stats().mismatches == {SMALL: 1}


def test_a_stale_boundary_buffer_is_found_and_its_bucket_alone_put_into_quarantine(caplog, monkeypatch):
    class OfSlots(slots.Metadata):
        stale = False

        def stage(self, boundaries, bucket):
            if not OfSlots.stale or bucket == SMALL:
                super().stage(boundaries, bucket)

    monkeypatch.setattr(slots, "Metadata", OfSlots)
    model = graphed()
    train(model, 4)
    assert not told(model, caplog)
    OfSlots.stale = True
    train(model, 8)
    assert "micro-batch 6, replayed in slot" in told(model, caplog)[0]
    assert "output 0: " in told(model, caplog)[0]
    train(model, 4)
    stats = model.stats()
    assert [*stats.mismatches] == [LARGE]
    assert stats.replays[SMALL] == 8
    assert stats.fallbacks == {FallbackReason.quarantined: 8 - stats.replays[LARGE]}
    assert stats.replays[LARGE] < 6


def test_a_slot_given_back_too_early_is_found(caplog, monkeypatch):
    model = graphed(num_slots=1)
    train(graphed(num_slots=2), 4)
    assert not told(model, caplog)
    copied = slots.Lease.copied_outputs

    def gives_back(self):
        self.slot.busy = False
        return copied(self)

    monkeypatch.setattr(slots.Lease, "copied_outputs", gives_back)
    first, second = draw(0).requires_grad_(), draw(1).requires_grad_()
    one, two = model(first, pack(BOUNDS[0])), model(second, pack(BOUNDS[0]))
    one.sum().backward()
    two.sum().backward()
    (line,) = told(model, caplog)
    assert "micro-batch 0" in line
    assert "gradient of " in line
    assert "output 0" not in line


def test_a_weight_that_moved_is_found(caplog, monkeypatch):
    class NoPlacement:
        def __init__(self, *_):
            pass

        def check(self):
            """Sees nothing."""

    monkeypatch.setattr(bank, "Placement", NoPlacement)
    model = graphed()
    train(model, 2)
    moved = model.module.layers[2].linear.weight
    moved.data = moved.data.clone()
    train(model, 2)
    assert not told(model, caplog)  # the old memory still holds the same numbers
    with torch.no_grad():
        moved.mul_(1.5)
    train(model, 2)
    assert "output 0" in told(model, caplog)[0]


def test_a_generator_that_does_not_advance_is_found(caplog, monkeypatch):
    model = graphed(dropout=0.5)
    train(model, 2)
    assert not told(model, caplog)
    stage, copied, states = slots.Lease.stage, slots.Lease.copied_outputs, []

    def begins(self, *args):
        states.append(torch.get_rng_state())
        stage(self, *args)

    def idle(self):
        torch.set_rng_state(states[-1])
        return copied(self)

    monkeypatch.setattr(slots.Lease, "stage", begins)
    monkeypatch.setattr(slots.Lease, "copied_outputs", idle)
    train(model, 2)
    line = told(model, caplog)[0]
    assert "random state 0" in line
    assert "output 0" not in line


@pytest.mark.parametrize("step", ["forward", "gradients_complete"])
def test_an_eager_run_or_a_copy_that_fails_ends_the_watch_and_not_the_training(caplog, monkeypatch, step):
    expected = train(graphed(verify_every=0), 3)
    model = graphed()
    x = draw().requires_grad_()
    y = model(x, pack(BOUNDS[0]))
    error = torch.OutOfMemoryError("no memory for it")

    def fails(self, *args):
        raise error

    if step == "forward":
        model.module.error = error
    else:
        monkeypatch.setattr(Twin, step, fails)
    y.square().sum().backward()
    model.module.error = None
    assert torch.equal(x.grad, expected[0])
    for one, other in zip(train(model, 3), expected, strict=True):
        assert torch.equal(one, other)
    assert model.stats().replays.total() == 4
    assert not model.stats().verified
    assert "no more micro-batches are verified (graphs.verify): the eager run of one failed" in caplog.text


def test_the_copy_of_what_pieces_complete_counts_as_memory_that_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(bank, "missing_bytes", lambda device, *, slot_bytes, others: asked.append(others) or 0)
    for layers_per_piece in (1, LAYERS):
        train(graphed(layers_per_piece), 1)
    assert asked == [(WATCHED_COPIES + 1) * WATCHED_BYTES, WATCHED_COPIES * WATCHED_BYTES]


def test_micro_batches_that_are_not_verified_keep_nothing(monkeypatch):
    made = []
    monkeypatch.setattr(Twin, "__init__", lambda self, *_, **__: made.append(self))
    model = graphed(verify_every=10**6)
    model._watch.number = 1000
    train(model, 4)
    assert model.stats().replays.total() == 4
    assert not made


@pytest.mark.parametrize("reducing", [False, True])
def test_a_small_lasting_fault_is_found_where_pieces_can_be_replayed_again(caplog, reducing):
    """Where reductions may read the gradients, replays must not write to them."""
    model = graphed(2, exact=False, num_slots=1, around={"reducing": lambda: reducing, "rounding": 0.1})
    x = draw().requires_grad_()
    y = model(x, pack(BOUNDS[0]))
    replay, weight = RecordedGraph.made[6].replay, model.module.layers[3].linear.weight

    def too_much():
        before = weight.grad.clone()
        replay()
        weight.grad.add_(weight.grad - before, alpha=0.2)

    RecordedGraph.made[6].replay = too_much
    y.square().sum().backward()
    expected = [] if reducing else ["gradient of layers.3.linear.weight"]
    assert [line.partition("tensors: ")[2].partition(":")[0] for line in told(model, caplog)] == expected
    assert model.stats().suspicions.total() == (1 if reducing else 0)
