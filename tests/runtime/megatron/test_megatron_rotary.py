"""Rotary tables of multi-latent attention: real megatron-core modules on a CPU, its fused kernels by a stand-in."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    OVER,
    SMALL,
    TOKENS,
    Attention,
    FakeEngine,
    forward,
    graphs_of,
    inputs,
    one_f_one_b,
    train,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from thdprof.offload.plan import Choice
from thdprof.runtime import Bucket, calibrate, pack
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron import measure_decoder, refusals, versions
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.decoder_costs import PackedDecoder
from thdprof.runtime.megatron.rotary import KeptTables, keep_tables

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")
ROTARY = 4
"""Dimensions that are rotated."""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def rotary(longest=8):
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    return YarnRotaryEmbedding(ROTARY, scaling_factor=4.0, original_max_position_embeddings=longest)


def test_tables_are_megatrons_own_numbers_and_stay_where_they_are():
    plain, module = rotary(), rotary()
    tables = KeptTables(module, 32)
    first = module.get_cached_cos_sin(5, dtype=torch.bfloat16, packed_seq=True)
    places, compared = [t.data_ptr() for t in first], 0
    for length in (5, 3, 32, 8, 31):
        found = module.get_cached_cos_sin(length, dtype=torch.bfloat16, packed_seq=True)
        expected = plain.get_cached_cos_sin(length, dtype=torch.bfloat16, packed_seq=True)
        for table, other in zip(found, expected, strict=True):
            assert table.shape == (length, 1, 1, ROTARY)
            assert table.is_contiguous()
            assert torch.equal(table, other)
            compared += 1
        assert [t.data_ptr() for t in found] == places
    assert compared == 10
    tables.detach()
    assert "get_cached_cos_sin" not in vars(module)


def test_a_token_behind_the_last_document_reads_a_row_of_the_table():
    module = rotary()
    KeptTables(module, 32)
    cos, sin = module.get_cached_cos_sin(7, dtype=torch.float32, packed_seq=True)
    for table in (cos, sin):
        assert table.storage_offset() == ROTARY  # position -1 lies in the same memory
        before = torch.as_strided(table, (ROTARY,), (1,), 0)
        assert torch.equal(before, table[0, 0, 0])


def test_tables_of_other_kinds_and_longer_ones_leave_the_first_alive_and_the_modules_buffers_alone():
    module = rotary()
    buffers = [(b, b.data_ptr(), b.clone()) for b in (module.cos_cached, module.sin_cached)]
    state = module.max_seq_len_cached, module.dtype_cached, module.packed_seq_cached
    KeptTables(module, 32)
    first, _ = module.get_cached_cos_sin(5, dtype=torch.float32, packed_seq=True)
    values, place = first.clone(), first.data_ptr()
    del first
    module.get_cached_cos_sin(4, dtype=torch.float32)  # not packed, as in evaluation
    module.get_cached_cos_sin(4, dtype=torch.bfloat16, packed_seq=True)
    longer, _ = module.get_cached_cos_sin(40, dtype=torch.float32, packed_seq=True)
    assert longer.data_ptr() != place
    again, _ = module.get_cached_cos_sin(5, dtype=torch.float32, packed_seq=True)
    assert again.data_ptr() == place
    assert torch.equal(again, values)
    for (buffer, pointer, saved), now in zip(buffers, (module.cos_cached, module.sin_cached), strict=True):
        assert now is buffer
        assert now.data_ptr() == pointer
        assert torch.equal(now, saved)
    assert (module.max_seq_len_cached, module.dtype_cached, module.packed_seq_cached) == state


def test_longer_tables_make_way_for_longer_ones():
    """Else every longer document of a run without buckets would leave a table behind, in every layer."""
    module = rotary()
    KeptTables(module, 8)
    kept, _ = module.get_cached_cos_sin(8, packed_seq=True)
    gone = [StorageWeakRef(module.get_cached_cos_sin(n, packed_seq=True)[0].untyped_storage()) for n in (9, 12, 40)]
    gc.collect()
    assert [reference.expired() for reference in gone] == [True, True, False]
    assert module.get_cached_cos_sin(8, packed_seq=True)[0].data_ptr() == kept.data_ptr()


def test_a_graph_reads_no_table_that_may_make_way(monkeypatch):
    module = rotary()
    KeptTables(module, 8)
    module.get_cached_cos_sin(9, packed_seq=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a graph asks for 9 positions of a rotary table, but only 8 are kept"):
        module.get_cached_cos_sin(9, packed_seq=True)


def test_a_bucket_that_names_longer_documents_than_it_holds_has_its_table():
    class Run(DispatchedModule):
        _open = _replay = None

    assert Run(nn.Identity(), [Bucket(2, 16, 8), Bucket(4, 8, 8)]).longest() == 16
    assert Run(nn.Identity(), [Bucket(2, 4, 8)]).longest() == 8
    assert Run(nn.Identity(), []).longest() == 0


def test_a_table_is_not_made_inside_a_capture(monkeypatch):
    module = rotary()
    KeptTables(module, 32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a rotary table of 32 positions was first asked for inside a capture"):
        module.get_cached_cos_sin(5, packed_seq=True)


# --- whole layers ---------------------------------------------------------------------------------------------------


def positions_of(boundaries):
    """Position of every token in its document."""
    ends = boundaries.tolist()
    return torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])


def rotated(x, cos, sin, boundaries):
    """Rotate the last dimensions as the fused kernels do."""
    where = positions_of(boundaries)
    cos, sin = (table[where, 0].reshape(-1, 1, ROTARY) for table in (cos, sin))
    left, right = x[..., 0::2], x[..., 1::2]
    half = ROTARY // 2
    return torch.cat(
        (left * cos[..., :half] - right * sin[..., :half], right * cos[..., half:] + left * sin[..., half:]), -1
    )


@pytest.fixture
def tables_read(monkeypatch):
    """Where the tables lay that the kernels were given; the kernels themselves replaced."""
    from megatron.core.transformer import multi_latent_attention as module

    seen = []

    def for_q(q, cos, sin, head, emb, boundaries, *_):
        assert len(cos) >= int(boundaries.diff().max())
        seen.append((cos.data_ptr(), sin.data_ptr()))
        return torch.cat((q[..., :head], rotated(q[..., head:], cos, sin, boundaries)), -1)

    def for_kv(kv, k_pos, cos, sin, emb, k_dim, v_dim, boundaries, *_):
        key = rotated(k_pos, cos, sin, boundaries).expand(-1, kv.shape[1], -1)
        return torch.cat((kv[..., :k_dim], key), -1), kv[..., k_dim:]

    monkeypatch.setattr(module, "fused_apply_mla_rope_for_q", for_q)
    monkeypatch.setattr(module, "fused_apply_mla_rope_for_kv", for_kv)
    return seen


class Latent(Attention):
    """Takes queries and keys with more dimensions than values."""

    def forward(self, query, key, value, *rest, **named):
        flat = [t.reshape(TOKENS, -1)[:, :HIDDEN] for t in (query, key, value)]
        return super().forward(*flat, *rest, **named)


def make_latent():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    torch.manual_seed(0)
    config = MLATransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        q_lora_rank=6,
        kv_lora_rank=6,
        qk_head_dim=4,
        qk_pos_emb_head_dim=ROTARY,
        v_head_dim=8,
        original_max_position_embeddings=4,
        use_cpu_initialization=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=[],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        normalization="LayerNorm",
    )
    config.apply_rope_fusion = True  # whose own check wants Transformer Engine
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = Latent
    block = TransformerBlock(config, spec).train()
    for layer in block.layers:
        layer.self_attention.linear_proj = nn.Linear(HIDDEN, HIDDEN)
        layer.self_attention.linear_proj.forward = lambda x, own=layer.self_attention.linear_proj: (
            nn.functional.linear(x, own.weight, own.bias),
            None,
        )
    return block


def test_layers_read_one_table_through_captures_replays_and_eager_micro_batches(tables_read):
    plain, graphed = make_latent(), make_latent()
    mixed = [SMALL, OVER, LARGE, SMALL, OVER, LARGE]  # the longest documents differ from one to the next
    batches = list(zip(inputs(len(mixed)), mixed, strict=True))
    expected = train(plain, batches, one_f_one_b(len(mixed)))
    tables_read.clear()
    run = graphs_of(graphed, FakeEngine())
    found = train(graphed, batches, one_f_one_b(len(mixed)))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert run.stats().replays == {BUCKETS[0]: 2, BUCKETS[1]: 2}
    assert len(tables_read) > 20
    assert len(set(tables_read)) == len(graphed.layers)  # each layer its own, always the same
    assert len(keep_tables(plain, TOKENS)) == len(graphed.layers)


def test_detaching_gives_the_layers_their_own_tables_back(tables_read):
    block = make_latent()
    run = graphs_of(block, FakeEngine())
    modules = [layer.self_attention.rotary_pos_emb for layer in block.layers]
    assert all(isinstance(vars(module)["get_cached_cos_sin"], KeptTables) for module in modules)
    forward(block, inputs(1)[0].requires_grad_(), SMALL).sum().backward()
    run.close()
    run.module.detach()
    assert not any("get_cached_cos_sin" in vars(module) for module in modules)


# --- measuring a decoder --------------------------------------------------------------------------------------------


class Chunk(nn.Module):
    """As megatron-core's DistributedDataParallel around a model."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder, self.syncs = decoder, True

    @contextmanager
    def no_sync(self):
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True


