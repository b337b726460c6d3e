"""Fields of Megatron's configs that thdprof has never looked at, and that are off their default, are named."""

from __future__ import annotations

import dataclasses
import logging

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from thdprof.megatron_limits import known_fields
from thdprof.runtime.megatron.run_stamp import warn_of_unread_fields

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "add_bias_linear": False}
PRETRAINING = {
    "kv_channels": 4, "num_query_groups": 1, "normalization": "RMSNorm", "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu, "add_bias_linear": False, "qk_layernorm": True, "bf16": True,
    "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "layernorm_epsilon": 1e-6, "init_method_std": 0.01, "gradient_accumulation_fusion": True,
    "deterministic_mode": True, "moe_token_dispatcher_type": "alltoall",
    "use_cpu_initialization": True, "variable_seq_lengths": True, "batch_p2p_comm": False, "softmax_scale": 0.5,
    "no_sync_func": print, "finalize_model_grads_func": print, "timers": print, "calculate_per_token_loss": True,
    "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_amax_history_len": 16, "cuda_graph_warmup_steps": 2,
}  # fmt: skip


def test_normal_configs_name_nothing():
    configs = [
        TransformerConfig(**SIZES),
        TransformerConfig(**SIZES, **PRETRAINING),
        TransformerConfig(**SIZES, **EXPERTS, moe_token_dispatcher_type="alltoall", moe_z_loss_coeff=1e-3),
        MLATransformerConfig(**SIZES, q_lora_rank=4, kv_lora_rank=4, beta_slow=2),
    ]
    for config in configs:
        assert known_fields.unread_fields(config, DistributedDataParallelConfig()) == []
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=40_000)
    assert known_fields.unread_fields(configs[0], ddp) == []


def test_what_nobody_looked_at_is_named_with_its_value():
    config = TransformerConfig(**SIZES, mlp_chunks_for_training=4, test_mode=True)
    assert known_fields.unread_fields(config) == ["test_mode=True", "mlp_chunks_for_training=4"]
    ddp = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("router",))
    assert known_fields.unread_fields(TransformerConfig(**SIZES), ddp) == [
        "ddp.param_name_patterns_for_fp32_local_accumulation=('router',)"
    ]


def test_a_field_of_experts_matters_only_with_experts():
    jitter = {"moe_input_jitter_eps": 0.01}
    assert known_fields.unread_fields(TransformerConfig(**SIZES, **jitter)) == []
    assert known_fields.unread_fields(TransformerConfig(**SIZES, **EXPERTS, **jitter)) == ["moe_input_jitter_eps=0.01"]


@pytest.mark.parametrize(("module", "named"), [(TransformerConfig.__module__, True), ("users.models", False)])
def test_a_field_that_a_newer_version_adds_is_named_and_one_of_another_package_is_not(module, named):
    @dataclasses.dataclass
    class Later(TransformerConfig):
        sparse_attention: str | None = None
        test_mode: bool = True

    Later.__module__ = module
    assert known_fields.unread_fields(Later(**SIZES)) == ["test_mode=True"]  # off megatron-core's own default
    changed = known_fields.unread_fields(Later(**SIZES, sparse_attention="block", test_mode=False))
    assert changed == (["sparse_attention='block'"] if named else [])


def test_every_field_that_is_said_to_be_known_is_one_and_has_one_kind():
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert fields >= known_fields.KNOWN
    assert {field.name for field in dataclasses.fields(DistributedDataParallelConfig)} >= known_fields.DDP_KNOWN
    kinds = (known_fields.READ, known_fields.OUTSIDE, known_fields.KNOWN)
    counted = [name for kind in kinds for name in kind & fields]
    assert len(counted) == len(set(counted)) > 200


def test_one_warning_names_all_of_them(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_unread_fields(TransformerConfig(**SIZES), DistributedDataParallelConfig())
        assert caplog.messages == []
        warn_of_unread_fields(TransformerConfig(**SIZES, mlp_chunks_for_training=4, test_mode=True), None)
    (said,) = caplog.messages
    assert "test_mode=True, mlp_chunks_for_training=4; compare some steps with --replay off" in said
