"""Passes that are captured in pieces: the numbers of whole passes, hooks between the pieces. No GPU is needed."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import recorded_graphs  # noqa: E402
from support.recorded_graphs import RecordedGraph  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack  # noqa: E402
from thdprof.runtime.graphs.capture import mark_completed  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, HIDDEN, LAYERS = 12, 4, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 5, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12])


class Layer(nn.Module):
    """A residual layer whose output depends on the document of every token, with dropout."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.3)

    def forward(self, *, hidden, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(hidden)), right=True)
        return hidden + self.dropout(torch.tanh(self.linear(hidden)) * (1 + document[:, None]))


class Stack(nn.Module):
    """Layers and a norm, called with keyword arguments as Megatron calls its layers."""

    def __init__(self, *, shared=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        if shared:
            self.layers[-1].linear = self.layers[0].linear
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden, packed, scale=None):
        for layer in self.layers:
            hidden = layer(hidden=hidden, packed=packed)
        return self.norm(hidden if scale is None else hidden * scale)


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)


def stack(**options):
    torch.manual_seed(1)
    return Stack(**options)


def graphed(plain, layers_per_piece, **options):
    module = copy.deepcopy(plain)
    cuts = list(module.layers)[layers_per_piece::layers_per_piece]
    return GraphedModule(module, [SMALL, LARGE], sample_every=0, cuts=cuts, **options)


