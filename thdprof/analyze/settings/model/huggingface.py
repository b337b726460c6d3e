"""The model out of a Hugging Face `config.json`: its architecture, by the names of transformers' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thdprof.analyze.settings.model.config_experts import DENSE_WIDTH, read_experts, refuse_unknown_experts
from thdprof.analyze.settings.model.config_hybrids import (
    is_hybrid,
    read_hybrid,
    refuse_unknown_kinds,
    refuse_unknown_layers,
)
from thdprof.analyze.settings.model.config_keys import Config
from thdprof.analyze.settings.model.families import FAMILIES, Family, guessed
from thdprof.analyze.settings.model.reading import ModelReading, Vocabulary
from thdprof.errors import DataError

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a model of several modalities has the configuration of its language model."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def read_config(content: Mapping[str, Any], source: str) -> ModelReading:
    """What the configuration `content` says of the model; `source` is its file, as the user named it.

    Raises:
        DataError: a key is missing or has an impossible value, or the model has layers that are not known.
    """
    shown = f"--model {source}"
    content, notes = _language_model(content, shown)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        model_type = ""
    family = FAMILIES.get(model_type)
    if family is None:
        _check_usual(content, model_type, shown)
    config = Config({**(family.defaults if family else {}), **_given(content)}, shown)
    refuse_unknown_layers(config, model_type)
    if family is None:
        if not is_hybrid(config, model_type):
            refuse_unknown_kinds(config)
        refuse_unknown_experts(config)
        family = guessed(config)
        named = f"model type {model_type}" if model_type else "its model type"
        notes.append(f"{shown}: {named} is not known by name; it is read by its usual keys")
    values = _shape(config, family)
    if is_hybrid(config, model_type):
        values |= read_hybrid(config, model_type)
    values |= _latent(config) if config.has("kv_lora_rank") else {}
    if "hybrid_layer_pattern" not in values or "E" in values["hybrid_layer_pattern"]:
        values |= read_experts(config, model_type, values)
    if config.has("sliding_window") and config.value("use_sliding_window") is not False:
        notes.append(f"{shown}: windows of attention are not followed: it is taken as full within a document")
    values["hidden_dropout"] = config.number("hidden_dropout", "resid_pdrop", default=0.0)
    values["attention_dropout"] = config.number("attention_dropout", "attn_pdrop", default=0.0)
    tokens = config.size("vocab_size", default=None)
    unsettled = {}
    if config.has("moe_latent_size"):
        unsettled["moe_latent_size"] = f"{shown}: moe_latent_size: experts with a width of their own are not known"
    return ModelReading(
        source=source,
        values=values,
        vocabulary=None if tokens is None else Vocabulary(tokens=tokens),
        origins={name: f"{shown}: {name} {value}" for name, value in values.items()},
        unsettled=unsettled,
        of_a_run=False,
        notes=tuple(notes),
    )


def _given(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with a value: transformers takes a class's default for a key that is missing, and some write null."""
    return {key: value for key, value in content.items() if value is not None}


def _language_model(content: Mapping[str, Any], shown: str) -> tuple[Mapping[str, Any], list[str]]:
    """The configuration of the language model within `content`, and a note where there is more in it."""
    notes: list[str] = []
    for _ in range(3):
        part = next((key for key in _TEXT_PARTS if isinstance(content.get(key), dict)), None)
        if part is None or any(key in content for key in _LAYERS):
            break
        inner = content[part]
        outside = {k: content[k] for k in ("tie_word_embeddings", "model_type") if k in content}
        content = {**outside, **inner}
        if not notes:
            notes.append(f"{shown}: its {part} is read; other parts, such as an image encoder, are not counted")
    return content, notes


def _check_usual(content: Mapping[str, Any], model_type: str, shown: str) -> None:
    """Refuse a configuration of an unknown type that lacks the usual keys."""
    missing = [names[0] for names in (_LAYERS, _HIDDEN, _HEADS) if all(content.get(name) is None for name in names)]
    if missing:
        known = f"model type {model_type} is not known and" if model_type else "it"
        raise DataError(f"{shown}: {known} lacks {', '.join(missing)}; is it the config.json of a language model?")


def _shape(config: Config, family: Family) -> dict[str, Any]:
    """The fields that every decoder has."""
    hidden, heads = config.size(*_HIDDEN), config.size(*_HEADS)
    groups = config.size("num_key_value_heads", "num_kv_heads", default=heads)
    bias = family.add_bias_linear or (config.flag("attention_bias") and config.flag("mlp_bias"))
    return {
        "num_layers": config.size(*_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": config.size("head_dim", "attention_head_dim", default=None),
        "ffn_hidden_size": config.size(
            DENSE_WIDTH, "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", default=4 * hidden
        ),
        "gated_linear_unit": family.gated_linear_unit,
        "normalization": family.normalization,
        "qk_layernorm": family.qk_layernorm or config.flag("use_qk_norm") or config.flag("qk_layernorm"),
        "add_bias_linear": bias,
        "rotary": family.rotary,
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings", default=family.tied),
        "mtp_num_layers": config.count("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    }


def _latent(config: Config) -> dict[str, Any]:
    """The fields of multi-head latent attention."""
    return {
        "multi_latent_attention": True,
        "rotary": True,
        "qk_layernorm": True,
        "num_query_groups": None,
        "kv_channels": None,
        "q_lora_rank": config.size("q_lora_rank", default=None),
        "kv_lora_rank": config.size("kv_lora_rank"),
        "qk_head_dim": config.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.size("qk_rope_head_dim"),
        "v_head_dim": config.size("v_head_dim"),
    }
