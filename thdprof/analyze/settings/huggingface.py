"""The model out of a Hugging Face `config.json`: its architecture, by the names of transformers' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from thdprof.analyze.settings.model_reading import ModelReading, Vocabulary, read_pattern
from thdprof.errors import DataError
from thdprof.training import Norm

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which a model of several modalities has the configuration of its language model."""
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def read_config(content: Mapping[str, Any], source: str) -> ModelReading:
    """What the configuration `content` says of the model; `source` is its file, as the user named it.

    Raises:
        DataError: a key is missing or has an impossible value, or the model has layers that are not known.
    """
    shown = f"--model {source}"
    inner = content.get("text_config")  # of a model of images and text, whose text layers have a type of their own
    own_type = (inner if isinstance(inner, dict) else content).get("model_type")
    content, notes = _language_model(content, shown)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        model_type = ""
    family = _FAMILIES.get(model_type)
    if family is None:
        _check_usual(content, model_type, shown)
    given = {key: value for key, value in content.items() if value is not None}
    config = _Config({**(family.defaults if family else {}), **given}, shown)
    _refuse_unknown_layers(config, model_type)
    if family is None:
        _refuse_unknown_names(config, model_type)
        family = _guess_family(config)
        named = f"model type {model_type}" if model_type else "its model type"
        notes.append(f"{shown}: {named} is not known by name; it is read by its usual keys")
    values = _shape(config, family)
    if _is_hybrid(config, model_type):
        values |= _read_hybrid(config, model_type)
    values |= _latent(config) if config.has("kv_lora_rank") else {}
    if "hybrid_layer_pattern" not in values or "E" in values["hybrid_layer_pattern"]:
        values |= _read_experts(config, model_type, values)
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
        model_type=own_type if isinstance(own_type, str) else None,
        of_a_run=False,
        notes=notes,
    )


def _language_model(content: Mapping[str, Any], shown: str) -> tuple[Mapping[str, Any], list[str]]:
    """The configuration of the language model within `content`, and a note where there is more in it."""
    notes: list[str] = []
    for _ in range(3):
        part = next((key for key in _TEXT_PARTS if isinstance(content.get(key), dict)), None)
        if part is None or any(key in content for key in _NUM_LAYERS):
            break
        inner = content[part]
        outside = {k: content[k] for k in ("tie_word_embeddings", "model_type") if k in content}
        content = {**outside, **inner}
        if not notes:
            notes.append(f"{shown}: its {part} is read; other parts, such as an image encoder, are not counted")
    return content, notes


def _check_usual(content: Mapping[str, Any], model_type: str, shown: str) -> None:
    """Refuse a configuration of an unknown type that lacks the usual keys."""
    missing = [names[0] for names in (_NUM_LAYERS, _HIDDEN, _HEADS) if all(content.get(name) is None for name in names)]
    if missing:
        known = f"model type {model_type} is not known and" if model_type else "it"
        raise DataError(f"{shown}: {known} lacks {', '.join(missing)}; is it the config.json of a language model?")


