"""Qwen3-VL's decoder on a CPU, Bridge's own block with megatron-core's layers: what images add between layers, and
positions in three dimensions.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import torch
from support import pictures
from support.cpu_graphs import as_if_on_a_gpu
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    OVER,
    SMALL,
    TOKENS,
    FakeEngine,
)
from torch import nn

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron import decoder_surroundings, packed_seq_params
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.decoder.decoder import Decoder, DeepStack, is_between_layers, restore_arguments
from thdprof.runtime.megatron.kinds import chunk
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs

pytestmark = pytest.mark.usefixtures("parallel_state")
BLOCKS, ROPES = pictures.modelling("transformer_block"), pictures.modelling("rope")  # before CUDA is stood in for
FEATURES, ROTARY = 2, 8
BATCHES = [(SMALL, 3), (LARGE, 5), (OVER, 2), (SMALL, None), (LARGE, 1), (SMALL, 0), (SMALL, 16)]
"""Boundaries of micro-batches, and how many of their tokens are an image's; None: there is no image."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda *_: None))


class Attention(nn.Module):
    """Means over documents, as little as uses packed metadata."""

    def __init__(self, *_, **__):
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        found = (query + key + value).reshape(TOKENS, HIDDEN) * self.scale
        ends = packed_seq_params.cu_seqlens_q.tolist()
        return found + torch.cat([found[a:b].mean(0, keepdim=True).expand(b - a, -1) for a, b in pairwise(ends)])


