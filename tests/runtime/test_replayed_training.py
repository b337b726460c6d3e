"""Training with replayed and eager micro-batches in turns, beside the plain module; captures are real, graphs are not.

`recorded_graphs` captures and replays on a CPU, so that buffers and gradients go the way that they go on a GPU.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import recorded_graphs  # noqa: E402
from support.recorded_graphs import RecordedGraph  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, PackedSequence, pack  # noqa: E402
from thdprof.runtime.graphs.module_state import unchanged_state  # noqa: E402
from thdprof.runtime.graphs.slots import Slot  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, HIDDEN = 12, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
FITTING = ([0, 12], [0, 5, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12])
TOO_MANY = [*range(6), 12]


class Reader(nn.Module):
    """Returns two outputs, a loss and a mark without gradient, which depend on all of the metadata.

    Of its parameters one gets no gradient and one is frozen.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.side = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((HIDDEN,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.full((HIDDEN,), 0.25))

    def forward(self, x, packed, scale=None):
        in_memory = packed.cu_seqlens if packed.cu_seqlens_padded is None else packed.cu_seqlens_padded
        place = torch.arange(len(x))
        document = torch.searchsorted(in_memory[1:].contiguous(), place, right=True)
        lengths = torch.diff(packed.cu_seqlens)[document]
        is_valid = place - in_memory[document] < lengths
        number = document if packed.seq_idx is None else packed.seq_idx
        hidden = self.linear(x * self.frozen + self.shift) * (1 + number[:, None] + lengths[:, None])
        hidden = torch.tanh(hidden if scale is None else hidden * scale) * is_valid[:, None]
        return {"hidden": hidden, "side": self.side(x), "valid": is_valid}


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)


@pytest.fixture
def plain():
    torch.manual_seed(1)
    return Reader()


def graphed(plain, **options):
    return GraphedModule(copy.deepcopy(plain), [SMALL, LARGE], sample_every=0, **options)