GRID = calibrate.Grid(n_tokens=TOKENS, n_seqs=[1], max_seqs=[2], max_seqlen=[TOKENS])


@pytest.fixture
def measured(monkeypatch):
    """A model to measure, and what its layers have of tables while that goes on."""
    model, seen = Chunk(make_latent()), []
    model.decoder.config.cuda_graph_impl = "none"
    monkeypatch.setattr(versions, "check", lambda: None)
    monkeypatch.setattr(parts, "has_graph_safe_rng", lambda: True)

    def measure(module, make_input, grid, **options):
        tables = [vars(layer.self_attention.rotary_pos_emb)["get_cached_cos_sin"] for layer in module.block.layers]
        seen.append((model.syncs, [table._length for table in tables]))
        raise RuntimeError("not every bucket was replayed")

    monkeypatch.setattr(calibrate, "measure", measure)
    return model, seen


def test_tables_are_in_place_while_a_decoder_is_measured_and_no_gradient_is_reduced(measured):
    model, seen = measured
    with pytest.raises(RuntimeError, match="not every bucket"):
        measure_decoder(model, model.decoder.config, GRID, name="x")
    assert seen == [(False, [TOKENS] * len(model.decoder.layers))]
    assert model.syncs
    assert not any("get_cached_cos_sin" in vars(part.self_attention.rotary_pos_emb) for part in model.decoder.layers)