def make_block():
    """Bridge's block of megatron-core's layers, whose attention adds rotary embeddings to its tokens."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    config = pictures.config_of(
        num_layers=3, hidden_size=HIDDEN, num_attention_heads=2, num_query_groups=2, kv_channels=HIDDEN // 2,
        use_cpu_initialization=True, bf16=False, params_dtype=torch.float32, qk_layernorm=False,
        gated_linear_unit=False, normalization="LayerNorm", mrope_section=[2, 1, 1],
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    return BLOCKS.Qwen3VLTransformerBlock(config, spec).train()


def chunk_graphs(block):
    decoder = Decoder(block, num_features=FEATURES)
    around = replace(decoder_surroundings.surround_decoder(block), while_capturing=nullcontext)
    run = chunk.ChunkGraphs(decoder, BUCKETS, num_slots=2, sample_every=0, surroundings=around)
    decoder.attach(run, cp_size=1)
    return decoder, run


def layer_graphs(block):
    decoder, engine = Decoder(block, num_features=FEATURES), FakeEngine()
    engine.block = block
    run = LayerGraphs(decoder, BUCKETS, num_slots=2, make=engine, sample_every=0)
    decoder.attach(run, cp_size=1)
    return decoder, run


def trained(block):
    """Outputs, and gradients of hidden states, of features and of weights, of all micro-batches."""
    draws, seen = torch.Generator().manual_seed(1), []
    for bounds, count in BATCHES:
        hidden = torch.randn(TOKENS, 1, HIDDEN, generator=draws).requires_grad_()
        given, rows = {}, []
        if count is not None:
            mask = torch.zeros(1, TOKENS, dtype=torch.bool)
            mask[0, torch.randperm(TOKENS, generator=draws)[:count]] = True
            rows = [torch.randn(count, HIDDEN, generator=draws).requires_grad_() for _ in range(FEATURES)]
            given = {"visual_pos_masks": mask, "deepstack_visual_embeds": [row * 2 for row in rows]}
        output = block(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.randn(TOKENS, 1, 1, HIDDEN // 2, generator=draws),
            packed_seq_params=packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu"),
            **given,
        )
        output.square().sum().backward()
        seen += [output.detach(), hidden.grad, *(row.grad for row in rows), *gradients(block)]
    return seen


def gradients(block):
    """The gradients of the weights since the last call."""
    found = [p.grad if p.grad is None else p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    return found


@pytest.mark.parametrize("graphs", [chunk_graphs, layer_graphs])
def test_numbers_are_those_of_the_blocks_own_whatever_the_number_of_an_images_tokens(graphs):
    plain, graphed = make_block(), make_block()
    decoder, run = graphs(graphed)
    compared = 0
    for found, other in zip(trained(graphed), trained(plain), strict=True):
        assert torch.equal(found, other)
        compared += bool(found.count_nonzero())
    assert compared > 100
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 1}
    assert run.stats().replays.total() == len(BATCHES) - 1
    decoder.detach()
    assert not {"forward", "_deepstack_process"} & {*vars(graphed)}


def test_an_image_moves_its_own_tokens_alone():
    block = make_block()
    stack = DeepStack(block, num_features=FEATURES)
    hidden = torch.randn(TOKENS, 1, HIDDEN)
    hidden[3] = -0.0
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[0, [2, 5]] = True
    arguments = {"visual_pos_masks": mask, "deepstack_visual_embeds": [torch.ones(2, HIDDEN), torch.zeros(2, HIDDEN)]}
    expected = block._deepstack_process(hidden.clone(), mask, torch.ones(2, HIDDEN))
    stack.attach()
    tensors = stack.taken(arguments, hidden)
    assert not arguments
    assert all(is_between_layers(name) for name in tensors)
    given = restore_arguments(tensors)
    found = block._deepstack_process(hidden.clone(), given["visual_pos_masks"], given["deepstack_visual_embeds"][0])
    assert torch.equal(found, expected)
    assert torch.equal(torch.signbit(found), torch.signbit(expected))  # a zero keeps its sign
    assert not torch.equal(found[2], hidden[2])


def test_features_of_another_number_than_the_models_run_eagerly():
    block = make_block()
    _, run = chunk_graphs(block)
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[0, 0] = True
    block(
        hidden_states=torch.randn(TOKENS, 1, HIDDEN).requires_grad_(),
        attention_mask=None,
        packed_seq_params=packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu"),
        visual_pos_masks=mask,
        deepstack_visual_embeds=[torch.ones(1, HIDDEN)],
    )
    assert run.stats().fallbacks == {FallbackReason.argument_not_known: 1}


def test_the_language_model_is_found_and_known_by_its_class():
    decoder = make_block()
    known = type("Qwen3VLGPTModel", (nn.Module,), {})()
    other = nn.Module()
    for language_model in (known, other):
        language_model.decoder = decoder
    whole = nn.Module()
    whole.language_model, whole.pre_process = known, True
    whole.vision_transformer_config = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    assert parts.language_model_of(whole) is known
    assert parts.is_checked(known)
    assert not parts.is_checked(other)
    assert parts.num_features(whole) == 3
    whole.pre_process = False
    assert parts.num_features(whole) == 0
    whole.pre_process, whole.vision_transformer_config = True, SimpleNamespace()  # as Qwen3.5-VL's
    assert parts.num_features(whole) == 0
    assert parts.num_features(known) == 0
    whole.decoder, known.embedding = decoder, nn.Linear(2, 2).requires_grad_(False)
    assert not parts.takes_gradient(whole)
    whole.vision_model = nn.Linear(2, 2)
    assert parts.takes_gradient(whole)
    whole.vision_model.requires_grad_(False)
    assert not parts.takes_gradient(whole)


def test_install_looks_for_the_decoder_in_the_language_model():
    known, other, plain = type("Qwen3VLGPTModel", (nn.Module,), {})(), nn.Module(), nn.Module()
    for model in (known, other, plain):
        model.decoder = nn.Identity()

    def wrapped(language_model):
        inner = nn.Module()
        inner.language_model, inner.decoder = language_model, language_model.decoder  # which Bridge's model shows, too
        chunk_of_it = nn.Module()
        chunk_of_it.module = inner
        return chunk_of_it

    assert parts.unwrap_model(wrapped(known)) is known
    assert parts.unwrap_model(plain) is plain
    assert parts.model_kind([wrapped(known)]) == "vision-language"
    assert parts.model_kind([wrapped(known), wrapped(other)]) == "other vision-language"
    assert parts.model_kind([plain]) is None


def test_a_sample_of_rotary_embeddings_has_the_form_of_a_micro_batchs():
    rope = ROPES.Qwen3VLMultimodalRotaryEmbedding
    module = rope(kv_channels=ROTARY, rotary_percent=1.0, cp_group=SimpleNamespace(size=lambda: 1))
    model = SimpleNamespace(rotary_pos_emb=module, position_embedding_type="mrope", mrope_section=[2, 1, 1])
    sample = parts.rotary_sample_of(model)(TOKENS)
    positions = torch.randint(0, TOKENS, (3, 1, TOKENS))
    real = module(positions, model.mrope_section)
    assert (sample.shape, sample.dtype) == (real.shape, real.dtype) == ((TOKENS, 1, 1, ROTARY), torch.float32)
    assert not module.is_thd_format
    model.position_embedding_type = "rope"
    assert parts.rotary_sample_of(model) is None
