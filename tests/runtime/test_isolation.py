"""verify_isolation: documents that stay apart, leaks by name, what is refused, and what is left as it was."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import support.leaky_modules as leaky  # noqa: E402
from support.leaky_modules import HIDDEN, Attention, Dropping  # noqa: E402

from thdprof.runtime import Bucket, GraphedModule, PackedSequence, pack, verify_isolation  # noqa: E402
from thdprof.runtime.dispatched_module import DispatchedModule  # noqa: E402
from thdprof.runtime.padding import pad_cu_seqlens  # noqa: E402

TOKENS, BOUNDS = 24, [0, 5, 6, 15, 24]  # the second document has one token
BUCKETS = [Bucket(6, TOKENS, TOKENS)]
GRAPHED = GraphedModule(Attention().train(), BUCKETS)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(TOKENS, HIDDEN)


def padded(bounds, memory):
    """Metadata of documents that are followed by padding."""
    inner, outer = pack(bounds), pack(memory)
    return replace(inner, cu_seqlens_padded=outer.cu_seqlens, host_padded=outer.host, max_seqlen=outer.max_seqlen)


@pytest.mark.parametrize("module", [Attention(), leaky.WithDropout(), GRAPHED])
@pytest.mark.parametrize("packed", [pack(BOUNDS), padded([0, 4, 5, 12], [0, 6, 8, 20]), pack([0, 0, 10, 10, TOKENS])])
def test_documents_that_stay_apart_raise_no_alarm(x, module, packed):
    found = verify_isolation(module.train(), packed, x)
    assert found, str(found)
    assert found.documents == np.count_nonzero(np.diff(packed.host))
    compared = "outputs: 1, gradients: 1, largest difference between unperturbed passes: 0"
    assert found.checks == {"eager": compared, "padded": compared}


@pytest.mark.parametrize(
    ("module", "mode", "name", "source", "document"),
    [
        (Dropping(), "eager", "outputs[0]", "document 0", 1),
        (leaky.OffByOne(), "eager", "outputs[0]", "document 1", 2),
        (leaky.LeakingBackwards(), "eager", "tensors[0].grad", "document 0", 3),
        (leaky.WrongWhenPadded(), "padded", "outputs[0]", "document 0", 1),
    ],
)
def test_a_leak_is_named(x, module, mode, name, source, document):
    leak = verify_isolation(module.train(), pack(BOUNDS), x).leak
    assert (leak.mode, leak.name, leak.source, leak.document, leak.token_in_document) == (
        mode,
        name,
        source,
        document,
        0,
    )
    assert leak.moved > 1e-4
    assert f"{source} moved {name} of document {document} at its token 0 by " in str(leak)


class ReadsLast(Attention):
    """The last token, which is padding or the tail, is added to the first."""

    def forward(self, x, packed):
        return super().forward(x, packed) + torch.nn.functional.pad(x[-1:], (0, 0, 0, len(x) - 1))


@pytest.mark.parametrize(
    ("packed", "policy", "source"),
    [
        (pack([0, 5, 15]), "none", "the tail"),
        (pack([0, 5, 15]), "extend_last", "document 1"),
        (padded([0, 4, 15], [0, 6, TOKENS]), "none", "the padding after document 1"),
    ],
)
def test_padding_and_tails_are_perturbed_too(x, packed, policy, source):
    leak = verify_isolation(GraphedModule(ReadsLast(), BUCKETS, tail_policy=policy), packed, x).leak
    assert (leak.source, leak.document, leak.name) == (source, 0, "outputs[0]")


def test_what_padding_and_tails_hold_is_not_watched(x):
    module, tail = Attention(), (torch.arange(TOKENS) >= 15)[:, None]
    assert verify_isolation(module, pack([0, 5, 15]), x, call=lambda t, own: module(*t, own) + tail * t[0].sum())


def test_a_module_that_does_not_repeat_itself_is_held_against_its_own_differences(x):
    found = verify_isolation(leaky.Noisy(Attention()), pack(BOUNDS), x)
    assert (bool(found), " passes: 0" in str(found)) == (True, False), str(found)
    assert verify_isolation(leaky.Noisy(Dropping()), pack(BOUNDS), x, tolerance=1e-4).leak.moved > 1e-4
    assert verify_isolation(Dropping(), pack(BOUNDS), x, tolerance=10.0).leak is None


def test_tokens_are_replaced_within_their_vocabulary():
    tokens, positions = torch.randint(0, 16, (1, TOKENS)), torch.arange(TOKENS)[None] % 9
    assert verify_isolation(leaky.Model(Attention()), pack(BOUNDS), tokens, positions, token_dim=-1)
    assert not verify_isolation(leaky.Model(Dropping()), pack(BOUNDS), tokens, positions, token_dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_shapes_and_grad_modes(x, dtype):
    for module in (Attention().to(dtype), Dropping().to(dtype)):
        call = lambda tensors, packed, own=module: {"y": own(tensors[0][0], packed)[None].sum(-1), "n": None}  # noqa: E731
        with torch.inference_mode():
            found = verify_isolation(module, pack(BOUNDS), x.to(dtype)[None], call=call, token_dim=1)
        assert bool(found) == (type(module) is Attention), str(found)


def test_a_module_that_does_not_move_shows_nothing(x):
    found = verify_isolation(Attention(), pack(BOUNDS), x, call=lambda tensors, packed: tensors[0] * 0)
    assert (bool(found), found.leak, found.unseen) == (False, None, (0, 1, 2, 3))
    assert str(found).startswith("nothing is shown: document 0 itself did not move")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": [0, 5]}, TypeError, "packed has no boundaries on the host"),
        ({"packed": pack([0, TOKENS])}, ValueError, "there is nothing to keep apart"),
        ({"packed": pack(BOUNDS, cp_size=2)}, ValueError, "ranks share the micro-batch"),
        ({"module": print}, TypeError, "give a torch module"),
        ({"tensors": (3,)}, TypeError, "give the module's tensor arguments"),
        ({"token_dim": 2}, ValueError, "token_dim 2: the first tensor has shape (24, 8)"),
        ({"modes": ["replayed"]}, ValueError, "modes ['replayed']: give eager, padded"),
        ({"module": GRAPHED, "modes": ["replayed"]}, ValueError, "the micro-batch cannot be replayed: no_cuda"),
        ({"call": lambda tensors, packed: tensors[0].sum()}, ValueError, "no output runs over the 24 tokens"),
        ({"call": lambda tensors, packed: tensors[0] / 0}, ValueError, "outputs[0] is infinite or no number"),
    ],
)
def test_what_cannot_be_verified_is_refused(x, change, error, message):
    arguments = {"module": Attention(), "packed": pack(BOUNDS), "tensors": (x,), **change}
    module, packed, tensors = (arguments.pop(name) for name in ("module", "packed", "tensors"))
    with pytest.raises(error, match=re.escape(message)):
        verify_isolation(module, packed, *tensors, **arguments)


def test_one_tensor_of_equal_integers_is_left_as_it_is_and_nothing_else_is_refused(x):
    types = torch.ones(TOKENS, dtype=torch.long)
    module, call = Attention(), lambda tensors, packed: tensors[0] * tensors[1][:, None]
    assert verify_isolation(module, pack(BOUNDS), x, types, call=call).leak is None
    with pytest.raises(ValueError, match="no tensor has different values over 24 tokens"):
        verify_isolation(module, pack(BOUNDS), types, call=call)


def test_nothing_of_the_callers_changes(x):
    module = leaky.WithDropout(shared=True).train()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state, before = torch.get_rng_state(), x.clone()
    verify_isolation(module, pack(BOUNDS), x, call=lambda tensors, packed: module(tensors[0].add_(1), packed))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)
    assert all(bool((p.grad == 3).all()) for p in module.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())


class FakeGraphs(DispatchedModule):
    """Replays over static metadata on a CPU; with `bakes`, that of one document, whatever comes."""

    bakes = False

    def _open(self, call):
        pass

    def _replay(self, bucket, call):
        host = np.array([0, TOKENS], np.int32) if self.bakes else call.boundaries.valid
        entries = pad_cu_seqlens(host, max_seqs=bucket.max_seqs, n_tokens=TOKENS)
        packed = PackedSequence(cu_seqlens=torch.from_numpy(entries), max_seqlen=bucket.max_seqlen)
        args, kwargs = call.substitute(call.tensors, packed)
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("bakes", [False, True])
def test_replays_are_verified_and_not_counted(x, monkeypatch, bakes):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    graphs = FakeGraphs(Attention().train(), BUCKETS)
    graphs.bakes = bakes
    found = verify_isolation(graphs, pack(BOUNDS), x.requires_grad_())
    assert bool(found) == (not bakes), str(found)
    assert [*found.checks] == ["eager", "padded", "replayed"]
    assert (found.leak.mode, found.leak.document) == ("replayed", 1) if bakes else found.leak is None
    assert (graphs.stats().microbatches, graphs.holds_graphs()) == (0, False)