def _shape(config: _Config, family: _Family) -> dict[str, Any]:
    hidden, heads = config.size(*_HIDDEN), config.size(*_HEADS)
    groups = config.size("num_key_value_heads", "num_kv_heads", default=heads)
    bias = family.add_bias_linear or (config.flag("attention_bias") and config.flag("mlp_bias"))
    return {
        "num_layers": config.size(*_NUM_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": config.size("head_dim", "attention_head_dim", default=None),
        "ffn_hidden_size": config.size(
            _DENSE_WIDTH, "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", default=4 * hidden
        ),
        "gated_linear_unit": family.gated_linear_unit,
        "normalization": family.normalization,
        "qk_layernorm": family.qk_layernorm or config.flag("use_qk_norm") or config.flag("qk_layernorm"),
        "add_bias_linear": bias,
        "rotary": family.rotary,
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings", default=family.tied),
        "mtp_num_layers": config.count("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    }


def _latent(config: _Config) -> dict[str, Any]:
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


# --- keys under their several names -----------------------------------------------------------------------------------


_MOST = 2**31 - 1
_NEEDED: Any = object()
"""Stands for a default where there is none."""
_KINDS = {bool: "true or false", str: "text", list: "a list"}


class _Config:
    """A mapping of a file; a key with a null counts as missing.

    Values are looked up under several names, of which the first that has a value counts. A `DataError` names the key
    and a value that cannot be.
    """

    def __init__(self, content: Mapping[str, Any], shown: str) -> None:
        self.content = {key: value for key, value in content.items() if value is not None}
        """The mapping without nulls."""
        self.shown = shown
        """Name of the file in errors."""

    def find(self, *names: str) -> str | None:
        return next((name for name in names if name in self.content), None)

    def has(self, *names: str) -> bool:
        return self.find(*names) is not None

    def value(self, *names: str) -> Any:
        """The value of the first of the keys that has one; None without."""
        name = self.find(*names)
        return None if name is None else self.content[name]

    def size(self, *names: str, default: Any = _NEEDED, least: int = 1) -> Any:
        """A whole number of at least `least`; without a default one of the keys must have a value."""
        name = self.find(*names)
        if name is None:
            if default is _NEEDED:
                raise DataError(f"{self.shown}: lacks {names[0]}; is it the config.json of a language model?")
            return default
        value = self.content[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, "must be a whole number")
        if not least <= value <= _MOST:
            raise self.refusal(name, f"must be from {least} to {_MOST}")
        return value

    def count(self, *names: str) -> int:
        """A whole number of at least 0; 0 where no key has a value."""
        return int(self.size(*names, default=0, least=0))

    def number(self, *names: str, default: float) -> float:
        """A number of at least 0 and less than 1."""
        name = self.find(*names)
        if name is None:
            return default
        value = self.content[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, "must be a number")
        if not 0 <= value < 1:
            raise self.refusal(name, "must be at least 0 and less than 1")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        return bool(self.typed(name, bool, default))

    def typed(self, name: str, kind: type, default: Any = None) -> Any:
        """A flag, a text or a list; the default where the key has no value."""
        value = self.content.get(name, default)
        if value is not default and not isinstance(value, kind):
            raise self.refusal(name, f"must be {_KINDS[kind]}")
        return value

    def refusal(self, name: str, reason: str) -> DataError:
        return DataError(f"{self.shown}: {name} {_shorten(self.content.get(name))}: {reason}")


def _shorten(value: Any) -> str:
    """The value as a message shows it; Python does not write out integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "of too many digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- families of models by their model_type ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What all models of one type share, by the names of `Model`'s fields."""

    gated_linear_unit: bool = True
    normalization: Norm = "RMSNorm"
    rotary: bool = True
    qk_layernorm: bool = False
    add_bias_linear: bool = False
    tied: bool = False
    """Whether the output layer shares the embedding's weights where the file does not say."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Values of keys that transformers fills in for this type; files that it writes may leave them out."""


_LLAMA = _Family()
_GEMMA = replace(_LLAMA, tied=True, defaults={"head_dim": 256})
_GPT = _Family(gated_linear_unit=False, normalization="LayerNorm", add_bias_linear=True)
_GEMMA3 = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_QWEN3 = replace(_LLAMA, qk_layernorm=True, defaults={"head_dim": 128})

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "qwen2", "phi3", "granite", "qwen2_moe", "granitemoe", "granitemoeshared"), _LLAMA),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "llama4", "llama4_text"), _LLAMA),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text"), _LLAMA),
        **dict.fromkeys(("cohere", "cohere2"), replace(_LLAMA, normalization="LayerNorm", tied=True)),
        **dict.fromkeys(("mistral", "mixtral"), replace(_LLAMA, defaults={"num_key_value_heads": 8})),
        **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
        **dict.fromkeys(("gemma", "gemma2"), _GEMMA),
        **dict.fromkeys(("gemma3", "gemma3_text"), replace(_GEMMA, qk_layernorm=True, defaults=_GEMMA3)),
        **dict.fromkeys(("olmo2", "olmo3", "olmoe"), replace(_LLAMA, qk_layernorm=True)),
        "olmo": replace(_LLAMA, normalization="LayerNorm"),
        "glm4_moe": replace(_LLAMA, defaults={"head_dim": 128}),
        "gpt2": replace(_GPT, rotary=False, tied=True, defaults={"resid_pdrop": 0.1, "attn_pdrop": 0.1}),
        "gpt_neox": _GPT,
        "starcoder2": replace(_GPT, tied=True),
        "nemotron": replace(_GPT, add_bias_linear=False),
        "nemotron_h": replace(_LLAMA, gated_linear_unit=False, rotary=False),
        "mamba2": replace(_LLAMA, gated_linear_unit=False, rotary=False, defaults={"num_attention_heads": 1}),
        "bamba": _LLAMA,
        "granitemoehybrid": replace(_LLAMA, rotary=False),
    }
)
"""Every family by its model type."""


