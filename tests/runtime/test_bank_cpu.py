"""The bank, its slots and leases, with a capture that runs the module again at every replay: no GPU is needed."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.random_states import FakeDefault, FakeGenerator  # noqa: E402
from support.replayed_passes import capture_pass, stand_ins  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack, teardown  # noqa: E402
from thdprof.runtime.graphs import bank  # noqa: E402

TOKENS, HIDDEN = 12, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 5, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12])


class Weighted(nn.Module):
    """A layer whose output depends on the document of every token."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(x)), right=True)
        return self.linear(x) * (1 + document[:, None])


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch):
    for owner, name, value in stand_ins():
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def plain():
    torch.manual_seed(1)
    return Weighted()


def graphed(plain, **options):
    return GraphedModule(copy.deepcopy(plain), [SMALL, LARGE], sample_every=0, **options)


def draw(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def test_replays_give_what_the_module_gives(plain):
    graphs, compared = graphed(plain), 0
    for seed, bounds in enumerate(BOUNDS):
        ours, theirs = draw(seed).requires_grad_(), draw(seed).requires_grad_()
        y, expected = graphs(ours, pack(bounds)), plain(theirs, pack(bounds))
        assert torch.equal(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
        for p, q in zip(graphs.parameters(), plain.parameters(), strict=True):  # accumulated over micro-batches
            assert torch.equal(p.grad, q.grad)
            compared += 1
    assert compared == len(BOUNDS) * 2
    assert graphs.stats().replays == {SMALL: 2, LARGE: 2}
    assert graphs.stats().captures == 2
    assert graphs.pool_bytes() == 2 * 1000 + draw().nbytes  # the pools, and the slot's static input
    assert graphs.bytes_of_buckets() == [1000, 1000]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_is_held_until_its_backward_or_until_its_output_is_dropped(plain, num_slots):
    graphs = graphed(plain, num_slots=num_slots)
    stats = graphs.stats()
    held = [graphs(draw(seed).requires_grad_(), pack(BOUNDS[seed])) for seed in range(num_slots)]
    assert stats.replays.total() == num_slots
    with stats.expect(fallbacks=1):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    assert stats.fallbacks == {FallbackReason.no_free_slot: 1}
    held.pop().sum().backward()
    with stats.expect(replays=1):
        dropped = graphs(draw().requires_grad_(), pack(BOUNDS[3]))
    with stats.expect(fallbacks=1):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    del dropped
    with stats.expect(replays=1):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))


def test_a_second_backward_is_refused(plain):
    y = graphed(plain)(draw().requires_grad_(), pack(BOUNDS[0]))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


def test_a_backward_after_closing_is_refused(plain):
    graphs = graphed(plain)
    y = graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    graphs.close()
    with pytest.raises(RuntimeError, match="closed or dropped"):
        y.sum().backward()


@pytest.mark.parametrize("given", [True, False])
def test_a_replaced_random_state_is_refused_until_graphs_are_captured_anew(plain, monkeypatch, given):
    """Of a generator that the module was given with, and of the default one."""
    named, default = FakeGenerator(), FakeDefault()
    monkeypatch.setattr(torch.cuda, "default_generators", {None: default})
    graphs = graphed(plain, generators=[named])
    graphs(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    changed = named if given else default
    changed.draw()
    graphs(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    changed.graphsafe_set_state(changed.clone_state())
    with pytest.raises(RuntimeError, match=f"random state {int(given)} of 2 was replaced"):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    graphs.recapture()
    graphs(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    assert graphs.stats().replays.total() == 3


def test_a_moved_parameter_is_refused(plain):
    graphs = graphed(plain)
    graphs(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    graphs.module.linear.weight.data = graphs.module.linear.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"shape \(4, 4\) moved in memory"):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    graphs.recapture()
    with graphs.stats().expect(replays=1, captures=2):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))


class Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a = base, nn.Parameter(torch.full((HIDDEN, HIDDEN), 0.5))

    def forward(self, x):
        return self.base(x) + x @ self.a


def test_an_adapter_that_came_after_the_captures_is_refused_until_graphs_are_captured_anew(plain):
    graphs = graphed(plain)
    graphs(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    graphs.module.linear = Adapted(graphs.module.linear)
    with pytest.raises(RuntimeError, match="submodule linear was replaced after its graphs were captured"):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    graphs.recapture()
    x, adapted = draw(), copy.deepcopy(graphs.module)
    with graphs.stats().expect(replays=1, captures=2):
        y = graphs(x.clone().requires_grad_(), pack(BOUNDS[0]))
    assert torch.equal(y, adapted(x, pack(BOUNDS[0])))
    y.sum().backward()
    assert graphs.module.linear.a.grad is not None
    graphs.module.linear.eval()  # the new part's mode counts as those of the others do
    with graphs.stats().expect(fallbacks=1):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    assert graphs.stats().fallbacks == {FallbackReason.input_differs: 1}


def test_a_bucket_whose_capture_fails_runs_eagerly(plain, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(bank, "capture_pass", fails)
    graphs = graphed(plain)
    x = draw()
    assert torch.equal(graphs(x.clone().requires_grad_(), pack(BOUNDS[1])), plain(x, pack(BOUNDS[1])))
    assert graphs.stats().fallbacks == {FallbackReason.capture_failed: 1}
    failures = [record for record in caplog.records if "operation not permitted" in record.getMessage()]
    assert len(failures) == 2  # one a bucket, although the large one is never asked for


@pytest.mark.parametrize("error", [RuntimeError("in a step"), SystemExit(7)])
def test_a_step_that_ends_half_way_leaves_no_graph_behind(plain, monkeypatch, error):
    """The error's traceback still refers to the passes, so that only an explicit reset frees their graphs."""
    freed = []

    def capture(*args, **kwargs):
        captured = capture_pass(*args, **kwargs)
        for graph in (captured.forward, captured.backward):
            graph.reset = lambda graph=graph: freed.append(graph)
        return captured

    def step():
        y = graphs(draw().requires_grad_(), pack(BOUNDS[0]))
        assert y.requires_grad
        raise error

    monkeypatch.setattr(bank, "capture_pass", capture)
    graphs = graphed(plain, num_slots=2)
    with pytest.raises(type(error)) as ended:
        step()
    assert graphs.holds_graphs()
    teardown.close_all("a test ends")
    assert ended.value is error
    assert len(freed) == 2 * 2 * 2  # passes of two buckets in two slots
    assert not graphs.holds_graphs()
    x = draw()
    assert torch.equal(graphs(x, pack(BOUNDS[0])), plain(x, pack(BOUNDS[0])))
    assert graphs.stats().fallbacks == {FallbackReason.disabled_by_user: 1}
