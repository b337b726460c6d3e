"""The model out of a recipe as YAML: a dumped config of Megatron-Bridge or NeMo, with TransformerConfig's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from thdprof.analyze.settings.model_reading import (
    FP8_FORMATS,
    OF_COMMUNICATION,
    OF_THE_RUN,
    READ_APART,
    VOCAB_MULTIPLE,
    ModelReading,
    UnknownLayerError,
    Vocabulary,
    expert_layers,
    read_frequency,
    read_pattern,
)
from thdprof.errors import DataError, UsageError
from thdprof.training import Fp8Recipe, definitions, model_definitions
from thdprof.training.model import read_field

_DEEPEST = 6
_OTHER_NAMES = {
    "num_experts": ("num_moe_experts", "num_experts"),
    "tensor_model_parallel_size": ("tensor_model_parallel_size", "tensor_parallel"),
    "recompute_granularity": ("recompute_granularity", "activations_checkpoint_granularity"),
    "recompute_method": ("recompute_method", "activations_checkpoint_method"),
    "recompute_num_layers": ("recompute_num_layers", "activations_checkpoint_num_layers"),
}
"""Names that some fields of `Model` have in recipes."""
_APART = READ_APART | (OF_COMMUNICATION - {"calculate_per_token_loss"}) | {"normalization", "use_distributed_optimizer"}
"""Fields of `Model` that more than one key decides, or a key of another meaning."""
_CANONICAL = {
    "linear_q": "linear_qkv",
    "linear_k": "linear_qkv",
    "linear_v": "linear_qkv",
    "linear_fc1_up": "linear_fc1",
    "linear_fc1_gate": "linear_fc1",
}
"""Linear layers by the names of their parts, to which canonical LoRA gives adapters."""
_TRAINING = {
    "context_parallel_size": ("context_parallel_size",),
    "pipeline_parallel_size": ("pipeline_model_parallel_size",),
    "virtual_pipeline_size": ("virtual_pipeline_model_parallel_size",),
    "seq_length": ("seq_length", "encoder_seq_length"),
    "micro_batch_size": ("micro_batch_size",),
    "global_batch_size": ("global_batch_size",),
}
"""Training settings, with the keys that recipes have for them."""
_NO_FP4 = "matrix products in FP4 are not known"
_NOT_KNOWN = {
    "experimental_attention_variant": "this kind of attention is not known",
    "linear_attention_freq": "layers of linear attention are not known",
    "heterogeneous_block_specs": "layers of different sizes are not known",
    "moe_latent_size": "experts with a width of their own are not known",
}

_DDP = {
    name.removeprefix("ddp_"): name
    for name in model_definitions()
    if name in OF_COMMUNICATION - {"calculate_per_token_loss", "align_grad_reduce"}
}
"""Keys of the wrapper, with the fields of `Model` that they give."""
_BUCKET_OF_COMM_OVERLAP = 128 * 1024 * 1024
"""Parameters of a bucket that Megatron-Bridge's CommOverlapConfig asks for."""
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "16": "fp16", "fp16": "fp16", "32": "fp32", "fp32": "fp32"}
"""First words of the names of precisions."""
_SCALINGS = (
    ("nanov2_bf16_with_fp8_current_scaling", "blockwise"),
    ("fp8_delayed_scaling", "delayed"),
    ("fp8_current_scaling", "tensorwise"),
    ("fp8_subchannel_scaling", "blockwise"),
    ("mxfp8", "mxfp8"),
    ("with_fp8", "delayed"),
)
"""Parts of the names of Megatron-Bridge's recipes, the first that fits, with the scaling that they set."""


def read_recipe(content: Mapping[str, Any], source: str) -> ModelReading | None:
    """What the recipe `content` says of the model and of the run; None where it is no recipe.

    `source` is its file, as the user named it.

    Raises:
        DataError: a key has an impossible value.
    """
    path = _find_architecture(content)
    return None if path is None else _Recipe(content, path, source)