def draw(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def micro_batch(module, seed, packed, *, heads=("hidden", "side")):
    """Outputs and the input's gradient of one micro-batch; the loss reads the outputs `heads`."""
    x = draw(seed).requires_grad_()
    outputs = module(x, packed)
    sum(outputs[name].square().sum() for name in heads).backward()
    return [*(outputs[name].detach() for name in ("hidden", "side", "valid")), x.grad]


def gradients(module):
    """The gradients of the module's parameters; None where a parameter has none."""
    return [p.grad for p in getattr(module, "module", module).parameters()]


def assert_alike(ours, theirs):
    """Assert that two lists of tensors and None are equal bit for bit."""
    assert len(ours) == len(theirs) > 0
    for got, expected in zip(ours, theirs, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "step",
    [
        (FITTING[0], FITTING[3], FITTING[1]),
        (TOO_MANY, FITTING[0]),  # the eager gradient is there first
        (FITTING[2], TOO_MANY, FITTING[1], TOO_MANY),
        (TOO_MANY, TOO_MANY, FITTING[2], FITTING[2]),
    ],
)
def test_replayed_and_eager_micro_batches_add_to_the_same_gradients(plain, step, set_to_none):
    graphs = graphed(plain)
    for _ in range(3):
        for seed, bounds in enumerate(step):
            assert_alike(micro_batch(graphs, seed, pack(bounds)), micro_batch(plain, seed, pack(bounds)))
            assert_alike(gradients(graphs), gradients(plain))
        for module in (graphs, plain):
            module.zero_grad(set_to_none=set_to_none)
    assert graphs.stats().fallbacks.total() == 3 * step.count(TOO_MANY)
    assert graphs.stats().replays.total() == 3 * (len(step) - step.count(TOO_MANY))


def test_a_gradient_that_the_user_made_is_added_to(plain):
    graphs = graphed(plain)
    for _ in range(2):
        for module in (graphs, plain):
            for p in getattr(module, "module", module).linear.parameters():
                p.grad = torch.full_like(p, 0.75)
        assert_alike(micro_batch(graphs, 0, pack(FITTING[1])), micro_batch(plain, 0, pack(FITTING[1])))
        assert_alike(gradients(graphs), gradients(plain))
    assert graphs.stats().replays.total() == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_moved_in_memory_is_refused_until_graphs_are_captured_anew(plain, set_to_none):
    """As a trainer's `p.grad.data = p.grad.data / n` moves it: graphs would add to the memory where it was."""
    graphs = graphed(plain)
    for _ in range(2):
        micro_batch(graphs, 0, pack(FITTING[1]))
        weight = graphs.module.side.weight
        weight.grad.data = weight.grad.data / 2
        if set_to_none:
            graphs.zero_grad()
        y = graphs(draw().requires_grad_(), pack(FITTING[1]))
        with pytest.raises(RuntimeError, match=r"^grad of a parameter of shape \(4, 4\).*call recapture\(\)$"):
            y["side"].sum().backward()
        graphs.recapture()
        graphs.zero_grad()
    for module in (graphs, plain):
        micro_batch(module, 0, pack(FITTING[1]))
    assert_alike(gradients(graphs), gradients(plain))


@pytest.mark.parametrize("head", ["hidden", "side"])
def test_an_output_that_no_loss_reads_adds_nothing_to_any_gradient(plain, head):
    """In the micro-batch before, it had a gradient. Parameters that nothing else reads get zeros instead of None."""
    graphs = graphed(plain)
    for heads in (("hidden", "side"), (head,), ("hidden", "side"), (head,)):
        graphs.zero_grad()
        plain.zero_grad()
        ours = micro_batch(graphs, 3, pack(FITTING[2]), heads=heads)
        assert_alike(ours, micro_batch(plain, 3, pack(FITTING[2]), heads=heads))
        assert_alike(
            *(
                [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
                for module in (graphs.module, plain)
            )
        )
    assert graphs.stats().replays == {LARGE: 4}


def packed_with_padding(valid, in_memory, *, with_seq_idx):
    """Metadata of documents that are followed by padding: their boundaries, and where they lie in memory."""
    valid, in_memory = (np.array(boundaries, dtype=np.int32) for boundaries in (valid, in_memory))
    lengths = np.diff(in_memory)
    number = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    return PackedSequence(
        cu_seqlens=torch.from_numpy(valid),
        cu_seqlens_padded=torch.from_numpy(in_memory),
        max_seqlen=int(lengths.max()),
        seq_idx=number if with_seq_idx else None,
        host=valid,
        host_padded=in_memory,
    )


WITH_PADDING = [
    ([0, 3, 8], [0, 4, 12]),
    ([0, 2, 3, 5], [0, 6, 8, 12]),
    ([0, 9], [0, 12]),
    ([0, 1, 4, 6, 7], [0, 2, 6, 8, 12]),
]


@pytest.mark.parametrize("with_seq_idx", [False, True])
def test_graphs_read_where_documents_with_padding_lie_and_how_long_they_are(plain, with_seq_idx):
    graphs = graphed(plain)
    for seed, boundaries in enumerate(WITH_PADDING * 2):
        given = packed_with_padding(*boundaries, with_seq_idx=with_seq_idx)
        assert_alike(micro_batch(graphs, seed, given), micro_batch(plain, seed, given))
    assert_alike(gradients(graphs), gradients(plain))
    assert graphs.stats().replays == {SMALL: 4, LARGE: 4}


def test_graphs_read_the_document_of_every_token_of_all_ranks_that_share_a_micro_batch():
    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, packed):
            return self.linear(x) * (1 + packed.seq_idx.view(2, TOKENS).sum(0)[:, None])

    plain = Numbered()
    graphs = GraphedModule(copy.deepcopy(plain), [Bucket(3, 24, TOKENS, 2), Bucket(5, 24, TOKENS, 2)], sample_every=0)
    for seed, bounds in enumerate(([0, 24], [0, 7, 9, 24], [0, 2, 13, 14, 20, 24], [0, 3, 24], [0, 23, 24])):
        given = pack(bounds, with_seq_idx=True, cp_size=2)
        outputs = [module(draw(seed).requires_grad_(), given) for module in (graphs, plain)]
        assert torch.equal(*outputs)
        outputs[0].sum().backward()
    assert graphs.stats().replays.total() == 5


@pytest.mark.parametrize("with_padding", [False, True])
def test_boundaries_that_only_the_gpu_has_are_padded_there(plain, with_padding):
    graphs = graphed(plain)
    for seed, boundaries in enumerate(WITH_PADDING):
        host = packed_with_padding(*boundaries, with_seq_idx=True)
        if not with_padding:
            host = pack(boundaries[1], with_seq_idx=True)
        there = replace(host, host=None, host_padded=None)
        assert_alike(micro_batch(graphs, seed, there), micro_batch(plain, seed, there))
    assert_alike(gradients(graphs), gradients(plain))
    assert graphs.stats().replays == {SMALL: 2, LARGE: 2}


@contextmanager
def autocast():
    """Autocast of a GPU, which `torch.autocast` switches off on a machine without one."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextmanager
def in_eval_mode(part):
    """Evaluate one of a module's parts, while the module trains."""
    part.eval()
    try:
        yield
    finally:
        part.train()


CHANGES = {
    "autocast": lambda graphs: (autocast(), {}),
    "one part in eval mode": lambda graphs: (in_eval_mode(graphs.module.linear), {}),
    "a gradient": lambda graphs: (nullcontext(), {"scale": torch.ones(HIDDEN, requires_grad=True)}),
    "a dtype": lambda graphs: (nullcontext(), {"scale": torch.ones(HIDDEN, dtype=torch.float64)}),
    "a shape": lambda graphs: (nullcontext(), {"scale": torch.ones(1, HIDDEN)}),
    "no tensor": lambda graphs: (nullcontext(), {"scale": None}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_micro_batch_that_changes_what_graphs_have_fixed_runs_eagerly(plain, change):
    graphs, scale = graphed(plain), torch.full((HIDDEN,), 2.0)

    def run(module, **given):
        return module(draw().requires_grad_(), pack(FITTING[1]), **{"scale": scale, **given})["hidden"]

    run(graphs)
    for _ in range(2):
        around, given = CHANGES[change](graphs)
        with around, graphs.stats().expect(fallbacks=1):
            assert torch.equal(run(graphs, **given), run(plain, **given))
        with graphs.stats().expect(replays=1):
            assert torch.equal(run(graphs), run(plain))
    assert graphs.stats().fallbacks == {FallbackReason.input_differs: 2}


def test_a_first_micro_batch_on_two_devices_is_not_captured_for():
    """A graph would keep the value that a tensor of the host had at the capture."""

    class Ignoring(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, packed, other):
            return self.linear(x)

    graphs = GraphedModule(Ignoring(), [SMALL, LARGE], sample_every=0)
    for _ in range(2):
        graphs(draw().requires_grad_(), pack(FITTING[0]), torch.ones(1, device="meta"))
    assert not graphs.holds_graphs()
    assert graphs.stats().fallbacks == {FallbackReason.input_differs: 2}
    with graphs.stats().expect(replays=1, captures=2):
        graphs(draw().requires_grad_(), pack(FITTING[0]), torch.ones(1))


def test_without_gradients_it_does_not_matter_which_tensors_would_take_one(plain):
    graphs = graphed(plain, no_grad="replay")
    graphs(draw().requires_grad_(), pack(FITTING[0]))
    with torch.no_grad(), graphs.stats().expect(replays=1):
        assert torch.equal(graphs(draw(), pack(FITTING[3]))["hidden"], plain(draw(), pack(FITTING[3]))["hidden"])
    with graphs.stats().expect(fallbacks=1):
        graphs(draw(), pack(FITTING[3]))
    assert graphs.stats().fallbacks == {FallbackReason.input_differs: 1}


MOVES = {
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "thawed": lambda m: m.frozen.requires_grad_(True),
    "a hook on a gradient": lambda m: m.linear.bias.register_hook(lambda grad: 2 * grad),
    "a parameter moved": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.clone()),
    "a frozen parameter moved": lambda m: setattr(m.frozen, "data", m.frozen.data.clone()),
    "another parameter of the same memory": lambda m: setattr(m.linear, "bias", nn.Parameter(m.linear.bias.data)),
    "a buffer moved": lambda m: setattr(m.shift, "data", m.shift.data.clone()),
    "another buffer of the same memory": lambda m: setattr(m, "shift", m.shift.view(-1)),
    "another buffer": lambda m: setattr(m, "shift", m.shift.clone()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_module_that_is_not_as_captured_is_refused_until_it_is_captured_anew(plain, move):
    graphs = graphed(plain)
    micro_batch(graphs, 0, pack(FITTING[0]))
    MOVES[move](graphs.module)
    with pytest.raises(RuntimeError, match=r"recapture\(\)"), graphs.stats().expect():
        micro_batch(graphs, 1, pack(FITTING[0]))
    graphs.recapture()
    if move != "a hook on a gradient":  # which no capture allows
        with graphs.stats().expect(replays=1, captures=2):
            graphs(draw().requires_grad_(), pack(FITTING[0]))


def reduce_main_grads(module, names):
    """Give the parameters `names` a `main_grad`, to which a hook moves `.grad`; returns the hooks' runs by name."""
    runs = Counter()
    for name, p in getattr(module, "module", module).named_parameters():
        if name in names:
            p.main_grad = torch.full_like(p, 0.25)

        def reduce(p, name=name):
            runs[name] += 1
            if name in names and p.grad is not None:
                p.main_grad.add_(p.grad)
                p.grad = None

        if p.requires_grad:
            p.register_post_accumulate_grad_hook(reduce)
    return runs


@pytest.mark.parametrize(
    "names", [{"linear.weight", "linear.bias", "side.weight", "unused"}, {"linear.bias"}, {"side.weight"}, set()]
)
@pytest.mark.parametrize("reduced_by_hooks", [False, True])
def test_gradients_go_to_main_grad_where_there_is_one_and_hooks_run_once(plain, names, reduced_by_hooks):
    graphs = graphed(plain, reduced_by_hooks=reduced_by_hooks)
    ours, theirs = reduce_main_grads(graphs, names), reduce_main_grads(plain, names)
    for seed, bounds in enumerate((TOO_MANY, FITTING[0], FITTING[3], TOO_MANY, FITTING[1])):
        assert_alike(micro_batch(graphs, seed, pack(bounds)), micro_batch(plain, seed, pack(bounds)))
        assert ours == theirs
        assert_alike(gradients(graphs), gradients(plain))
        for p, q in zip(graphs.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(getattr(p, "main_grad", torch.zeros(())), getattr(q, "main_grad", torch.zeros(())))
    assert set(theirs) == {"linear.weight", "linear.bias", "side.weight"}
    assert graphs.stats().replays.total() == 3


MAIN_GRADS = {
    "replaced": lambda p: setattr(p, "main_grad", p.main_grad.clone()),
    "moved": lambda p: setattr(p.main_grad, "data", p.main_grad.data.clone()),
    "removed": lambda p: delattr(p, "main_grad"),
}


@pytest.mark.parametrize("how", MAIN_GRADS)
def test_a_main_grad_that_is_not_where_graphs_add_to_is_refused(plain, how):
    graphs = graphed(plain)
    reduce_main_grads(graphs, {"side.weight"})
    micro_batch(graphs, 0, pack(FITTING[0]))
    MAIN_GRADS[how](graphs.module.side.weight)
    y = graphs(draw().requires_grad_(), pack(FITTING[0]))
    with pytest.raises(RuntimeError, match=r"main_grad of a parameter of shape \(4, 4\).*recapture\(\)"):
        y["side"].sum().backward()


@pytest.mark.parametrize("how", ["nothing", *MAIN_GRADS, "made"])
def test_a_main_grad_that_moves_before_the_first_micro_batch_is_captured_anew(plain, how):
    said = []
    graphs = graphed(plain, say=said.append)
    moved = graphs.module.side.weight
    moved.main_grad = torch.zeros_like(moved)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(FITTING[0]))
    if how == "made":
        graphs.module.linear.bias.main_grad = torch.zeros(HIDDEN)
    elif how != "nothing":
        MAIN_GRADS[how](moved)
    with graphs.stats().expect(replays=1, captures=0 if how == "nothing" else 2):
        micro_batch(graphs, 0, pack(FITTING[0]))
    assert sum("main_grad of a parameter of shape" in line for line in said) == (how != "nothing")
    assert (moved.grad is None) == (how != "removed")


class FusedProduct(torch.autograd.Function):
    """A product whose backward adds to `main_grad` itself and gives autograd a dummy, as Transformer Engine's."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert ctx.weight.main_grad.dtype == torch.float64  # a kernel is made for one
        ctx.weight.main_grad.add_((grad * x).sum(0))
        ctx.weight.grad_added_to_main_grad = True
        return grad * ctx.weight, torch.full_like(ctx.weight, 0.0 if ctx.weight.zero_out_wgrad else 1000.0)


class FusedScale(nn.Module):
    """Scales by a weight whose gradient its kernel adds, and by another one; counts its passes in a buffer.

    A weight that asks for zeros as dummies is used once more, by a kernel that gives its gradient to autograd.
    """

    def __init__(self):
        super().__init__()
        self.fused, self.other = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x, packed):
        self.passes += 1
        y = FusedProduct.apply(x, self.fused) * self.other
        return y + x * self.fused if self.fused.zero_out_wgrad else y


@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("mark", [False, True])
def test_kernels_that_add_to_main_grad_themselves_are_not_added_twice(zero_out_wgrad, mark):
    """Captures and the passes before them leave main_grad and buffers as they were; an old mark means nothing."""
    module = FusedScale()
    for p in module.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.full_like(p, 0.5, dtype=torch.float64), mark
        p.zero_out_wgrad = zero_out_wgrad
    graphs = GraphedModule(module, [SMALL, LARGE], sample_every=0, num_slots=2)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(FITTING[0]))
    assert graphs.stats().captures == 4
    assert all((p.main_grad == 0.5).all() for p in module.parameters())
    assert module.passes == 0
    total = torch.zeros(HIDDEN)
    for seed in range(3):
        x = draw(seed).requires_grad_()
        graphs(x, pack(FITTING[seed])).sum().backward()
        total += x.detach().sum(0)
        assert torch.equal(x.grad, torch.full_like(x, 2.0 if zero_out_wgrad else 1.0))
        for p, uses in ((module.fused, 1 + zero_out_wgrad), (module.other, 1)):
            torch.testing.assert_close(p.main_grad, 0.5 + uses * total, check_dtype=False)
            assert p.grad is None
    assert module.passes == 3
    assert graphs.stats().replays.total() == 3


def test_a_capture_puts_back_what_its_passes_change_outside_the_module():
    """A tensor that only the passes make becomes zero."""
    counts = [torch.full((2,), 5.0)]

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, packed):
            if len(counts) == 1:
                counts.append(torch.zeros(3))
            for count in counts:
                count += 1
            return self.linear(x)

    around = Surroundings(extra_state=lambda: counts)
    graphs = GraphedModule(Counting(), [SMALL, LARGE], sample_every=0, surroundings=around)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(FITTING[0]))
    assert [count.tolist() for count in counts] == [[5.0] * 2, [0.0] * 3]
    graphs(draw().requires_grad_(), pack(FITTING[0])).sum().backward()
    assert [count.tolist() for count in counts] == [[6.0] * 2, [1.0] * 3]


def test_a_weight_that_two_layers_share_is_one_weight_to_graphs_too():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(HIDDEN, HIDDEN)
            self.second = nn.Linear(HIDDEN, HIDDEN)
            self.second.weight = self.first.weight

        def forward(self, x, packed):
            return self.second(torch.tanh(self.first(x)))

    plain = Shared()
    graphs, counted = GraphedModule(copy.deepcopy(plain), [SMALL], sample_every=0), Counter()
    for number, p in enumerate(graphs.module.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, number=number: counted.update([number]))
    for seed in range(2):
        for module in (graphs, plain):
            module(draw(seed).requires_grad_(), pack(FITTING[1])).square().sum().backward()
    for got, expected in zip(gradients(graphs), gradients(plain), strict=True):
        torch.testing.assert_close(got, expected)
    assert graphs.module.first.weight is graphs.module.second.weight
    assert counted == {0: 2, 1: 2, 2: 2}


def test_a_parameter_that_a_plain_object_keeps_gets_its_gradient(plain):
    class Holder:
        """No module: as Megatron's mixer of state-space layers has one."""

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))
            self.holder, self.nothing = Holder(), None
            self.holder.kept, self.holder.text = self.scale, "text"
            self.holder.strange = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)

        def forward(self, x, packed):
            return torch.tanh(x * self.holder.kept * self.holder.strange)

    plain = Holding()
    graphs = GraphedModule(copy.deepcopy(plain), [SMALL], sample_every=0)
    for seed in range(2):
        for module in (graphs, plain):
            module(draw(seed).requires_grad_(), pack(FITTING[1])).square().sum().backward()
    assert_alike(gradients(graphs), gradients(plain))
    assert graphs.module.holder.kept is graphs.module.scale
    assert graphs.stats().replays.total() == 2


@pytest.fixture
def pools(monkeypatch):
    """The memory pool of every graph that was captured, in order; each handle is another one."""
    number, used = itertools.count(), []

    class noted(torch.cuda.graph):
        def __init__(self, graph, *, pool, **options):
            used.append(pool)
            super().__init__(graph, pool=pool, **options)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(number)))
    monkeypatch.setattr(torch.cuda, "graph", noted)
    return used