@pytest.mark.parametrize("first", [True, False])
def test_a_later_stage_is_measured_on_the_input_that_it_is_given(first):
    block = TransformerBlockOfOneLayer(first)
    model = nn.Module()
    model.decoder, model.config = block, SimpleNamespace(multi_latent_attention=False)
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    output = PackedDecoder(model)(x, pack([0, 4]))
    output.sum().backward()
    assert torch.equal(output, 2 * x)
    assert torch.equal(x.grad, torch.full((4, 2), 2.0))
    assert block.input_tensor is None


class TransformerBlockOfOneLayer(nn.Module):
    """Reads its input as megatron-core's TransformerBlock does: a later stage, from an attribute."""

    def __init__(self, first):
        super().__init__()
        self.pre_process, self.input_tensor = first, None

    def forward(self, hidden_states, attention_mask, packed_seq_params):
        return 2 * (hidden_states if self.pre_process else self.input_tensor)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_moe_experts": 4, "expert_model_parallel_size": 2}, "expert_model_parallel_size is 2: numbers of rows"),
        ({"multi_latent_attention": True, "apply_rope_fusion": False}, "apply_rope_fusion is False"),
        ({"qk_clip": True}, "qk_clip is True"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is 'local', graphs.impl chunk needs 'none'"),
    ],
)
def test_a_decoder_that_chunk_graphs_cannot_serve_is_not_measured(measured, changes, line):
    model, seen = measured
    for name, value in changes.items():
        setattr(model.decoder.config, name, value)
    with pytest.raises(refusals.SettingsError, match=line):
        measure_decoder(model, model.decoder.config, GRID, name="x")
    assert not seen


def test_an_installed_decoder_is_not_measured(measured):
    model, seen = measured
    model.decoder.forward = model.decoder.forward
    with pytest.raises(refusals.SettingsError, match="the forward of TransformerBlock is replaced: close"):
        measure_decoder(model, model.decoder.config, GRID, name="x")
    assert not seen


def test_what_latent_projections_save_is_named_as_of_the_projections_of_other_attention():
    names = [n for n, _ in make_latent().layers[0].named_modules() if n.startswith("self_attention.")]
    projections = [n for n in names if n.rpartition(".")[2].startswith(("linear_q", "linear_kv", "q_lay", "kv_lay"))]
    assert len(projections) == 6
    assert [n for n in names if Choice(modules=("qkv_linear",)).takes(n)] == projections
