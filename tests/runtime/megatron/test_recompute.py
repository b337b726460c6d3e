"""Megatron's recomputed activations inside graphs, and their random numbers. No GPU is needed."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402
from support import recorded_graphs  # noqa: E402
from support.random_states import CountedGenerator  # noqa: E402
from support.recorded_graphs import RecordedGraph  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, GraphedModule, pack  # noqa: E402
from thdprof.runtime.megatron import Installation, decoder_surroundings, recompute  # noqa: E402
from thdprof.runtime.megatron.rank_agreement import Decisions  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, HIDDEN = 12, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 5, 12], [0, 1, 2, 3, 4, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12], [0, 2, 12])
"""Boundaries of micro-batches: of the small bucket, of the large one, and of none."""
FULL = recompute.repeats_of(SimpleNamespace(recompute_granularity="full"))
SELECTIVE = SimpleNamespace(recompute_granularity="selective")


class Layer(nn.Module):
    """A residual layer with dropout from the default generator and from the tracker's, all of it recomputed or not."""

    def __init__(self, *, recomputed, dropout):
        super().__init__()
        self.linear, self.recomputed, self.dropout = nn.Linear(HIDDEN, HIDDEN), recomputed, dropout
        self.calls = []

    def _drop(self, x):
        if not self.dropout:
            return x
        generator = torch.cuda.default_generators[0]
        return x * (generator.numbers(x.numel()).view(x.shape) > 0.3).to(x)

    def _body(self, hidden, boundaries):
        self.calls.append(CountedGenerator.recording)
        document = torch.searchsorted(boundaries[1:].contiguous(), torch.arange(len(hidden)), right=True)
        with random.get_cuda_rng_tracker().fork():
            inner = self._drop(torch.tanh(self.linear(hidden)) * (1 + document[:, None]))
        return hidden + self._drop(inner)

    def forward(self, *, hidden, packed):
        if self.recomputed:
            return tensor_parallel.checkpoint(self._body, False, hidden, packed.cu_seqlens)
        return self._body(hidden, packed.cu_seqlens)


class Stack(nn.Module):
    """Layers, of which the first draws nothing."""

    def __init__(self, *, recomputed=True):
        super().__init__()
        self.layers = nn.ModuleList(Layer(recomputed=recomputed, dropout=number > 0) for number in range(4))

    def forward(self, hidden, packed):
        for layer in self.layers:
            hidden = layer(hidden=hidden, packed=packed)
        return hidden


class Tracker(random.CudaRNGStatesTracker):
    """Megatron's own tracker, over generators that need no GPU."""

    def __init__(self):
        self.reset()
        self.use_cudagraphable_rng, self.is_inference_rng_tracker = True, False


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)
    default = CountedGenerator()
    monkeypatch.setattr(torch.cuda, "default_generators", defaultdict(lambda: default))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(random, "_lazy_init", lambda: None)
    monkeypatch.setattr(random, "_lazy_call", lambda function: function())
    tracker = Tracker()
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", tracker)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    seeded(5)
    yield
    assert tensor_parallel.checkpoint is random.checkpoint
    assert random.checkpoint.__module__ == "megatron.core.tensor_parallel.random"


def seeded(seed):
    """Begin all random states anew, in place."""
    torch.cuda.default_generators[0].manual_seed(seed)
    tracker = random.get_cuda_rng_tracker()
    for number, name in enumerate(("data-parallel-rng", "model-parallel-rng")):
        if name not in tracker.states_:
            tracker.states_[name] = CountedGenerator()
        tracker.states_[name].manual_seed(seed + 10 * (number + 1))


def stack(**options):
    torch.manual_seed(1)
    return Stack(**options).double()


def graphed(plain, *, layers_per_piece=None, **options):
    module = copy.deepcopy(plain)
    cuts = () if layers_per_piece is None else list(module.layers)[layers_per_piece::layers_per_piece]

    def while_capturing():
        return recompute.repeating_random_numbers(FULL)

    around = Surroundings(while_capturing=while_capturing, repeats=FULL)
    generators = random.get_cuda_rng_tracker().get_states().values()
    return GraphedModule(
        module, [SMALL, LARGE], sample_every=0, cuts=cuts, surroundings=around, generators=[*generators], **options
    )