def test_buckets_of_a_slot_share_a_pool_and_closing_frees_all_graphs(plain, pools):
    graphs = graphed(plain, num_slots=2)
    micro_batch(graphs, 0, pack(FITTING[0]))
    assert pools == [(0, 0)] * 4 + [(0, 1)] * 4  # two buckets, each forward and backward
    first = [*RecordedGraph.made]
    assert all(graph.operations for graph in first)
    graphs.recapture()
    assert not any(graph.operations for graph in first)
    micro_batch(graphs, 0, pack(FITTING[0]))
    again = RecordedGraph.made[len(first) :]
    assert len(again) == 8
    assert all(graph.operations for graph in again)
    held = graphs(draw().requires_grad_(), pack(FITTING[0]))
    graphs.close()
    assert not any(graph.operations for graph in again)
    with pytest.raises(RuntimeError, match="closed or dropped before the backward"):
        held["side"].sum().backward()


def test_after_a_capture_that_failed_its_slot_has_another_pool_and_the_other_bucket_replays(plain, pools):
    class FailsForFew(Reader):
        def forward(self, x, packed, scale=None):
            if len(packed.cu_seqlens) == SMALL.max_seqs + 1 and packed.host is None:  # in a capture
                raise RuntimeError("not for so few")
            return super().forward(x, packed, scale)

    module = FailsForFew()
    module.load_state_dict(plain.state_dict())
    module.frozen.requires_grad_(False)
    graphs = GraphedModule(module, [SMALL, LARGE], sample_every=0)
    for seed, bounds in enumerate(FITTING):
        assert_alike(micro_batch(graphs, seed, pack(bounds)), micro_batch(plain, seed, pack(bounds)))
        assert_alike(gradients(graphs), gradients(plain))
    assert graphs.stats().replays == {LARGE: 2}
    assert graphs.stats().fallbacks == {FallbackReason.capture_failed: 2}
    assert pools == [(0, 0)] * 2 + [(0, 1)] * 2  # the large bucket's, and once more
    dropped = [graph for graph in RecordedGraph.made if not graph.operations]
    assert len(dropped) == 2
    assert not any(graph.replays for graph in dropped)