def _find_architecture(content: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The mapping with num_layers and hidden_size that is least deep, and the mappings around it, innermost first."""
    level: list[list[Mapping[str, Any]]] = [[content]]
    for _ in range(_DEEPEST):
        for path in level:
            if isinstance(path[0].get("hidden_size"), int) and (
                path[0].get("num_layers") is not None or path[0].get("hybrid_layer_pattern") is not None
            ):
                return path
        level = [[value, *path] for path in level[:1000] for value in path[0].values() if isinstance(value, dict)]
    return None


class _Recipe(ModelReading):
    """Looks keys up in the mapping of the architecture, then in those around it, then beside it."""

    def __init__(self, content: Mapping[str, Any], path: list[Mapping[str, Any]], source: str) -> None:
        super().__init__(source=source)
        self.content = content
        self.shown = f"--model {source}"
        self.places = [*path, *_find_beside(content)]
        for field in model_definitions():
            if field not in _APART:
                self._take(field, *_OTHER_NAMES.get(field, (field,)))
        known = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
        value = self._get("normalization")
        if value is not None:
            self._set("normalization", known.get(str(value).lower(), value), "normalization")
        self._take("gated_linear_unit", "gated_linear_unit", *(["swiglu"] if self._get("swiglu") is not None else []))
        activation = self._get("activation")
        if "gated_linear_unit" not in self.values and isinstance(activation, str):
            self.values["gated_linear_unit"] = any(word in activation for word in ("swiglu", "geglu", "reglu"))
        self._take("add_bias_linear", "add_bias_linear", "bias")
        shared = self._get("share_embeddings_and_output_weights")
        if isinstance(shared, bool):
            self.values["untie_embeddings_and_output_weights"] = not shared
        positions = self._get("position_embedding_type")
        if isinstance(positions, str) or self.values.get("multi_latent_attention"):
            latent = bool(self.values.get("multi_latent_attention"))
            self.values["rotary"] = latent or positions in ("rope", "yarn", "mrope")
        self._read_hybrid()
        self._read_experts()
        for part in ("ddp", "optimizer", "optim"):
            place = _mapping(content, part)
            if place.get("use_distributed_optimizer") is True or place.get("name") == "distributed_fused_adam":
                self.values["use_distributed_optimizer"] = True
        self._read_wrapper()
        self._read_adapters()
        self._read_precision()
        for key, reason in _NOT_KNOWN.items():
            if self._get(key):
                self.unsettled[key] = f"{self.shown}: {key}: {reason}"
        self._read_vocabulary()
        self._read_training()
        # the fields of TransformerConfig: innermost last, then those of its parts beside the model's
        beside = [_mapping(content, part) for part in ("ddp", "dist", "comm_overlap", "mixed_precision")]
        self.config = {}
        for place in (*reversed(_find_beside(content)), self.places[0], *beside):
            self.config |= {name: value for name, value in place.items() if value is not None}

    def _get(self, *names: str) -> Any:
        """The value of the first key that has one, in the innermost mapping that has it."""
        for place in self.places:
            for name in names:
                if place.get(name) is not None:
                    return place[name]
        return None

    def _take(self, field: str, *names: str) -> None:
        value = self._get(*names)
        if value is None:
            is_null = field not in OF_THE_RUN and any(name in self.places[0] for name in names)
            if is_null and model_definitions()[field].default is None:
                self.values[field] = None
            return
        self._set(field, value, names[0])

    def _set(self, field: str, value: Any, key: str) -> None:
        try:
            self.values[field] = read_field(field, value)
        except UsageError as error:
            raise DataError(
                f"{self.shown}: {key} {str(error).removeprefix(model_definitions()[field].describe()).strip()}"
            ) from error
        self.origins[field] = f"{self.shown}: {key} {value}"

    def _read_hybrid(self) -> None:
        pattern = self._get("hybrid_layer_pattern", "hybrid_override_pattern")
        if pattern is None:
            return
        try:
            self.values |= read_pattern(str(pattern))
        except UnknownLayerError as error:
            self.unsettled["hybrid_layer_pattern"] = f"{self.shown}: hybrid_layer_pattern: {error}"
        except ValueError as error:
            raise DataError(f"{self.shown}: hybrid_layer_pattern {pattern!s:.60}: {error}") from error

    def _read_experts(self) -> None:
        if not self._get(*_OTHER_NAMES["num_experts"]):
            return
        self._take("num_experts", *_OTHER_NAMES["num_experts"])
        frequency, layers = self._get("moe_layer_freq"), self.values.get("num_layers")
        if frequency is not None and layers is not None and "hybrid_layer_pattern" not in self.values:
            try:
                if isinstance(frequency, str):
                    frequency = read_frequency(frequency)
                if isinstance(frequency, bool) or not isinstance(frequency, int | list):
                    raise ValueError("is neither a whole number nor a list")
                self._set("num_moe_layers", expert_layers(frequency, layers), "moe_layer_freq")
            except ValueError as error:
                raise DataError(f"{self.shown}: moe_layer_freq {frequency!s:.60}: {error}") from error
        factor = self._get("moe_expert_capacity_factor")
        negative = isinstance(factor, int | float) and factor < 0
        if factor is not None and not negative and self._get("moe_pad_expert_input_to_capacity") is True:
            self._set("moe_expert_capacity_factor", factor, "moe_expert_capacity_factor")

    def _read_wrapper(self) -> None:
        """How the run communicates over data-parallel ranks: several are taken, without which nothing is.

        `comm_overlap` and `mixed_precision` win over `ddp`, as in Megatron-Bridge.
        """
        given: dict[str, tuple[Any, str]] = {}

        def take(part: str, place: Mapping[str, Any], keys: Iterable[str]) -> None:
            given.update({key: (place[key], f"{part}.{key}") for key in keys if place.get(key) is not None})

        ddp, overlap = _mapping(self.content, "ddp"), self.content.get("comm_overlap")
        for part in ("optim", "optimizer", "ddp"):
            take(part, _mapping(self.content, part), _DDP)
        if ddp and "align_param_gather" not in given:
            given["align_param_gather"] = (False, "ddp.align_param_gather")
        take("mixed_precision", self._named_precision(), ("grad_reduce_in_fp32", "fp8_param_gather"))
        if isinstance(overlap, dict) and ddp.get("use_distributed_optimizer"):
            chunks = self._get("virtual_pipeline_model_parallel_size")
            usual = {  # what Megatron-Bridge's CommOverlapConfig writes over the keys of `ddp`
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "overlap_param_gather_with_optimizer_step": False,
                "align_param_gather": isinstance(chunks, int) and chunks > 1,
                "bucket_size": _BUCKET_OF_COMM_OVERLAP,
            }
            take("comm_overlap", usual, usual)
            take("comm_overlap", overlap, usual)
        if "num_buckets" in given:
            given.pop("bucket_size", None)  # which Megatron derives from it
        for key, field in _DDP.items():
            if key in given:
                self._set(field, *given[key])
        aligned = _mapping(self.content, "dist").get("align_grad_reduce")
        if aligned is not None:
            self._set("align_grad_reduce", aligned, "dist.align_grad_reduce")

    def _named_precision(self) -> Mapping[str, Any]:
        """What the recipe of mixed precision says, which may be a name such as bf16_with_fp8_current_scaling_mixed."""
        name = self.content.get("mixed_precision")
        if not isinstance(name, str):
            return _mapping(self.content, "mixed_precision")
        name = name.lower()
        return {
            "grad_reduce_in_fp32": name.startswith(("bf16", "nano", "nemotron")),
            "fp8_param_gather": "fp8" in name and "subchannel" not in name,
        }

    def _read_precision(self) -> None:
        mixed = self.content.get("mixed_precision")
        if isinstance(mixed, str):
            self._read_precision_name("mixed_precision", mixed)
            return
        places = [mixed, *self.places] if isinstance(mixed, dict) else self.places

        def get(name: str) -> Any:
            return next((place[name] for place in places if place.get(name) is not None), None)

        if get("bf16") is True:
            self.values["precision"] = "bf16"
        elif get("fp16") is True:
            self.values["precision"] = "fp16"
        elif get("precision") is not None:
            self._read_precision_name("precision", str(get("precision")))
        elif get("bf16") is False and get("fp16") is False:
            self.values["precision"] = "fp32"
        if get("fp4"):
            self.unsettled["fp8_recipe"] = f"{self.shown}: fp4 {get('fp4')!s:.40}: {_NO_FP4}"
        fp8 = get("fp8")
        if isinstance(fp8, str) and fp8.lower() not in ("none", *FP8_FORMATS):
            raise DataError(f"{self.shown}: fp8 {fp8!r:.60}: not one of {', '.join(FP8_FORMATS)}, none")
        if fp8 and str(fp8).lower() != "none":
            recipe = str(_read_enumeration(get("fp8_recipe")) or "delayed")
            if recipe in get_args(Fp8Recipe):
                self.values["fp8_recipe"] = recipe
            else:
                self.unsettled["fp8_recipe"] = f"{self.shown}: fp8_recipe {recipe:.40}: this recipe is not known"

    def _read_precision_name(self, key: str, text: str) -> None:
        name = text.lower().replace("-", "_")
        word = next((part for part in name.split("_") if part in _PRECISIONS), None)
        if word is None:
            raise DataError(f"{self.shown}: {key} {text!r:.60}: names no precision, such as bf16_mixed")
        self.values["precision"] = _PRECISIONS[word]
        if "fp4" in name:
            self.unsettled["fp8_recipe"] = f"{self.shown}: {key} {text:.60}: {_NO_FP4}"
        recipe = next((recipe for part, recipe in _SCALINGS if part in name), None)
        if recipe is not None:
            self.values["fp8_recipe"] = recipe

    def _read_adapters(self) -> None:
        """Adapters over frozen weights: the fields of Megatron-Bridge's LoRA, DoRA and canonical LoRA, beside model."""
        peft = _mapping(self.content, "peft")
        if peft.get("dim") is None:
            return
        self._set("lora_dim", peft["dim"], "peft.dim")
        if peft.get("target_modules"):
            names = [_CANONICAL.get(name, name) for name in peft["target_modules"]]
            self._set("lora_target_modules", list(dict.fromkeys(names)), "peft.target_modules")
        if peft.get("dropout"):
            self._set("lora_dropout", peft["dropout"], "peft.dropout")

    def _read_vocabulary(self) -> None:
        tokens = self._whole("padded_vocab_size", "vocab_size")
        if tokens is None:
            return
        if self._get("padded_vocab_size") is not None or self._get("should_pad_vocab") is False:
            self._set("vocab_size", tokens, "vocab_size")
        else:
            multiple = self._whole("make_vocab_size_divisible_by") or VOCAB_MULTIPLE
            self.vocabulary = Vocabulary(tokens=tokens, multiple=multiple)

    def _whole(self, *names: str) -> int | None:
        key, value = names[-1], self._get(*names)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31):
            raise DataError(f"{self.shown}: {key} {value!r:.60}: must be a whole number of at least 1")
        return value

    def _read_training(self) -> None:
        places = [*self.places, *(_mapping(self.content, key) for key in ("train", "dataset", "data"))]
        for name, keys in _TRAINING.items():
            value = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
            if value is None or (name == "virtual_pipeline_size" and value == 1):  # one chunk is no interleaving
                continue
            try:
                definitions()[name].check(value)
            except UsageError as error:
                raise DataError(f"{self.shown}: {error}") from error
            self.training[name] = value


def _find_beside(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Mappings beside the model's that hold parallel sizes and precision: NeMo's strategy and plugins."""
    paths = (("trainer", "strategy"), ("strategy",), ("trainer", "plugins"), ("trainer",))
    return [_mapping(content, *path) for path in paths]


def _mapping(content: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at `path` within `content`; an empty one where there is none."""
    place: Any = content
    for key in path:
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}


def _read_enumeration(value: Any) -> Any:
    """The value of an enumeration, which a dumped config writes as a mapping with its arguments."""
    if isinstance(value, dict):
        arguments = value.get("_args_")
        return arguments[0] if isinstance(arguments, list) and arguments else value.get("_name_")
    return value
