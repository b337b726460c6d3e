"""verify_isolation: documents that stay apart, every way in which they may not, and what is left as it was."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.leaky_modules import (  # noqa: E402
    HIDDEN,
    Attention,
    Convolution,
    Dropping,
    LeakingBackwards,
    Model,
    Noisy,
    OffByOne,
    WithDropout,
    WrongWhenPadded,
)
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, PackedSequence, pack, verify_isolation  # noqa: E402
from thdprof.runtime.dispatched_module import DispatchedModule  # noqa: E402
from thdprof.runtime.isolation import Region, regions_of, rounds  # noqa: E402
from thdprof.runtime.padding import Boundaries, pad_cu_seqlens  # noqa: E402
from thdprof.runtime.stack import PackedStack  # noqa: E402

TOKENS = 24
BOUNDS = [0, 5, 6, 15, 24]  # the second document has one token
FEW_PASSES = 6
"""Of four documents: one unperturbed pass, its repetition, and one for each document."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(TOKENS, HIDDEN)


def padded(bounds, memory):
    """Metadata of documents that are followed by padding."""
    inner, outer = pack(bounds), pack(memory)
    return replace(inner, cu_seqlens_padded=outer.cu_seqlens, host_padded=outer.host, max_seqlen=outer.max_seqlen)


# --- documents that stay apart --------------------------------------------------------------------------------------


def test_an_attention_that_reads_the_boundaries_keeps_documents_apart(x):
    found = verify_isolation(Attention(), pack(BOUNDS), x)
    assert found, str(found)
    assert (found.documents, found.leak, found.missing, found.unseen, found.notes) == (4, None, (), (), ())
    assert [check.mode for check in found.checks] == ["eager", "padded"]
    for check in found.checks:
        assert (check.outputs, check.gradients, check.passes) == (1, 1, FEW_PASSES)
        assert check.deterministic
        assert check.spread == 0
    eager, padded_to = found.checks
    assert (eager.bucket, padded_to.bucket) == (None, Bucket(8, 9, TOKENS))
    assert list(found.skipped) == ["replayed"]
    assert str(found) == "\n".join(
        [
            "4 documents stay apart",
            "  eager: 1 output and 1 gradient, value for value, 6 passes",
            "  padded, 8 documents: 1 output and 1 gradient, value for value, 6 passes",
            "  replayed: did not run: the module has no graphs: give a graphed module, or call verify_isolation of an "
            "Installation",
        ]
    )


def test_the_projects_own_stack_keeps_many_documents_apart_in_few_passes():
    stack = PackedStack(num_layers=1, hidden=16, heads=2, dropout=0.1).train()
    found = verify_isolation(stack, pack(np.arange(0, 65)), torch.randn(64, 16), modes=["eager", "padded"])
    assert found, str(found)
    assert found.documents == 64
    assert [check.passes for check in found.checks] == [2 + 2 * 6] * 2


def test_dropout_draws_alike_in_every_pass(x):
    module = WithDropout().train()
    found = verify_isolation(module, pack(BOUNDS), x)
    assert found, str(found)
    assert all(check.deterministic for check in found.checks)


def test_a_generator_of_the_modules_own_is_set_back_where_it_is_named(x):
    module = Noisy(Attention(), noise=1.0)
    named = verify_isolation(module, pack(BOUNDS), x, generators=[module.generator])
    assert named
    assert all(check.deterministic for check in named.checks)
    assert not verify_isolation(module, pack(BOUNDS), x)  # noise as large as the values hides what moves


def test_a_module_that_does_not_repeat_itself_is_held_against_its_own_spread(x):
    found = verify_isolation(Noisy(Attention()), pack(BOUNDS), x)
    assert found, str(found)
    for check in found.checks:
        assert not check.deterministic
        assert 0 < check.spread <= 1e-6
    leaking = verify_isolation(Noisy(Dropping()), pack(BOUNDS), x)
    assert not leaking
    assert leaking.leak.limit == pytest.approx(4 * leaking.checks[0].spread)
    assert leaking.leak.moved > 100 * leaking.leak.limit
    assert f"by {leaking.leak.moved:.3g}, more than {leaking.leak.limit:.3g}; " in str(leaking)