def test_inputs_outputs_and_gradients_are_the_callers_own(plain):
    """Whatever their layout in memory, and for several inputs."""
    graphs = graphed(plain, num_slots=2)
    scale = torch.full((HIDDEN,), 2.0)
    for seed, bounds in enumerate(FITTING):
        found = []
        for module in (graphs, plain):
            x = draw(seed).t().contiguous().t().requires_grad_()  # columns one after the other
            own = scale.clone().requires_grad_()
            outputs = module(x, pack(bounds), scale=own)
            (outputs["hidden"].sum() + outputs["side"].sum()).backward()
            found.append([outputs["hidden"].detach().clone(), x.grad.clone(), own.grad])
            for mine in (x.detach(), x.grad, outputs["hidden"].detach()):
                mine.fill_(float("nan"))  # they are the caller's
        for got, expected in zip(*found, strict=True):  # another layout is multiplied in another order
            torch.testing.assert_close(got, expected)
    assert graphs.stats().replays.total() == 4
    assert graphs.pool_bytes() == 2 * (draw().nbytes + scale.nbytes)  # the static inputs; pools are counted as 0 here


@pytest.mark.parametrize("move", [None, *(name for name in MOVES if name != "a hook on a gradient")])
def test_a_module_that_changes_between_captures_and_training_is_captured_anew(plain, move):
    said = []
    graphs = graphed(plain, say=said.append)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(FITTING[0]))
    if move is not None:
        MOVES[move](graphs.module)
    with graphs.stats().expect(replays=1, captures=0 if move is None else 2):
        micro_batch(graphs, 0, pack(FITTING[0]))
    assert sum(line.startswith("WARNING: ") for line in said) == (move is not None)


