"""The model out of a Hugging Face config.json. Sizes are of released models, as their own files give them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from thdprof.analyze import read_model
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.training import Model

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
CONFIGS = {
    "llama": (LLAMA3_8B, {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_query_groups": 8, "head_dim": 128,
        "gated_linear_unit": True, "normalization": "RMSNorm", "rotary": True, "add_bias_linear": False,
        "vocab_size": 128256, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "moe_layers": 0,
        "precision": "bf16", "tensor_model_parallel_size": 1,
    }),
    "mistral, whose class fills in the groups": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_hidden_layers": 32, "vocab_size": 32000, "sliding_window": None},
        {"num_query_groups": 8, "gated_linear_unit": True, "vocab_size": 32000},
    ),
    "qwen2": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
         "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936,
         "sliding_window": 32768, "use_sliding_window": False},
        {"head_dim": 64, "qk_layernorm": False, "untie_embeddings_and_output_weights": False, "vocab_size": 151936},
    ),
    "qwen3": (
        {"model_type": "qwen3", "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
         "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True,
         "vocab_size": 151936},
        {"head_dim": 128, "qk_layernorm": True, "num_layers": 28, "untie_embeddings_and_output_weights": False},
    ),
    "qwen3 with experts": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
         "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "vocab_size": 151936},
        {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_layers": 48, "head_dim": 128,
         "moe_shared_expert_intermediate_size": None},
    ),
    "experts in some layers": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "hidden_size": 2048, "intermediate_size": 6144,
         "mlp_only_layers": [1], "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 8,
         "num_experts_per_tok": 2, "num_hidden_layers": 9},
        {"moe_layers": 3},  # 3, 5 and 7
    ),
    "qwen2 with a shared expert": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_experts": 60,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16},
        {"moe_shared_expert_intermediate_size": 5632, "moe_ffn_hidden_size": 1408},
    ),
    "mixtral": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "vocab_size": 32000},
        {"num_experts": 8, "moe_ffn_hidden_size": 14336, "moe_router_topk": 2, "moe_layers": 32},
    ),
    "deepseek v3": (DEEPSEEK_V3, {
        "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "moe_layers": 58, "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048, "ffn_hidden_size": 18432,
        "mtp_num_layers": 1, "vocab_size": 129280,
    }),
    "deepseek v2 lite, whose queries are not compressed": (
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
         "kv_lora_rank": 512, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
         "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
         "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "vocab_size": 102400},
        {"q_lora_rank": None, "moe_shared_expert_intermediate_size": 2816, "moe_layers": 26},
    ),
    "gemma": (
        {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
         "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
         "vocab_size": 256000},
        {"gated_linear_unit": True, "head_dim": 256, "query_groups": 1, "untie_embeddings_and_output_weights": False},
    ),
    "gemma 3 within a model of several modalities": (
        {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
         "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
         "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}},
        {"num_layers": 34, "num_attention_heads": 8, "num_query_groups": 4, "head_dim": 256, "vocab_size": 262272,
         "qk_layernorm": True},
    ),
    "phi 3": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 32, "resid_pdrop": 0.0, "attention_dropout": 0.0,
         "vocab_size": 32064},
        {"head_dim": 96, "gated_linear_unit": True, "vocab_size": 32128},
    ),
    "gpt 2": (
        {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257,
         "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        {"ffn_hidden_size": 3072, "gated_linear_unit": False, "normalization": "LayerNorm", "rotary": False,
         "add_bias_linear": True, "hidden_dropout": 0.1, "attention_dropout": 0.1, "vocab_size": 50304,
         "untie_embeddings_and_output_weights": False},
    ),
    "gpt neox": (
        {"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
         "num_hidden_layers": 6, "rotary_pct": 0.25, "tie_word_embeddings": False, "vocab_size": 50304},
        {"rotary": True, "add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False},
    ),
    "granite": (
        {"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 49155},
        {"vocab_size": 49280, "gated_linear_unit": True, "head_dim": 64},
    ),
    "olmo 2": (
        {"model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 100352},
        {"qk_layernorm": True, "normalization": "RMSNorm"},
    ),
    "olmoe": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
         "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16},
        {"num_experts": 64, "moe_ffn_hidden_size": 1024, "vocab_size": None},
    ),
    "nemotron h": (
        {"model_type": "nemotron_h", "head_dim": 128, "hidden_size": 4480, "intermediate_size": 15680,
         "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M*", "mamba_head_dim": 80, "mamba_num_heads": 128,
         "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 20,
         "num_key_value_heads": 8, "ssm_state_size": 128, "vocab_size": 131072},
        {"hybrid_layer_pattern": "M-M-M-MM-M-M-M*-M-M*", "mamba_num_heads": 128, "mamba_head_dim": 80,
         "mamba_state_dim": 128, "mamba_num_groups": 8, "head_dim": 128, "gated_linear_unit": False,
         "rotary": False, "moe_layers": 0},
    ),
    "nemotron h with experts": (
        {"model_type": "nemotron_h", "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856,
         "hybrid_override_pattern": "MEMEM*E", "mamba_head_dim": 64, "mamba_num_heads": 64,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_groups": 8,
         "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 32, "num_experts_per_tok": 6,
         "num_hidden_layers": 7, "num_key_value_heads": 2, "ssm_state_size": 128},
        {"moe_layers": 3, "num_experts": 128, "moe_ffn_hidden_size": 1856, "moe_router_topk": 6,
         "moe_shared_expert_intermediate_size": 3712},
    ),
    "mamba 2 alone": (
        {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
         "state_size": 128, "n_groups": 1, "vocab_size": 50288},
        {"hybrid_layer_pattern": "M" * 64, "mamba_num_heads": 80, "mamba_num_groups": 1},
    ),
    "granite 4 hybrid": (
        {"model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512,
         "layer_types": ["mamba", "attention"], "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
         "mamba_n_heads": 48, "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 2,
         "num_key_value_heads": 4, "num_local_experts": 64, "shared_intermediate_size": 1024},
        {"hybrid_layer_pattern": "ME*E", "num_layers": 4, "moe_layers": 2, "moe_ffn_hidden_size": 512,
         "moe_shared_expert_intermediate_size": 1024},
    ),
    "llama 4, whose experts have the usual width": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 5120, "head_dim": 128,
         "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2,
         "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
         "num_local_experts": 128, "vocab_size": 202048, "use_qk_norm": False}},
        {"ffn_hidden_size": 16384, "moe_ffn_hidden_size": 8192, "moe_shared_expert_intermediate_size": 8192,
         "moe_layers": 24, "num_experts": 128},
    ),
    "an unknown type with layer norms": (
        {"model_type": "exabloom", "n_layer": 4, "n_head": 8, "hidden_size": 512, "layer_norm_epsilon": 1e-5},
        {"gated_linear_unit": False, "normalization": "LayerNorm", "add_bias_linear": True, "rotary": False,
         "ffn_hidden_size": 2048},
    ),
    "a type that is not known by name": (
        {**LLAMA3_8B, "model_type": "exallama", "use_qk_norm": True},
        {"gated_linear_unit": True, "normalization": "RMSNorm", "rotary": True, "qk_layernorm": True},
    ),
}  # fmt: skip


def write(directory: Path, content: object) -> Path:
    (directory / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(("config", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_released_configurations(tmp_path, config, expected):
    found = read_model(write(tmp_path, config))
    assert {name: getattr(found, name) for name in expected} == expected
    assert read_model(tmp_path / "config.json") == found


def test_fields_of_the_run_are_given_beside_the_file(tmp_path):
    found = read_model(write(tmp_path, LLAMA3_8B), tensor_model_parallel_size=8, sequence_parallel=True)
    assert (found.tensor_model_parallel_size, found.sequence_parallel) == (8, True)
    assert found.vocab_size == 129024  # a multiple of 128 x 8
    with pytest.raises(UsageError, match=r"num_attention_heads 32.*multiple of tensor_model_parallel_size, which is 3"):
        read_model(tmp_path, tensor_model_parallel_size=3)


BAD = {
    "keys are missing": ({"model_type": "clip"}, "lacks num_hidden_layers, hidden_size, num_attention_heads"),
    "a known type lacks a key": ({"model_type": "llama", "hidden_size": 8}, "lacks num_attention_heads"),
    "text for a number": ({**LLAMA3_8B, "hidden_size": "4096"}, "hidden_size '4096': must be a whole number"),
    "a fraction": ({**LLAMA3_8B, "hidden_size": 4096.0}, "hidden_size 4096.0: must be a whole number"),
    "true for a number": ({**LLAMA3_8B, "num_hidden_layers": True}, "num_hidden_layers True: must be a whole number"),
    "a negative size": ({**LLAMA3_8B, "vocab_size": -1}, "vocab_size -1: must be from 1"),
    "a huge size": ({**LLAMA3_8B, "hidden_size": 10**30}, "hidden_size of too many digits: must be from 1"),
    "heads that do not divide": ({**LLAMA3_8B, "num_attention_heads": 3}, "must be a multiple of num_attention_heads"),
    "a list": ([1, 2], "holds a list, not a mapping"),
    "no JSON": ("{", "not JSON: line 1"),
    "NaN": ('{"hidden_size": NaN}', "not JSON: NaN is no number"),
    "too many digits": ('{"hidden_size": ' + "9" * 10_000 + "}", "not JSON"),
    "nested too deeply": ("[" * 100_000, "not JSON"),
    "too long": ('{"a": "' + "x" * (5 << 20) + '"}', "a model is described in at most"),
    "linear attention": ({**LLAMA3_8B, "model_type": "qwen3_next", "linear_num_key_heads": 16}, "linear attention"),
    "an unknown kind of layer": ({**LLAMA3_8B, "layer_types": ["full_attention", "conv"]}, "layers of kind conv"),
    "a pattern of unknown letters": (
        {**LLAMA3_8B, "model_type": "nemotron_h", "hybrid_override_pattern": "MXM"}, "'X' is no kind of layer"
    ),
    "experts by other names": ({**LLAMA3_8B, "model_type": "exa", "moe_num_experts": 64}, "experts under names that"),
    "other layers": ({**LLAMA3_8B, "model_type": "exa", "mamba_expand": 2}, "layers of kinds that are not known"),
    "latent experts": ({**LLAMA3_8B, "moe_latent_size": 1024}, "experts with a width of their own are not known"),
    "dense layers of text": ({**DEEPSEEK_V3, "mlp_only_layers": ["1"]}, "mlp_only_layers ['1']: must be a list of"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_configuration_is_refused_with_the_key_and_the_file(tmp_path, content, message):
    with pytest.raises(ThdprofError) as raised:
        read_model(write(tmp_path, content))
    assert str(raised.value).startswith(f"--model {tmp_path}: ")
    assert message in str(raised.value)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        read_model(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"the directory holds no config\.json"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0\1")
    with pytest.raises(UsageError, match=r"must be a config\.json or a recipe as YAML"):
        read_model(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(DataError, match="not JSON"):
        read_model(tmp_path)


def test_a_mutated_configuration_never_ends_in_a_traceback(tmp_path, rng):
    values = [None, -1, 0, 1, 2**40, 1.5, "x", [], [0], {}, True, [None], {"a": 1}, "M*", 10**400]
    keys = sorted({key for config, _ in CONFIGS.values() for key in config})
    configs = [config for config, _ in CONFIGS.values()]
    refused = 0
    for _ in range(600):
        mutated = dict(configs[rng.integers(len(configs))])
        for key in rng.choice(keys, size=2):
            mutated[str(key)] = values[rng.integers(len(values))]
        write(tmp_path, mutated)
        try:
            assert isinstance(asdict(read_model(tmp_path)), dict)
        except ThdprofError:
            refused += 1
    assert 100 < refused < 600
    assert isinstance(read_model(write(tmp_path, LLAMA3_8B)), Model)
