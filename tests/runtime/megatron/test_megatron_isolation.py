"""Installation.verify_isolation: a decoder of megatron-core's own layers under an installation, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.layer_graphs import BUCKETS, HIDDEN, SMALL, TOKENS, Attention, make_block  # noqa: E402

from thdprof.runtime.megatron import packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.install import Installation, PaddedEager  # noqa: E402
from thdprof.runtime.megatron.rank_agreement import Decisions  # noqa: E402

pytestmark = pytest.mark.usefixtures("parallel_state")


class DropsBoundaries(Attention):
    """Attention that takes the micro-batch for one document."""

    def forward(self, query, key, value, *rest, packed_seq_params, **others):
        one = SimpleNamespace(cu_seqlens_q=torch.tensor([0, TOKENS]))
        return super().forward(query, key, value, *rest, packed_seq_params=one, **others)


def installation(block, tail="none"):
    decoder = Decoder(block)
    run = PaddedEager(decoder, BUCKETS, tail_policy=tail)
    decoder.attach(run, cp_size=1)
    return Installation([decoder], [run], Decisions(1, enabled=False))


@pytest.fixture
def x():
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(("bounds", "tail"), [(SMALL, "none"), ([0, 2, 3, 9, 12], "append_dummy_seq")])
def test_a_decoder_keeps_documents_apart(x, bounds, tail):
    block, seen = make_block(), set()
    block.layers[0].self_attention.core_attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.add(len(kwargs["packed_seq_params"].cu_seqlens_q)), with_kwargs=True
    )
    made = installation(block, tail=tail)
    found = made.verify_isolation(packed_seq_params(bounds, device="cpu"), x)
    assert found, str(found)
    assert [*found.checks] == ["eager", "padded"]
    assert (len(seen), max(seen) - min(seen), made.stats().microbatches, x.grad) == (2, 4, 0, None)


def test_a_decoder_that_drops_the_boundaries_is_found(x):
    block = make_block()
    for layer in block.layers:
        layer.self_attention.core_attention.__class__ = DropsBoundaries
    leak = installation(block).verify_isolation(packed_seq_params(SMALL, device="cpu"), x).leak
    assert (leak.mode, leak.name, leak.source, leak.document) == ("eager", "outputs[0]", "document 0", 1)


def test_what_cannot_be_verified_is_refused(x):
    params, block = packed_seq_params(SMALL, device="cpu"), make_block()
    with pytest.raises(ValueError, match="give eager, padded"):
        installation(make_block()).verify_isolation(params, x, modes=["replayed"])
    block.config.expert_model_parallel_size = 4
    with pytest.raises(ValueError, match="communicate with other ranks: verify the same layers on one rank"):
        installation(block).verify_isolation(params, x)