def _guess_family(config: _Config) -> _Family:
    """The family of a type that is not in the table, by its keys."""
    activation = config.value("hidden_act", "activation_function", "hidden_activation")
    gated = activation in ("silu", "swish", "swiglu", "geglu") or config.has("rms_norm_eps")
    layer_norm = config.has("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "do_layer_norm_before")
    layer_norm = layer_norm and not config.has("rms_norm_eps")
    bias = config.value("use_bias", "bias")
    return _Family(
        gated_linear_unit=gated,
        normalization="LayerNorm" if layer_norm else "RMSNorm",
        rotary=config.has("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_dim"),
        add_bias_linear=bias if isinstance(bias, bool) else layer_norm,
        tied=True,
    )


# --- experts ----------------------------------------------------------------------------------------------------------


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
_DENSE_WIDTH = "intermediate_size_mlp"
"""Key of Llama 4 for the width of layers without experts; intermediate_size is that of an expert and the shared one."""
_ONLY_EXPERTS = ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid", "gpt_oss")
"""Types whose intermediate_size is the width of an expert."""


def _read_experts(config: _Config, model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for experts beside `values`, which are known already; none where the model has no experts."""
    name = next((name for name in _EXPERTS if config.has(name)), None)
    if name is None or not config.count(name):
        return {}
    width = config.size("moe_intermediate_size", default=None)
    if width is None and (model_type in _ONLY_EXPERTS or config.has(_DENSE_WIDTH)):
        width = config.size("intermediate_size")
    layers = None if "num_moe_layers" in values else _count_expert_layers(config, values["num_layers"])
    return {
        "num_experts": config.size(name),
        "moe_router_topk": config.size(*_TOP_K),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": _shared_width(config, width),
        **({} if layers is None else {"num_moe_layers": layers}),
    }


def _shared_width(config: _Config, width: int | None) -> int | None:
    """Width inside all shared experts together; None without any."""
    given: int | None = config.size(
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=None,
    )
    number = 1 if config.has(_DENSE_WIDTH) else config.count("n_shared_experts", "num_shared_experts")
    if given is None and number and width is not None:
        return number * width
    return given


def _count_expert_layers(config: _Config, num_layers: int) -> int:
    """How many layers hold experts: not the first ones, every so many-th, and none that are listed."""
    first = config.count("first_k_dense_replace")
    listed = config.value("moe_layer_freq")
    every = 1 if isinstance(listed, list) else config.size("moe_layer_freq", default=1)
    step = config.size("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    if isinstance(listed, list):
        if len(listed) != num_layers or any(entry not in (0, 1) for entry in listed):
            raise config.refusal("moe_layer_freq", f"must hold 0 or 1 for each of the {num_layers} layers")
        return sum(listed)
    dense = config.typed("mlp_only_layers", list) or []
    if any(isinstance(entry, bool) or not isinstance(entry, int) for entry in dense):
        raise config.refusal("mlp_only_layers", "must be a list of whole numbers")
    dense_layers = set(dense)
    return sum(
        1
        for layer in range(min(num_layers, 1_000_000))
        if layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense_layers
    )


# --- hybrids: Mamba, attention, MLP and experts in one stack ----------------------------------------------------------


_NAMED = {"mamba": "M", "mamba2": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_TYPES = ("nemotron_h", "mamba2", "bamba", "granitemoehybrid")
_UNKNOWN_KEYS = {
    "linear_num_key_heads": "layers of linear attention",
    "linear_attn_config": "layers of linear attention",
    "ssm_cfg": "layers of Mamba 1",
    "mamba_d_ssm": "layers with Mamba and attention side by side",
    "mamba_dt_rank": "layers of Mamba 1",
    "time_step_rank": "layers of Mamba 1",
    "lru_width": "recurrent layers",
    "num_experts_per_layer": "layers with different experts",
    "block_configs": "layers of different sizes",
    "index_topk": "sparse attention",
    "encoder_layers": "an encoder",
}
"""Keys of models with layers that are not known, with the words for them."""

_OTHER_LAYERS = ("mamba", "ssm", "linear_attn", "linear_attention", "delta", "rwkv", "conv_", "lru", "recurrent")
"""Parts of the names of keys that only models with other layers have."""


def _refuse_unknown_layers(config: _Config, model_type: str) -> None:
    """Refuse a model whose times would be those of another, since some of its layers are not known."""
    if model_type in _TYPES:
        return
    for key, words in _UNKNOWN_KEYS.items():
        if config.has(key):
            raise DataError(f"{config.shown}: has {words} ({key}), which are not known; leave --model out")
    kinds = config.value("layer_types", "layers_block_type") or []
    attention = ("full_attention", "sliding_attention", "chunked_attention", "attention")
    for kind in kinds if isinstance(kinds, list) else []:
        if kind not in attention:
            raise DataError(f"{config.shown}: has layers of kind {kind!s:.40}, which are not known; leave --model out")


def _refuse_unknown_names(config: _Config, model_type: str) -> None:
    """Refuse a model of an unknown type whose keys tell of layers or experts that would be taken for other ones."""
    for key, value in config.content.items():
        if value and not _is_hybrid(config, model_type) and any(word in str(key).lower() for word in _OTHER_LAYERS):
            raise config.refusal(str(key), "has layers of kinds that are not known; leave --model out")
    for key, value in config.content.items():
        if value and not config.has(*_EXPERTS) and ("expert" in str(key) or "moe" in str(key)):
            raise config.refusal(str(key), "has experts under names that are not known; leave --model out")


def _is_hybrid(config: _Config, model_type: str) -> bool:
    """Whether the model has layers of several kinds, or of Mamba alone."""
    return model_type in _TYPES or config.has("hybrid_override_pattern")


def _read_hybrid(config: _Config, model_type: str) -> dict[str, Any]:
    pattern = _read_pattern(config, model_type)
    own = ("head_dim", "num_heads") if model_type == "mamba2" else ()  # a pure Mamba model has no other heads
    return {
        "hybrid_layer_pattern": pattern,
        "num_layers": len(pattern),
        **({"num_moe_layers": pattern.count("E")} if "E" in pattern else {}),
        "mamba_state_dim": config.size("ssm_state_size", "mamba_d_state", "state_size", default=128),
        "mamba_head_dim": config.size("mamba_head_dim", "mamba_d_head", *own[:1], default=64),
        "mamba_num_groups": config.size("n_groups", "mamba_n_groups", default=8 if model_type != "bamba" else 1),
        "mamba_num_heads": config.size("mamba_num_heads", "mamba_n_heads", *own[1:], default=None),
        **({"kv_channels": None} if model_type == "mamba2" else {}),
    }


def _read_pattern(config: _Config, model_type: str) -> str:
    text = config.typed("hybrid_override_pattern", str)
    if text is not None:
        try:
            return str(read_pattern(text)["hybrid_layer_pattern"])
        except ValueError as error:
            raise config.refusal("hybrid_override_pattern", str(error)) from error
    layers: int = config.size("num_hidden_layers", "n_layer")
    if layers > 10_000:
        raise config.refusal("num_hidden_layers", "is more layers than any model has")
    if model_type == "mamba2":
        return "M" * layers
    kinds = config.typed("layers_block_type", list) or config.typed("layer_types", list)
    if model_type == "bamba" and kinds is None:
        with_attention = config.typed("attn_layer_indices", list) or []
        kinds = ["attention" if layer in with_attention else "mamba" for layer in range(layers)]
    if kinds is None:
        raise DataError(f"{config.shown}: lacks hybrid_override_pattern, the kinds of its layers")
    letters = [_NAMED.get(kind) if isinstance(kind, str) else None for kind in kinds]
    if None in letters:
        raise DataError(f"{config.shown}: layer {letters.index(None)}: its kind is not known")
    behind = ""
    if model_type in ("bamba", "granitemoehybrid"):  # an MLP or experts behind each mixer
        behind = "E" if config.count("num_local_experts") else "-"
    return "".join(f"{letter}{behind}" for letter in letters)
