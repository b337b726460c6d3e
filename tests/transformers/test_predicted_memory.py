"""The memory that is predicted of a Trainer's run, beside what the layers of transformers' models save."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

import torch
from support.schedules import pool_bytes
from support.trl_training import small_model

from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.analyze.times.memory import (
    cast_bytes,
    trainer_loss_bytes,
    trainer_state_bytes,
    transformers_tensors,
)
from thdprof.analyze.times.parameters import stage_parameters, stages
from thdprof.training import Model
from thdprof.transformers import attention, refusals

TOKENS = 128
SHAPE = Model(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=64,
    gated_linear_unit=True,
    normalization="RMSNorm",
    vocab_size=64,
)


class Kernels(torch.autograd.Function):
    """Saves what attention kernels save; the numbers are zeros."""

    @staticmethod
    def forward(ctx, query, key, value):
        query, key, value = (tensor.bfloat16() for tensor in (query, key, value))  # no kernel takes float32
        result = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, result, torch.zeros(query.shape[1], query.shape[0]))
        return result

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def saved_by_a_layer(model, *, autocast: bool) -> int:
    """Bytes that the second layer saves of a micro-batch of TOKENS tokens, with autocast's copies of its weights, but
    without weights and rope tables.
    """
    model.config._attn_implementation = attention.IMPLEMENTATION
    layer = refusals.decoder_of(model).layers[1]
    not_own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}
    inside = False

    def enter(module, args, kwargs):
        nonlocal inside
        inside = True
        not_own.update(t.untyped_storage().data_ptr() for t in kwargs["position_embeddings"])

    def leave(module, args, output):
        nonlocal inside
        inside = False

    def save(tensor):
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in not_own:
            storages[storage.data_ptr()] = storage
        return tensor

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)
    boundaries = {"cu_seq_lens_q": torch.tensor([0, TOKENS], dtype=torch.int32), "max_length_q": TOKENS}
    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        model(input_ids=torch.ones(1, TOKENS, dtype=torch.long), use_cache=False, **boundaries)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_layers_save_what_is_predicted(family, autocast, monkeypatch):
    monkeypatch.setattr(attention, "masked", lambda q, k, v, task: Kernels.apply(q, k, v))
    attention.register()
    model = small_model(family).to(torch.float32 if autocast else torch.bfloat16).train()
    shape = replace(SHAPE, qk_layernorm=family == "qwen3", autocast=autocast)
    predicted = sum(one.bytes_per_token for one in transformers_tensors(shape, "attention+mlp"))
    copies = cast_bytes(replace(shape, num_layers=1)) - 2 * 2 * 32 if autocast else 0  # of norms it makes none
    assert predicted * TOKENS + copies == saved_by_a_layer(model, autocast=autocast)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_layers_with_experts_save_what_is_predicted(family, monkeypatch):
    monkeypatch.setattr(attention, "masked", lambda q, k, v, task: Kernels.apply(q, k, v))
    attention.register()
    changes = {"num_local_experts": 6} if family == "mixtral" else {}
    model = small_model(family, **changes).to(torch.bfloat16).train()
    width = 16 if family == "qwen3_moe" else 64
    of_experts = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": width}
    shape = replace(SHAPE, qk_layernorm=family != "mixtral", **of_experts)
    predicted = sum(one.bytes_per_token for one in transformers_tensors(shape, "attention+moe"))
    # masks and what normalises a router's few probabilities are left out
    assert predicted * TOKENS == pytest.approx(saved_by_a_layer(model, autocast=False), rel=0.02)
    frozen = sum(one.bytes_per_token for one in transformers_tensors(replace(shape, lora_dim=4), "attention+moe"))
    assert frozen < predicted


def test_a_graph_holds_the_gradient_of_all_experts_first_weights_of_one_layer():
    shape = replace(SHAPE, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=16)
    settings = settings_of_trainer(experts="dropless")
    trained, frozen = (pool_bytes(model, settings, 4096) for model in (shape, replace(shape, lora_dim=4)))
    alone = pool_bytes(shape, settings_of_trainer(), 4096)
    assert trained - alone == 6 * 2 * 16 * 32 * 2
    assert frozen < alone


def settings_of_trainer(**more):
    given = {"loader": "trainer", "seq_length": TOKENS, **more}
    found, *_ = resolve_settings(given, pack_tokens=None, dataset_format="trl", default_loader=None, num_datasets=1)
    return found


def test_checkpointing_keeps_the_inputs_of_layers_alone():
    recomputed = replace(SHAPE, recompute_granularity="full", recompute_num_layers=1)
    first, *others = transformers_tensors(recomputed, "attention+mlp")
    assert (first.bytes_per_token, first.recomputed) == (2 * 32, False)
    assert all(one.recomputed for one in others)
    assert pool_bytes(recomputed, settings_of_trainer(), 4096) < pool_bytes(SHAPE, settings_of_trainer(), 4096)


def test_the_state_is_that_of_weights_in_their_dtype_and_of_float32_adapters():
    parameters = stage_parameters(SHAPE, stages(SHAPE, pipeline_size=1, num_chunks=1)[0])
    assert trainer_state_bytes(SHAPE, parameters) == (8 * parameters.dense, 4 * parameters.dense)
    by_autocast = replace(SHAPE, autocast=True)
    assert trainer_state_bytes(by_autocast, parameters) == (16 * parameters.dense, 8 * parameters.dense)
    adapted = replace(SHAPE, lora_dim=4)
    parameters = stage_parameters(adapted, stages(adapted, pipeline_size=1, num_chunks=1)[0])
    state, moments = trainer_state_bytes(adapted, parameters)
    assert (state, moments) == (2 * parameters.dense + 16 * parameters.adapters, 8 * parameters.adapters)
    assert trainer_loss_bytes(SHAPE, 64, 100) - trainer_loss_bytes(adapted, 64, 100) == 64 * 32 * 6