def draw(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def train(module, *, with_scale=False):
    """Outputs, input gradients and accumulated gradients of a few micro-batches, with their random numbers."""
    torch.manual_seed(7)
    found = []
    for seed, bounds in enumerate(BOUNDS):
        x, scale = draw(seed).requires_grad_(), torch.full((HIDDEN,), 1.5 + seed).requires_grad_()
        y = module(x, pack(bounds), *([scale] if with_scale else []))
        y.square().sum().backward()
        found += [y.detach(), x.grad, *([scale.grad] if with_scale else [])]
    inner = getattr(module, "module", module)
    return [*found, *(p.grad for p in inner.parameters()), torch.rand(3)]


@pytest.mark.parametrize("layers_per_piece", [1, 2, 3, LAYERS])
def test_pieces_give_the_numbers_of_an_eager_pass(layers_per_piece):
    plain = stack()
    graphs = graphed(plain, layers_per_piece)
    ours, theirs = train(graphs), train(plain)
    assert len(ours) == len(theirs) > 8
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected)
    assert graphs.stats().replays == {SMALL: 2, LARGE: 2}
    assert len(RecordedGraph.made) == 2 * 2 * -(-LAYERS // layers_per_piece)  # buckets, directions, pieces
    assert all(graph.replays == 2 for graph in RecordedGraph.made)


def test_the_gradient_of_a_parameter_in_two_pieces_is_a_sum_in_another_order():
    """Both pieces add to the gradient, where an eager backward adds the pieces' parts up first."""
    plain = stack(shared=True)
    for got, expected in zip(train(graphed(plain, 1)), train(plain), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_further_input_gets_its_whole_gradient():
    plain = stack()
    for got, expected in zip(train(graphed(plain, 1), with_scale=True), train(plain, with_scale=True), strict=True):
        assert torch.equal(got, expected)


def test_hooks_run_after_the_backward_of_their_piece():
    """As Megatron's DistributedDataParallel starts a bucket's reduction there, while the next backward runs."""
    graphs = graphed(stack(), 2)
    order = []
    for number, layer in enumerate(graphs.module.layers):
        layer.linear.weight.main_grad = torch.zeros(HIDDEN, HIDDEN)
        node = layer.linear.weight.expand_as(layer.linear.weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, number=number: order.append(number))
        layer.kept = node  # as Megatron keeps the nodes
        layer.linear.bias.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    y = graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    for number, graph in enumerate(RecordedGraph.made):
        replay = graph.replay
        graph.replay = lambda replay=replay, number=number: (replay(), order.append(f"graph {number}"))
    order.clear()
    y.sum().backward()
    # the small bucket was captured after the large one: its graphs are 4 and 5 (forward), 6 and 7 (backward)
    assert order[0] == "graph 6"
    assert sorted(order[1:5]) == [2, 2, 3, 3]
    assert order[5] == "graph 7"
    assert sorted(order[6:]) == [0, 0, 1, 1]


@pytest.mark.parametrize("layers_per_piece", [LAYERS, 2])
def test_callbacks_come_between_the_graphs_and_the_hooks(layers_per_piece):
    """After a backward graph, and before the hooks of the parameters whose gradients it has completed."""
    order = []

    def note(event):
        return lambda *_: order.append(event)

    def on_piece(parameters):
        order.append({name.split(".")[1] for name, p in graphs.module.named_parameters() if p in {*parameters}})

    around = Surroundings(
        on_backward=note("backward"),
        on_piece=on_piece,
        before_forward=note("before"),
        after_forward=note("after"),
        after_backward=note("ended"),
    )
    graphs = graphed(stack(), layers_per_piece, surroundings=around)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(BOUNDS[3]))
    graphs.module.layers[0].linear.weight.register_post_accumulate_grad_hook(note("hook of the first"))
    graphs.module.layers[3].linear.weight.register_post_accumulate_grad_hook(note("hook of the last"))
    for graph in RecordedGraph.made:
        graph.replay = lambda replay=graph.replay: (order.append("graph"), replay())
    assert order == []  # a capture is no micro-batch
    for _ in range(2):
        y = graphs(draw().requires_grad_(), pack(BOUNDS[3]))
        pieces = LAYERS // layers_per_piece
        assert order == ["before", *["graph"] * pieces, "after"]
        order.clear()
        y.square().sum().backward()
        if pieces == 1:
            assert order == ["graph", "ended", "backward", "hook of the first", "hook of the last"]
        else:
            last = ["graph", {"2", "3", "weight", "bias"}, "hook of the last"]
            assert order == [*last, "graph", "ended", {"0", "1"}, "hook of the first"]
        order.clear()


def test_each_piece_is_waited_for_before_its_forward(monkeypatch):
    graphs = graphed(stack(), 1)
    order = []
    monkeypatch.setattr(graphs, "_before_piece", lambda piece: order.append((piece, forwards())))

    def forwards():
        return sum(graph.replays for graph in RecordedGraph.made)

    graphs(draw().requires_grad_(), pack(BOUNDS[3]))
    assert order == [(piece, piece) for piece in range(LAYERS)]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_is_held_from_the_first_forward_to_the_last_backward(num_slots):
    graphs = graphed(stack(), 1, num_slots=num_slots)
    held = [graphs(draw(seed).requires_grad_(), pack(BOUNDS[seed])) for seed in range(num_slots)]
    graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    assert graphs.stats().fallbacks == {FallbackReason.no_free_slot: 1}
    free_inside = []
    node = graphs.module.layers[0].linear.weight
    node.register_post_accumulate_grad_hook(lambda _: free_inside.append(graphs._bank.slots[0].busy))
    held[0].sum().backward(retain_graph=True)
    assert free_inside == [True]  # until the hooks of the first piece have run
    with graphs.stats().expect(replays=1):
        graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    with pytest.raises(RuntimeError, match="a second time"):
        held[0].sum().backward()
    del held[:]  # outputs without a backward give their slots back, too
    with graphs.stats().expect(replays=num_slots):
        held = [graphs(draw(seed).requires_grad_(), pack(BOUNDS[seed])) for seed in range(num_slots)]


def test_graphs_that_are_closed_between_two_pieces_are_not_replayed():
    graphs = graphed(stack(), 2)
    y = graphs(draw().requires_grad_(), pack(BOUNDS[0]))
    graphs.module.layers[3].linear.weight.register_post_accumulate_grad_hook(lambda _: graphs.close())
    replays = sum(graph.replays for graph in RecordedGraph.made)
    with pytest.raises(RuntimeError, match="closed or dropped before the backward"):
        y.sum().backward()
    assert sum(graph.replays for graph in RecordedGraph.made) == replays + 1


def test_micro_batches_in_flight_keep_apart():
    plain = stack()
    graphs = graphed(plain, 1, num_slots=2)

    def run(module):
        torch.manual_seed(3)
        xs = [draw(seed).requires_grad_() for seed in range(2)]
        ys = [module(x, pack(bounds)) for x, bounds in zip(xs, BOUNDS[1:3], strict=True)]
        for y in reversed(ys):
            y.square().sum().backward()
        return [*(y.detach() for y in ys), *(x.grad for x in xs)]

    for got, expected in zip(run(graphs), run(plain), strict=True):
        assert torch.equal(got, expected)
    assert graphs.stats().replays.total() == 2


def test_a_frozen_beginning_has_no_backward():
    plain = stack()
    for p in plain.layers[0].parameters():
        p.requires_grad_(False)
    graphs = graphed(plain, 1)
    for module in (graphs, plain):
        torch.manual_seed(2)
        module(draw(), pack(BOUNDS[1])).square().sum().backward()
    for p, q in zip(graphs.module.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    assert graphs.stats().replays.total() == 1


@pytest.mark.parametrize("cuts", ["twice", "never"])
def test_a_layer_that_is_not_called_once_fails_the_capture(cuts, caplog):
    plain = stack()
    module = copy.deepcopy(plain)
    if cuts == "twice":
        module.layers[2] = module.layers[1]
        cut = [module.layers[1]]
    else:
        cut = [Layer()]
        module.unused = cut[0]
    graphs = GraphedModule(module, [LARGE], sample_every=0, cuts=cut)
    graphs(draw().requires_grad_(), pack(BOUNDS[3])).sum().backward()
    assert graphs.stats().fallbacks == {FallbackReason.capture_failed: 1}
    assert "set graphs.layers_per_graph to null" in caplog.text
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_gradients_are_complete_after_the_last_piece_that_adds_to_them():
    assert mark_completed([{0, 1}, {1, 2}, {3}], 5) == (
        (True, True, False, False, False),
        (False, False, True, False, False),
        (False, False, False, True, False),
    )


def test_offloading_and_pieces_exclude_each_other():
    from thdprof.offload.plan import Choice

    with pytest.raises(ValueError, match="offload and cuts"):
        graphed(stack(), 1, offload=Choice(modules=("all",)))