class Flickers(nn.Module):
    """An attention whose third output ever differs from the others by a little."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = Attention(), 0

    def forward(self, x, packed):
        self.calls += 1
        return self.inner(x, packed) + (1e-6 if self.calls % 3 == 0 else 0.0)


def test_a_module_that_rarely_differs_is_not_called_leaky(x):
    found = verify_isolation(Flickers(), pack(BOUNDS), x)
    assert found, str(found)
    assert not found.checks[0].deterministic


# --- leaks ----------------------------------------------------------------------------------------------------------


def test_boundaries_that_are_dropped_are_a_leak(x):
    found = verify_isolation(Dropping(), pack(BOUNDS), x)
    assert not found
    leak = found.leak
    assert (leak.mode, leak.what, leak.name) == ("eager", "output", "outputs[0]")
    assert [str(source) for source in leak.sources] == ["document 0"]
    assert (leak.document, leak.token, leak.token_in_document, leak.limit) == (1, 5, 0, 0.0)
    assert leak.tokens_moved == 1
    assert str(found).splitlines()[0] == (
        "documents do not stay apart: eager: document 0 moved outputs[0] of document 1 at its token 0 (token 5 of the "
        f"micro-batch) by {leak.moved:.3g}; 1 of the document's tokens moved"
    )


def test_the_size_of_a_movement_is_that_of_the_values(x):
    """The reported movement equals the one that the module shows when the same document is replaced by hand."""
    module = Dropping()
    leak = verify_isolation(module, pack(BOUNDS), x, gradients=False).leak
    generator = torch.Generator().manual_seed(0)
    other = x.clone()
    drawn = torch.randn(x.shape, generator=generator)
    other[:5] = (x.mean() + x.std(correction=0) * drawn)[:5]
    with torch.no_grad():
        moved = (module(other, pack(BOUNDS)) - module(x, pack(BOUNDS))).abs()[5].max()
    assert leak.moved == pytest.approx(float(moved), rel=1e-6)


def test_one_token_at_a_boundary_is_enough(x):
    leak = verify_isolation(OffByOne(), pack(BOUNDS), x).leak
    assert [source.number for source in leak.sources] == [1]
    assert (leak.document, leak.token, leak.tokens_moved) == (2, 6, 1)


def test_a_convolution_runs_over_boundaries(x):
    assert not verify_isolation(Convolution(), pack(BOUNDS), x)
    assert verify_isolation(Convolution(width=1), pack(BOUNDS), x)


def test_a_leak_of_the_backward_alone_is_found_in_gradients(x):
    leak = verify_isolation(LeakingBackwards(), pack(BOUNDS), x).leak
    assert (leak.mode, leak.what, leak.name) == ("eager", "gradient", "tensors[0].grad")
    assert [source.number for source in leak.sources] == [0]
    assert (leak.document, leak.token) == (3, 15)
    assert verify_isolation(LeakingBackwards(), pack(BOUNDS), x, gradients=False)


def test_a_leak_of_the_padded_form_alone_is_found(x):
    found = verify_isolation(WrongWhenPadded(), pack(BOUNDS), x)
    assert not found
    assert found.leak.mode == "padded"
    assert [check.mode for check in found.checks] == ["eager", "padded"]
    assert verify_isolation(WrongWhenPadded(), pack(BOUNDS), x, modes=["eager"])
    exact = GraphedModule(WrongWhenPadded().train(), [Bucket(4, TOKENS, TOKENS)])  # nothing to pad
    assert verify_isolation(exact, pack(BOUNDS), x)


class OneMovesOne(Attention):
    """One document is added to one other."""

    def __init__(self, source, target):
        super().__init__()
        self.source, self.target = source, target

    def forward(self, x, packed):
        mark = torch.zeros(len(x), 1)
        mark[self.target] = 1.0
        return super().forward(x, packed) + mark * x[self.source]


def test_every_pair_of_many_documents_is_looked_at():
    checked = 0
    x, packed = torch.randn(19, HIDDEN), pack(np.arange(0, 20))  # documents of one token
    for source, target in [(0, 18), (18, 0), (7, 8), (8, 7), (3, 11), (16, 0), (0, 16), (15, 16), (9, 10)]:
        leak = verify_isolation(OneMovesOne(source, target), packed, x).leak
        assert [(region.number, region.kind) for region in leak.sources] == [(source, "document")]
        assert (leak.document, leak.token) == (target, target)
        checked += 1
    assert checked == 9


class Jointly(Attention):
    """The last document moves only when both of the first two have other values: neither does it alone."""

    def forward(self, x, packed):
        self.first = x[:2].detach().clone() if not hasattr(self, "first") else self.first
        both = (x[:2].detach() != self.first).any(1).all()
        mark = torch.zeros(len(x), 1)
        mark[-1] = 1.0
        return super().forward(x, packed) + mark * both


def test_documents_that_move_another_only_together_are_named_together():
    leak = verify_isolation(Jointly(), pack(np.arange(0, 9)), torch.randn(8, HIDDEN), gradients=False).leak
    assert {0, 1} <= {source.number for source in leak.sources}
    assert len(leak.sources) > 1
    assert leak.document == 7
    assert " together moved outputs[0] of document 7" in str(leak)


def test_batch_statistics_mix_documents_and_the_text_says_why(x):
    module = WithDropout(shared=True).train()
    found = verify_isolation(module, pack(BOUNDS), x)
    assert not found
    assert found.notes == ("norm takes its statistics from all documents: verify in eval mode",)
    assert str(found).splitlines()[-1] == f"  the module mixes documents on purpose: {found.notes[0]}"
    assert verify_isolation(module.eval(), pack(BOUNDS), x)


def test_a_tolerance_lets_small_movements_pass(x):
    class Rounds(Attention):
        def forward(self, x, packed):
            return super().forward(x, packed) + 1e-6 * x.mean(0)

    assert not verify_isolation(Rounds(), pack(BOUNDS), x)
    assert verify_isolation(Rounds(), pack(BOUNDS), x, tolerance=1e-4)
    assert not verify_isolation(Dropping(), pack(BOUNDS), x, tolerance=1e-4)


# --- padding, tails, documents without tokens -----------------------------------------------------------------------


class ReadsPadding(Attention):
    """Documents end where their padding ends, and attention runs both ways: padding moves its document."""

    def forward(self, x, packed):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        parts = []
        for a, b in zip(packed.cu_seqlens_padded[:-1].tolist(), packed.cu_seqlens_padded[1:].tolist(), strict=True):
            if a < b:
                parts.append(nn.functional.scaled_dot_product_attention(*(t[None, None, a:b] for t in (q, k, v)))[0, 0])
        return torch.cat([*parts, x.new_zeros(len(x) - packed.cu_seqlens_padded[-1], HIDDEN)])


def test_padding_moves_no_document(x):
    documents = padded([0, 4, 5, 12], [0, 6, 8, 20])
    found = verify_isolation(Attention(), documents, x)
    assert found, str(found)
    assert found.documents == 3
    leak = verify_isolation(ReadsPadding(), documents, x).leak
    assert [str(source) for source in leak.sources] == ["the padding after document 0"]
    assert (leak.document, leak.token) == (0, 0)
    one = padded([0, 4], [0, 6])
    assert verify_isolation(Attention(), one, x[:6])
    assert not verify_isolation(ReadsPadding(), one, x[:6])


def test_what_padding_holds_is_not_watched(x):
    class LeavesGarbage(Attention):
        def forward(self, x, packed):
            y = super().forward(x, packed).clone()
            y[4:6] = torch.nan
            y[20:] = x[:4]  # the tail follows the first document
            return y

    assert verify_isolation(LeavesGarbage(), padded([0, 4, 5, 12], [0, 6, 8, 20]), x)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", ["document 0", "document 1", "the tail after the last document"]),
        ("append_dummy_seq", ["document 0", "document 1", "document 2"]),
        ("extend_last", ["document 0", "document 1"]),
    ],
)
def test_the_tail_is_what_the_policy_makes_of_it(x, policy, expected):
    from thdprof.runtime.padding import boundaries_of

    assert [str(r) for r in regions_of(boundaries_of(pack([0, 5, 15]), TOKENS, policy), TOKENS)] == expected

    class TailMoves(Attention):
        def forward(self, x, packed):
            return super().forward(x, packed) + nn.functional.pad(x[-1:], (0, 0, 0, len(x) - 1))

    kept, moving = (
        GraphedModule(module, [Bucket(6, TOKENS, TOKENS)], tail_policy=policy) for module in (Attention(), TailMoves())
    )
    assert verify_isolation(kept, pack([0, 5, 15]), x)
    leak = verify_isolation(moving, pack([0, 5, 15]), x).leak
    assert [str(source) for source in leak.sources] == [expected[-1]]
    assert leak.document == 0


def test_documents_without_tokens_are_passed_over(x):
    found = verify_isolation(Attention(), pack([0, 0, 10, 10, TOKENS, TOKENS]), x)
    assert found, str(found)
    assert found.documents == 2
    leak = verify_isolation(Dropping(), pack([0, 0, 10, 10, TOKENS]), x).leak
    assert ([source.number for source in leak.sources], leak.document) == ([1], 3)


# --- regions and rounds ---------------------------------------------------------------------------------------------


def test_every_ordered_pair_of_regions_is_once_apart():
    checked = 0
    for count in range(2, 70):
        regions = [Region(kind="document", number=n, begin=n, end=n + 1) for n in range(count)]
        sets = [set(together) for together in rounds(regions)]
        assert len(sets) <= min(count, 2 * (count - 1).bit_length())
        for one in regions:
            for other in regions:
                if one is not other:
                    assert any(one in together and other not in together for together in sets)
                    checked += 1
    assert checked > 100_000


def test_regions_cover_every_token_once():
    rng, checked = np.random.default_rng(0), 0
    for _ in range(200):
        count = int(rng.integers(1, 9))
        valid = np.cumsum(np.append(0, rng.integers(0, 5, count))).astype(np.int32)
        memory = np.cumsum(np.append(0, np.diff(valid) + rng.integers(0, 3, count))).astype(np.int32)
        n_tokens = int(memory[-1] + rng.integers(0, 4))
        regions = regions_of(Boundaries(valid=valid, padded=memory), n_tokens)
        assert [t for r in regions for t in range(r.begin, r.end)] == list(range(n_tokens))
        lengths = {r.number: r.end - r.begin for r in regions if r.kind == "document"}
        assert lengths == {n: int(length) for n, length in enumerate(np.diff(valid)) if length}
        checked += len(regions)
    assert checked > 500


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def test_tokens_are_replaced_within_their_vocabulary_and_their_embeddings_gradients_compared():
    tokens, positions = torch.randint(0, 16, (1, TOKENS)), torch.arange(TOKENS)[None] % 9
    found = verify_isolation(Model(Attention()), pack(BOUNDS), tokens, positions, token_dim=1)
    assert found, str(found)
    assert [check.gradients for check in found.checks] == [2, 2]
    leak = verify_isolation(Model(LeakingBackwards()), pack(BOUNDS), tokens, positions, token_dim=1).leak
    assert (leak.what, leak.name, leak.document) == ("gradient", "tensors[0] embedded, .grad", 3)
    leak = verify_isolation(Model(Dropping()), pack(BOUNDS), tokens, positions, token_dim=1).leak
    assert (leak.what, leak.document, leak.token) == ("output", 1, 5)


class Shaped(nn.Module):
    """An attention with inputs and outputs of other shapes."""

    def __init__(self, inner, read, write):
        super().__init__()
        self.inner, self.read, self.write = inner, read, write

    def forward(self, x, packed):
        return self.write(self.inner(self.read(x), packed))


@pytest.mark.parametrize(
    ("shape", "token_dim", "write"),
    [
        ((TOKENS, 1, HIDDEN), 0, lambda y: y[:, None]),
        ((1, TOKENS, HIDDEN), 1, lambda y: y[None]),
        ((1, TOKENS, HIDDEN), -2, lambda y: y[None]),
        ((TOKENS, 1, HIDDEN), 0, lambda y: y[None]),
        ((TOKENS, HIDDEN), 0, lambda y: y.sum(-1)),
        ((TOKENS, HIDDEN), 0, lambda y: (y.mean(), {"hidden": y, "none": None})),
    ],
)
def test_inputs_and_outputs_of_many_shapes(shape, token_dim, write):
    x = torch.randn(shape)
    kept = Shaped(Attention(), lambda t: t.reshape(TOKENS, HIDDEN), write)
    found = verify_isolation(kept, pack(BOUNDS), x, token_dim=token_dim)
    assert found, str(found)
    assert {(check.outputs, check.gradients) for check in found.checks} == {(1, 1)}
    dropped = Shaped(Dropping(), lambda t: t.reshape(TOKENS, HIDDEN), write)
    leak = verify_isolation(dropped, pack(BOUNDS), x, token_dim=token_dim).leak
    assert (leak.document, leak.token) == (1, 5)


def test_the_leak_is_named_by_the_output_that_moved(x):
    module = Shaped(nn.Identity(), lambda t: t, lambda y: y)
    module.inner = Attention()
    both = lambda tensors, packed: (module(*tensors, packed), tensors[0].cumsum(0))  # noqa: E731
    leak = verify_isolation(module, pack(BOUNDS), x, call=both).leak
    assert leak.name == "outputs[1]"


def test_a_tensor_that_all_documents_share_is_left_alone(x):
    class Rotated(Attention):
        def forward(self, x, table, packed):
            starts = torch.repeat_interleave(packed.cu_seqlens[:-1], torch.diff(packed.cu_seqlens))
            return super().forward(x * table[torch.arange(len(x)) - starts], packed)

    table = torch.rand(TOKENS, HIDDEN) + 0.5
    assert not verify_isolation(Rotated(), pack(BOUNDS), x, table)
    module = Rotated()
    assert verify_isolation(module, pack(BOUNDS), x, call=lambda given, packed: module(*given, table, packed))


def test_half_precision_double_precision_and_autocast(x):
    for dtype in (torch.bfloat16, torch.float64):
        assert verify_isolation(Attention().to(dtype), pack(BOUNDS), x.to(dtype))
        assert not verify_isolation(Dropping().to(dtype), pack(BOUNDS), x.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert verify_isolation(Attention(), pack(BOUNDS), x)
        assert not verify_isolation(Dropping(), pack(BOUNDS), x)


def test_gradients_are_compared_also_where_the_caller_has_switched_them_off(x):
    module = LeakingBackwards()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            found = verify_isolation(module, pack(BOUNDS), x.clone())
        assert found.leak.what == "gradient"


def test_a_module_that_changes_its_input_in_place(x):
    class Adds(Attention):
        def forward(self, x, packed):
            return super().forward(x.add_(1.0), packed)

    before = x.clone()
    assert verify_isolation(Adds(), pack(BOUNDS), x)
    assert torch.equal(x, before)


# --- what proves nothing --------------------------------------------------------------------------------------------


def test_a_module_that_does_not_move_proves_nothing(x):
    class Constant(nn.Module):
        def forward(self, x, packed):
            return x.detach() * 0 + 1

    found = verify_isolation(Constant(), pack(BOUNDS), x)
    assert not found
    assert (found.leak, found.unseen) == (None, (0, 1, 2, 3))
    assert str(found).splitlines()[0] == (
        "not proved: document 0 itself did not move when it was perturbed (4 of 4 documents)"
    )


def test_a_mode_that_was_asked_for_and_did_not_run_proves_nothing(x):
    found = verify_isolation(Attention(), pack(BOUNDS), x, modes=["eager", "replayed"])
    assert not found
    assert found.missing == ("replayed",)
    assert found.leak is None
    assert str(found).splitlines()[0] == "not proved: replayed did not run"


def changes_its_shape(x, seen):
    """`x`, twice when its first number is not what it was the first time."""
    seen.append(x[0, 0].item())
    return x.expand(1 + (seen[-1] != seen[0]), TOKENS, HIDDEN)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": [0, 5]}, TypeError, "packed is a list: give a PackedSequence, from thdprof.runtime.pack"),
        (
            {"packed": PackedSequence(cu_seqlens=torch.tensor([0, TOKENS]), max_seqlen=TOKENS)},
            TypeError,
            "was not made by thdprof.runtime.pack",
        ),
        ({"packed": pack([0, TOKENS])}, ValueError, "has 1 documents with tokens, and no padding"),
        ({"packed": pack([0, TOKENS + 1])}, ValueError, "cu_seqlens ends at 25, but the micro-batch has 24 tokens"),
        ({"packed": pack(BOUNDS, cp_size=2)}, ValueError, "shared out among ranks (cp_size 2)"),
        ({"module": lambda x, packed: x}, TypeError, "module is a function: give a torch module"),
        ({"tensors": ()}, TypeError, "the tensors are none: give the module's tensor arguments"),
        ({"tensors": (3,)}, TypeError, "the tensors are int"),
        ({"tensors": (torch.zeros(()),)}, ValueError, "the first tensor has no dimension"),
        ({"token_dim": 2}, ValueError, "token_dim 2: the first tensor has shape (24, 8)"),
        ({"modes": ["quickly"]}, ValueError, "modes ['quickly']: give some of eager, padded, replayed, or None"),
        ({"modes": []}, ValueError, "modes []: give some of"),
        ({"tensors": (torch.ones(TOKENS, dtype=int),)}, ValueError, "none of the 1 tensors can be perturbed"),
        ({"tolerance": -1.0}, ValueError, "tolerance -1.0: must not be negative"),
        ({"call": lambda tensors, packed: 3}, TypeError, "the module returned no tensor: give call="),
        (
            {"call": lambda tensors, packed: tensors[0].sum()},
            ValueError,
            "no output has a dimension of the micro-batch",
        ),
        (
            {"call": lambda tensors, packed: tensors[0] / 0},
            ValueError,
            "outputs[0] is infinite or not a number at token",
        ),
        (
            {"call": lambda tensors, packed, seen=[]: changes_its_shape(tensors[0], seen)},
            ValueError,
            "shapes of a module's outputs may not depend on the values",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(change, error, message):
    x = torch.ones(TOKENS, HIDDEN) + torch.randn(TOKENS, HIDDEN) / 100
    arguments = {"module": Attention(), "packed": pack(BOUNDS), "tensors": (x,), **change}
    module, packed, tensors = (arguments.pop(name) for name in ("module", "packed", "tensors"))
    with pytest.raises(error, match=re.escape(message)):
        verify_isolation(module, packed, *tensors, **arguments)


# --- what is left as it was -----------------------------------------------------------------------------------------


def test_nothing_of_the_callers_changes(x):
    module = WithDropout(shared=True).train()
    for number, parameter in enumerate(module.parameters()):
        if number % 2:
            parameter.grad = torch.full_like(parameter, 3.0)
        parameter.main_grad = torch.full_like(parameter, 2.0)
    fired, hooked = [], next(module.parameters())
    hooked.register_post_accumulate_grad_hook(fired.append)
    grads = [parameter.grad for parameter in module.parameters()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x.requires_grad_()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(2), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    verify_isolation(module, pack(BOUNDS), x)
    assert torch.equal(torch.rand(2), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]
    assert x.grad is None
    assert fired == []
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        assert parameter.grad is grad
        assert grad is None or bool((grad == 3).all())
        assert bool((parameter.main_grad == 2).all())
    assert len(buffers) == 4
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert all(part.training for part in module.modules())
    assert not any(part._forward_hooks for part in module.modules())
    module.eval()  # the hook is there again
    hooked.grad = None
    module(x, pack(BOUNDS)).sum().backward()
    assert len(fired) == 1


def test_everything_is_put_back_also_after_an_error(x):
    class Fails(WithDropout):
        def forward(self, x, packed):
            y = super().forward(x, packed)
            if self.calls == 1 and torch.rand(()) >= 0:
                raise RuntimeError("out of memory")
            return y

    module = Fails().train()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        verify_isolation(module, pack(BOUNDS), x)
    assert module.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


# --- graphs ---------------------------------------------------------------------------------------------------------


class FakeGraphs(DispatchedModule):
    """Replays over static metadata on a CPU; with `bakes`, that of the first micro-batch, whatever comes later."""

    def __init__(self, module, *, bakes=False, fails=False, **options):
        super().__init__(module, BUCKETS, **options)
        self.bakes, self.fails, self.opened, self.static = bakes, fails, 0, None

    def _open(self, call):
        self.opened += 1
        self._stats.captures += 1

    def _replay(self, bucket, call):
        if self.fails:
            return FallbackReason.capture_failed
        host = call.boundaries.valid if not self.bakes else np.array([0, TOKENS], np.int32)
        entries = pad_cu_seqlens(host, max_seqs=bucket.max_seqs, n_tokens=TOKENS)
        packed = PackedSequence(cu_seqlens=torch.from_numpy(entries), max_seqlen=bucket.max_seqlen)
        args, kwargs = call.substitute(call.tensors, packed)
        for parameter in self.module.parameters():  # as a replay does, whichever gradients are asked for
            parameter.grad = torch.ones_like(parameter)
            for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
        return self.module(*args, **kwargs)


BUCKETS = [Bucket(3, TOKENS, TOKENS), Bucket(6, TOKENS, TOKENS)]


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Lets micro-batches on a CPU be replayed by FakeGraphs."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_replays_are_verified_too(x):
    x.requires_grad_()
    decisions = []
    graphs = FakeGraphs(Attention().train(), on_decision=decisions.append)
    fired = []
    next(graphs.parameters()).register_post_accumulate_grad_hook(fired.append)
    found = verify_isolation(graphs, pack(BOUNDS), x, modes=["eager", "padded", "replayed"])
    assert found, str(found)
    assert [(check.mode, check.bucket) for check in found.checks] == [
        ("eager", None),
        ("padded", BUCKETS[1]),
        ("replayed", BUCKETS[1]),
    ]
    assert {check.gradients for check in found.checks} == {1}
    assert (graphs.opened, decisions, graphs.stats().microbatches, graphs.stats().captures) == (1, [], 0, 0)
    assert fired == []  # an optimizer in such a hook would take a step
    assert graphs.enabled
    assert all(parameter.grad is None for parameter in graphs.parameters())
    graphs(x, pack(BOUNDS))  # training's first micro-batch shows the captures what inputs are like
    assert (graphs.opened, decisions, graphs.stats().replays) == (2, [BUCKETS[1]], {BUCKETS[1]: 1})
    assert len(fired) == 1
    assert verify_isolation(graphs, pack(BOUNDS), x, modes=["replayed"])
    assert (graphs.opened, graphs.stats().captures, graphs.stats().microbatches) == (2, 1, 1)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_graph_that_keeps_the_boundaries_of_its_capture_is_found(x):
    x.requires_grad_()
    found = verify_isolation(FakeGraphs(Attention().train(), bakes=True), pack(BOUNDS), x)
    assert not found
    assert [check.mode for check in found.checks] == ["eager", "padded", "replayed"]
    assert (found.leak.mode, found.leak.document, found.leak.token) == ("replayed", 1, 5)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_replay_has_gradients_only_where_the_callers_tensors_take_them(x):
    found = verify_isolation(FakeGraphs(Attention().train()), pack(BOUNDS), x)
    assert found, str(found)
    assert [check.gradients for check in found.checks] == [1, 1, 0]
    assert "replayed, 6 documents: 1 output and no gradient" in str(found)


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize(
    ("graphs", "bounds", "mode", "reason"),
    [
        (lambda: FakeGraphs(Attention().eval()), BOUNDS, "replayed", "the module is in eval mode"),
        (lambda: FakeGraphs(Attention().train(), fails=True), BOUNDS, "replayed", "could not be captured"),
        (
            lambda: FakeGraphs(Attention().train(), overflow="error"),
            list(range(TOKENS + 1)),
            "padded",
            "24 documents, the largest bucket holds 6",
        ),
    ],
)
def test_what_would_run_eagerly_in_training_is_said(x, graphs, bounds, mode, reason):
    found = verify_isolation(graphs(), pack(bounds), x)
    assert found, str(found)
    assert reason in found.skipped[mode]
    assert "replayed" in found.skipped
    assert not verify_isolation(graphs(), pack(bounds), x, modes=["eager", "replayed"])


def test_a_graphed_module_without_a_gpu_is_verified_eagerly_and_padded(x):
    graphs = GraphedModule(Attention().train(), BUCKETS, tail_policy="append_dummy_seq")
    found = verify_isolation(graphs, pack([0, 5, 15]), x)
    assert found, str(found)
    assert found.documents == 3
    assert [check.bucket for check in found.checks] == [None, BUCKETS[0]]
    assert found.skipped == {"replayed": "the inputs are not on a GPU"}
    assert graphs.stats().microbatches == 0
    outer = nn.Sequential()
    outer.graphs = graphs
    inside = verify_isolation(outer, pack([0, 5, 15]), x, call=lambda tensors, packed: outer.graphs(*tensors, packed))
    assert [check.bucket for check in inside.checks] == [None, BUCKETS[0]]
    with pytest.raises(ValueError, match="shared out among ranks"):
        verify_isolation(GraphedModule(Attention(), BUCKETS, token_shards=2), pack([0, 5, 15]), x)
