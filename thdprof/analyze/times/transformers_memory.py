"""What Hugging Face's Trainer holds on a GPU: state, what the layers of transformers' models save, and TRL's loss.

Layers are those of transformers 5.17 with root-mean-square norms and a gated MLP, unfused, with attention that keeps
keys and values of fewer heads as they are. Weights, their gradients and Adam's moments are in the model's precision.
"""

from __future__ import annotations

from thdprof.analyze.buckets.saved_tensors import STATISTICS_BYTES, Kind, Saved
from thdprof.analyze.times.parameters import Parameters
from thdprof.training import Model, TrainingSettings

_ADAPTER_STATE_BYTES = 16
"""Bytes of an adapter's parameter, which peft keeps in float32: weight, gradient and two moments."""
_TILE = (4096, 32768)
"""Tokens and words of a tile of logits in TRL's loss."""


def is_run_of_trainer(settings: TrainingSettings) -> bool:
    """Whether Hugging Face's Trainer runs the training, with models of transformers."""
    return settings.loader == "trainer"


def trainer_state_bytes(model: Model, parameters: Parameters) -> tuple[float, float]:
    """Bytes of weights, gradients and the optimizer's state, and of the part that its first step adds."""
    element = _element(model)
    every = parameters.dense + parameters.experts
    if parameters.adapters is not None:
        return element * every + _ADAPTER_STATE_BYTES * parameters.adapters, 8 * parameters.adapters
    return 4 * element * every, 2 * element * every


def trainer_loss_bytes(model: Model, vocab_size: int, n_tokens: int) -> int:
    """Bytes that TRL's loss needs at once: a tile of logits, and the output layer's gradient, summed in float32."""
    tokens, words = _TILE
    tile = min(tokens, n_tokens) * min(words, vocab_size) * 2
    hidden = n_tokens * model.hidden_size * (STATISTICS_BYTES + _element(model))
    gradient = 0 if model.lora_dim else vocab_size * model.hidden_size * (4 + _element(model))
    return tile + hidden + gradient


def transformers_tensors(model: Model, kind: Kind) -> list[Saved] | None:
    """What one layer saves for its backward, in the order in which it does; None for layers of other kinds.

    Args:
        model: the model.
        kind: what the layer holds.
    """
    if kind != "attention+mlp":
        return None
    element, hidden, ffn = _element(model), model.hidden_size, model.ffn_size
    queries, keys = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    found: list[tuple[str, float]] = []

    def norm(name: str, width: int, count: int) -> None:
        """A norm of `count` times `width` values: its input and statistics in float32, and what its weight scales."""
        found.extend([(name, 4 * width * count), (name, STATISTICS_BYTES * count), (name, element * width * count)])

    def linear(name: str, *widths: int) -> None:
        """The inputs of a linear layer that nothing before has saved, and what its adapter saves."""
        found.extend((name, element * width) for width in widths)
        if model.lora_dim is not None:
            found.append((name, element * model.lora_dim))

    norm("input_layernorm", hidden, 1)
    linear("self_attn.q_proj", hidden)
    linear("self_attn.k_proj")
    linear("self_attn.v_proj")
    if model.qk_layernorm:
        norm("self_attn.q_norm", model.head_dim, model.num_attention_heads)
        norm("self_attn.k_norm", model.head_dim, model.query_groups)
    found += [("self_attn", element * width) for width in (queries, keys, keys, queries)]
    found.append(("self_attn", STATISTICS_BYTES * model.num_attention_heads))
    linear("self_attn.o_proj")
    norm("post_attention_layernorm", hidden, 1)
    linear("mlp.gate_proj", hidden)
    linear("mlp.up_proj")
    found += [("mlp", element * ffn)] * 3
    linear("mlp.down_proj", ffn)
    saved = [Saved(module=module, bytes_per_token=nbytes) for module, nbytes in found]
    if model.recompute_granularity is None:
        return saved
    return [
        Saved(module="input_layernorm", bytes_per_token=element * hidden, is_input=True),
        *(Saved(module=one.module, bytes_per_token=one.bytes_per_token, recomputed=True) for one in saved),
    ]


def _element(model: Model) -> int:
    """Bytes of a number in the model's precision."""
    return 4 if model.precision == "fp32" else 2