class ByColumns(torch.autograd.Function):
    """Doubles, with columns one after the other in memory; its backward takes one block of memory, as kernels do."""

    @staticmethod
    def forward(ctx, x):
        return (2 * x).t().contiguous().t()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad.view(-1).view(grad.shape)


def test_gradients_of_outputs_are_one_block_of_memory_whatever_the_outputs_are():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, packed):
            return ByColumns.apply(self.linear(x))

    plain = Columns()
    graphs = GraphedModule(copy.deepcopy(plain), [SMALL], sample_every=0)
    for seed in range(2):
        for module in (graphs, plain):
            (module(draw(seed).requires_grad_(), pack(FITTING[1])) * draw(9)).sum().backward()
    assert_alike(gradients(graphs), gradients(plain))
    assert graphs.stats().replays.total() == 2


def test_buckets_whose_outputs_are_alike_share_their_gradients():
    slot = Slot([SMALL], SimpleNamespace(tensors=(draw(),), packed=pack(FITTING[1])))
    (first,) = slot.output_grads([draw()])
    (alike,) = slot.output_grads([draw(1)])
    assert alike is first
    for other in (draw()[1:], draw().double()):
        (found,) = slot.output_grads([other])
        assert found is not first
        assert (found.shape, found.dtype) == (other.shape, other.dtype)
    assert [g is first for g in slot.output_grads([draw(), draw()])] == [False, False]