def train(module, *, reseed=False):
    """Everything that a few micro-batches give, forward and backward in 1F1B order: outputs, gradients, states."""
    seeded(7)
    found, held = [], {}
    order = [("f", 0), *itertools.chain(*((("f", i + 1), ("b", i)) for i in range(len(BOUNDS) - 1)))]
    for kind, index in [*order, ("b", len(BOUNDS) - 1)]:
        if kind == "f":
            if reseed and index == 3:
                seeded(9)
            x = torch.from_numpy(np.random.default_rng(index).normal(size=(TOKENS, HIDDEN))).requires_grad_()
            y = module(x, pack(BOUNDS[index]))
            held[index] = x, y
            found.append(y.detach().clone())
        else:
            x, y = held.pop(index)
            y.square().sum().backward()
            found.append(x.grad.clone())
    parameters = (module.module if isinstance(module, GraphedModule) else module).parameters()
    found += [parameter.grad.clone() for parameter in parameters]
    tracker = random.get_cuda_rng_tracker()
    states = [torch.cuda.default_generators[0].get_state(), *(s.get_state() for s in tracker.get_states().values())]
    return found, states


def assert_equal(one, other):
    (tensors, states), (others, their_states) = one, other
    assert len(tensors) == len(others) == 2 * len(BOUNDS) + 8
    assert [i for i, (a, b) in enumerate(zip(tensors, others, strict=True)) if not torch.equal(a, b)] == []
    assert states == their_states
    assert len(set(states)) == 3


@pytest.mark.parametrize("layers_per_piece", [None, 1, 2])
@pytest.mark.parametrize("reseed", [False, True])
def test_replays_recompute_with_the_masks_of_their_forwards(layers_per_piece, reseed):
    kept = train(stack(recomputed=False), reseed=reseed)
    graphs = graphed(stack(), num_slots=2, layers_per_piece=layers_per_piece)
    with recompute.repeating_random_numbers(FULL):
        assert_equal(train(graphs, reseed=reseed), kept)
    assert graphs.stats().replays == {SMALL: 3, LARGE: 2}
    assert graphs.stats().fallbacks.total() == 1
    for layer in graphs.module.layers:  # 4 captures: each forward and its recomputation
        assert layer.calls.count(True) == 8
    graphs.close()


def test_eager_recomputation_draws_the_masks_of_its_forward():
    kept = train(stack(recomputed=False))
    with recompute.repeating_random_numbers(FULL):
        module = stack()
        assert_equal(train(module), kept)
    assert [len(layer.calls) for layer in module.layers] == [2 * len(BOUNDS)] * 4
    unlike, _ = train(stack())
    assert not all(torch.equal(a, b) for a, b in zip(unlike, kept[0], strict=True)), "Megatron has mended it: drop ours"


def test_megatron_alone_recomputes_nothing_in_a_capture():
    module = stack()
    seeded(7)
    with decoder_surroundings.marked_as_capturing():
        module(torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True), pack(BOUNDS[0])).sum().backward()
    assert [len(layer.calls) for layer in module.layers] == [1] * 4


def test_a_backward_registers_only_states_from_which_it_draws_again():
    graphs = graphed(stack())
    with recompute.repeating_random_numbers(FULL):
        train_one(graphs)
    backwards = [g for g in RecordedGraph.made if len(g.generators) > 2]
    assert len(backwards) == 2  # of two buckets in one slot
    for graph in backwards:
        assert len(graph.generators) == 2 + 2 * 3  # three layers draw from two states each
    graphs.close()


def train_one(module):
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = module(x, pack(BOUNDS[0]))
    y.square().sum().backward()
    return y


def test_sequence_parallel_regions_share_a_state():
    """Megatron runs a whole block inside a fork where it is sequence-parallel: default and tracker share a state."""

    class Forked(Stack):
        def forward(self, hidden, packed):
            with random.get_cuda_rng_tracker().fork():
                return super().forward(hidden, packed)

    torch.manual_seed(1)
    kept = train(Forked(recomputed=False).double())
    torch.manual_seed(1)
    graphs = graphed(Forked().double(), num_slots=2)
    with recompute.repeating_random_numbers(FULL):
        found = train(graphs)
    assert_equal(found, kept)
    assert graphs.stats().replays.total() == 5
    graphs.close()


def test_a_recomputed_part_inside_another_one_draws_the_same():
    class Nested(Stack):
        def forward(self, hidden, packed):
            def run(x, boundaries):
                for layer in self.layers:
                    x = layer(hidden=x, packed=SimpleNamespace(cu_seqlens=boundaries))
                return x

            return tensor_parallel.checkpoint(run, False, hidden, packed.cu_seqlens)

    torch.manual_seed(1)
    kept = train(stack(recomputed=False))
    torch.manual_seed(1)
    graphs = graphed(Nested().double(), num_slots=2)
    with recompute.repeating_random_numbers(FULL):
        assert_equal(train(graphs), kept)
    graphs.close()


