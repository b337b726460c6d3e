"""Parameters of a model, counted by the shapes of its layers."""

from __future__ import annotations

from thdprof.analyze.times.decoder import letters
from thdprof.training import Model


def layer_parameters(model: Model, letter: str) -> int:
    """Parameters of one rank's share of a layer; `letter` is its kind, as in `decoder.letters`."""
    if letter == "M":
        return _mamba(model)
    parts = {"*": (True, False, False), "-": (False, True, False), "E": (False, False, True)}
    attention, mlp, experts = parts.get(letter, (True, letter == "D", letter == "X"))
    total = 0
    if attention:
        total += _latent(model) if model.multi_latent_attention else _attention(model)
    if mlp:
        total += _mlp(model, model.ffn_size) // model.tensor_model_parallel_size
    if experts:
        total += _experts(model)
    return total + model.hidden_size * (1 + (letter in "DX"))


def rank_parameters(model: Model, pipeline_size: int) -> int:
    """Parameters of the rank that has most: its layers, and an embedding or output layer."""
    layers = sum(layer_parameters(model, letter) for letter in letters(model, pipeline_size))
    table = (model.vocab_size or 0) * model.hidden_size // model.tensor_model_parallel_size
    both = pipeline_size == 1 and model.untie_embeddings_and_output_weights
    return layers + table * (2 if both else 1)


def _attention(model: Model) -> int:
    width = (2 * model.num_attention_heads + 2 * model.query_groups) * model.head_dim
    return width * model.hidden_size // model.tensor_model_parallel_size


def _latent(model: Model) -> int:
    heads, hidden = model.num_attention_heads, model.hidden_size
    query = model.qk_head_dim + model.qk_pos_emb_head_dim
    shared = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    split = model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) + heads * model.v_head_dim * hidden
    if model.q_lora_rank:
        shared += hidden * model.q_lora_rank
        split += model.q_lora_rank * heads * query
    else:
        split += hidden * heads * query
    return shared + split // model.tensor_model_parallel_size


def _mlp(model: Model, width: int) -> int:
    return model.hidden_size * width * (3 if model.gated_linear_unit else 2)


def _experts(model: Model) -> int:
    experts = (model.num_experts or 0) // model.expert_model_parallel_size
    share = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    shared = model.moe_shared_expert_intermediate_size or 0
    return (
        experts * _mlp(model, model.expert_ffn_size) // share
        + _mlp(model, shared) // model.tensor_model_parallel_size
        + model.hidden_size * (model.num_experts or 0)
    )


def _mamba(model: Model) -> int:
    heads = model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim
    inner = heads * model.mamba_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim
    width = 3 * inner + 2 * states + heads
    return width * model.hidden_size // model.tensor_model_parallel_size