def test_state_is_put_back_after_all_queued_passes(monkeypatch):
    """The host comes to the end of a capture while the GPU still runs its warm-up passes."""
    queued, module = [], Reader()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: [run() for run in queued] and queued.clear())
    given = torch.full((3,), 2.0)
    with unchanged_state(module, [], lambda: [given]):
        queued += [lambda: module.shift.add_(1), lambda: given.add_(1)]
    assert not queued
    assert (module.shift == 0.25).all()
    assert (given == 2.0).all()


def test_a_buffer_that_a_warm_up_pass_replaced_stays_for_the_graphs_that_read_it():
    module = Reader()
    before, other = module.shift, module.shift + 1
    with unchanged_state(module, [], lambda: [module.shift]):
        before.add_(1)
        module.shift = other
    assert module.shift is other
    assert (before == 0.25).all()


def test_a_buffer_that_is_also_a_further_tensor_after_the_passes_keeps_its_value():
    module, further = Reader(), []
    with unchanged_state(module, [], lambda: further):
        further.append(module.shift)
        module.shift.add_(1)
    assert (module.shift == 0.25).all()


def test_a_module_of_which_nothing_could_be_captured_has_not_changed():
    said = []

    class Fails(Reader):
        def forward(self, x, packed, scale=None):
            if packed.host is None:
                raise RuntimeError("in no capture")
            return super().forward(x, packed, scale)

    graphs = GraphedModule(Fails(), [SMALL, LARGE], sample_every=0, say=said.append)
    with graphs.ahead_of_training():
        graphs(draw().requires_grad_(), pack(FITTING[0]))
    for _ in range(2):
        micro_batch(graphs, 0, pack(FITTING[0]))
    assert said == []
    assert graphs.stats().fallbacks == {FallbackReason.capture_failed: 2}