def test_a_state_that_graphs_do_not_register_is_refused():
    module = stack()
    graphs = GraphedModule(
        module,
        [SMALL],
        sample_every=0,
        surroundings=Surroundings(while_capturing=lambda: recompute.repeating_random_numbers(FULL), repeats=FULL),
    )
    with recompute.repeating_random_numbers(FULL):
        train_one(graphs)
    assert graphs.stats().fallbacks
    graphs.close()


def test_owners_may_end_in_any_order():
    own = random.checkpoint
    first, second = recompute.repeating_random_numbers(FULL), recompute.repeating_random_numbers(FULL)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tensor_parallel.checkpoint is random.checkpoint is not own
    second.__exit__(None, None, None)
    assert tensor_parallel.checkpoint is random.checkpoint is own
    with recompute.repeating_random_numbers(None):
        assert random.checkpoint is own


@pytest.mark.usefixtures("storage_is_copied")
def test_outputs_that_are_dropped_come_back_with_the_same_masks():
    """CheckpointWithoutOutput, by which Megatron recomputes norms, activations and up-projections."""
    layer = stack().layers[1]
    calls = []

    def run(recomputed):
        seeded(7)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
        boundaries = torch.tensor(BOUNDS[1], dtype=torch.int32)
        dropping = random.CheckpointWithoutOutput(fp8=None)

        def body(hidden):
            calls.append(recomputed)
            return layer._body(hidden, boundaries)

        inner = dropping.checkpoint(body, x) if recomputed else body(x)
        y = inner.square()
        if recomputed:
            dropping.discard_output_and_register_recompute(y)
        y.sum().backward()
        return x.grad

    kept = run(False)
    with recompute.repeating_random_numbers(FULL):
        assert torch.equal(run(True), kept)
    assert calls == [False, True, True]


def test_graphs_of_layers_keep_what_they_would_recompute():
    module = stack()
    seeded(7)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    with recompute.repeating_random_numbers(FULL):
        with recompute.keeping_activations(SELECTIVE):
            y = module(x, pack(BOUNDS[0]))
        y.sum().backward()
        assert [len(layer.calls) for layer in module.layers] == [1] * 4
        module(x, pack(BOUNDS[0])).sum().backward()
        assert [len(layer.calls) for layer in module.layers] == [3] * 4
    assert not cuda_graphs.is_graph_warmup()
    with recompute.keeping_activations(SimpleNamespace(recompute_granularity=None)):
        assert not cuda_graphs.is_graph_warmup()


def test_transformer_engines_checkpoint_is_mended_too(monkeypatch):
    """By it Megatron recomputes under FP8; it keeps references to random states as well."""
    made = []

    def own(function, *args, get_rng_state_tracker=None, distribute_saved_activations=False, tp_group=None, **more):
        made.append(get_rng_state_tracker is not None)
        return random.CheckpointFunction.apply(lambda *inner: function(*inner, **more), False, *args)

    engine, within = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    within.distributed = ModuleType("transformer_engine.pytorch.distributed")
    within.distributed.checkpoint = own
    for name, module in {engine.__name__: engine, within.__name__: within}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", within.distributed)
    layer = stack().layers[1]

    def run(how):
        seeded(7)
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
        boundaries = torch.tensor(BOUNDS[1], dtype=torch.int32)

        def body(hidden, *, scale):
            return layer._body(hidden, boundaries) * scale

        how(body, x).square().sum().backward()
        return x.grad

    def engines(body, x):
        tracker = random.get_cuda_rng_tracker
        return within.distributed.checkpoint(body, x, get_rng_state_tracker=tracker, tp_group=None, scale=2.0)

    kept = run(lambda body, x: body(x, scale=2.0))
    with recompute.repeating_random_numbers(FULL):
        assert torch.equal(run(engines), kept)
        assert made == [True]
        with recompute.keeping_activations(SELECTIVE):
            assert torch.equal(run(engines), kept)
        assert made == [True]
    assert within.distributed.checkpoint is own
    assert not torch.equal(run(engines), kept), "Transformer Engine has mended it"


def test_an_installation_mends_until_it_is_closed():
    own = random.checkpoint
    installation = Installation([], [], Decisions(1, enabled=False))
    installation.until_closed(recompute.repeating_random_numbers(FULL))
    assert random.checkpoint is not own
    installation.close()
    assert random.checkpoint is own
