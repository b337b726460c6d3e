"""Installation.verify_isolation: a decoder of megatron-core's own layers under an installation, on a CPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.layer_graphs import BUCKETS, HIDDEN, SMALL, TOKENS, Attention, FakeEngine, make_block  # noqa: E402

from thdprof.runtime.megatron import packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.install import Installation, PaddedEager  # noqa: E402
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs  # noqa: E402
from thdprof.runtime.megatron.rank_agreement import Decisions  # noqa: E402

pytestmark = pytest.mark.usefixtures("parallel_state")


class DropsBoundaries(Attention):
    """Attention that takes the micro-batch for one document."""

    def forward(self, query, key, value, *rest, packed_seq_params, **others):
        one = SimpleNamespace(cu_seqlens_q=torch.tensor([0, TOKENS]))
        return super().forward(query, key, value, *rest, packed_seq_params=one, **others)


def installation(block, make=PaddedEager, tail="none"):
    decoder = Decoder(block)
    run = make(decoder, BUCKETS, tail_policy=tail)
    decoder.attach(run, cp_size=1)
    return Installation([decoder], [run], Decisions(1, enabled=False))


def layer_graphs(decoder, buckets, **options):
    engine = FakeEngine()
    engine.block = decoder.block
    return LayerGraphs(decoder, buckets, num_slots=1, make=engine, sample_every=0, **options)


@pytest.fixture
def x():
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


def drop_boundaries(block):
    for layer in block.layers:
        layer.self_attention.core_attention.__class__ = DropsBoundaries


@pytest.mark.parametrize(
    ("bounds", "tail", "documents", "bucket"),
    [(SMALL, "none", 2, BUCKETS[0]), ([0, 2, 3, 9, 12], "append_dummy_seq", 5, BUCKETS[1])],
)
def test_a_decoder_keeps_documents_apart(x, bounds, tail, documents, bucket):
    block = make_block()
    made = installation(block, tail=tail)
    found = made.verify_isolation(packed_seq_params(bounds, device="cpu"), x)
    assert found, str(found)
    assert found.documents == documents
    assert [(check.mode, check.bucket) for check in found.checks] == [("eager", None), ("padded", bucket)]
    assert {check.gradients for check in found.checks} == {1}
    assert found.skipped == {"replayed": "the inputs are not on a GPU"}
    assert made.stats().microbatches == 0
    assert x.grad is None
    assert float(block.layers[0].self_attention.core_attention.calls) == 0
    made.close()
    assert "forward" not in vars(block)


def test_padded_passes_have_the_entries_and_the_longest_document_of_the_bucket(x):
    block, seen = make_block(num_layers=1), []
    attention = block.layers[0].self_attention.core_attention
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["packed_seq_params"]), with_kwargs=True
    )
    params = packed_seq_params(SMALL, device="cpu")
    assert installation(block).verify_isolation(params, x)
    told = [(one.cu_seqlens_q.tolist(), one.max_seqlen_q) for one in seen]
    eager, padded = (SMALL, 9), ([*SMALL, TOKENS], TOKENS)
    assert told == [eager] * 4 + [padded] * 4


def test_a_decoder_that_drops_the_boundaries_is_found(x):
    block = make_block()
    drop_boundaries(block)
    leak = installation(block).verify_isolation(packed_seq_params(SMALL, device="cpu"), x).leak
    assert (leak.mode, leak.what, leak.document, leak.token) == ("eager", "output", 1, 7)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_layer_graphs_are_verified_and_dropped_again(x):
    block = make_block()
    made = installation(block, layer_graphs)
    params = packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")
    found = made.verify_isolation(params, x, modes=["eager", "padded", "replayed"])
    assert found, str(found)
    assert [check.gradients for check in found.checks] == [1, 1, 1]
    assert (made.stats().captures, made.stats().microbatches) == (0, 0)
    assert all(parameter.grad is None for parameter in block.parameters())
    block(hidden_states=x, attention_mask=None, packed_seq_params=params).sum().backward()
    assert made.stats().replays == {BUCKETS[0]: 1}


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_layer_graphs_of_a_decoder_that_drops_the_boundaries(x):
    block = make_block()
    drop_boundaries(block)
    params = packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu")
    leak = installation(block, layer_graphs).verify_isolation(params, x, modes=["replayed"]).leak
    assert (leak.mode, leak.document) == ("replayed", 1)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_an_installation_without_replays_says_so(x):
    found = installation(make_block()).verify_isolation(packed_seq_params(SMALL, device="cpu"), x)
    assert found
    assert found.skipped == {"replayed": "the installation pads and runs eagerly (replay=False)"}


def test_what_cannot_be_verified_is_refused(x):
    made = installation(make_block())
    params = packed_seq_params(SMALL, device="cpu")
    params.local_cp_size = 2
    with pytest.raises(ValueError, match="local_cp_size 2: verify a micro-batch that is on one rank"):
        made.verify_isolation(params, x)
    bare = packed_seq_params(SMALL, device="cpu")
    vars(bare).pop("_thdprof_host")
    with pytest.raises(TypeError, match="the boundaries are only on the device"):
        made.verify_isolation(bare, x)
    block = make_block()
    block.config.expert_model_parallel_size = 4
    with pytest.raises(ValueError, match=re.escape("expert_model_parallel_size 4: verify the same layers")):
        installation(block).verify_isolation(packed_seq_params(SMALL, device="cpu"), x)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_documents_that_share_scaling_factors_are_refused(x, recipe):
    block = make_block()
    made = installation(block)
    block.config.fp8, block.config.fp8_recipe = "hybrid", recipe
    with pytest.raises(ValueError, match=f"fp8_recipe {recipe}: all documents of a micro-batch share the scaling"):
        made.verify_isolation(packed_seq_params(SMALL, device="cpu"), x)
    block.config.fp8_recipe = "blockwise"
    assert made.verify_isolation(packed_seq_params(SMALL, device="cpu"), x)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("expert_tensor_parallel_size", 2, "expert_tensor_parallel_size 2: verify the same layers"),
        ("moe_router_load_balancing_type", ["global_aux_loss"], "has global_aux_loss, which counts the tokens of all"),
    ],
)
def test_experts_that_other_ranks_share_are_refused(x, monkeypatch, field, value, told):
    """A rank that looks for a leak makes more passes than one that finds none, and would wait for it."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    block = make_block()
    block.config.num_moe_experts = 2
    setattr(block.config, field, value)
    with pytest.raises(ValueError, match=told):
        installation(block).verify_isolation(packed_seq_params(SMALL, device="cpu"), x)


def test_experts_with_a_capacity_are_named_as_mixing_documents(x):
    block = make_block()
    drop_boundaries(block)
    block.config.num_moe_experts, block.config.moe_expert_capacity_factor = 4, 1.0
    block.config.moe_aux_loss_coeff = [0.0, 0.01]
    found = installation(block).verify_isolation(packed_seq_params(SMALL, device="cpu"), x)
    assert not found
    assert len(found.notes) == 2
    assert "verify with moe_expert_capacity_factor None" in str(found)
    assert "verify with moe_aux_loss_coeff 0" in str(found)
