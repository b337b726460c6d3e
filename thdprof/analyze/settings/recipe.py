"""The model out of a recipe as YAML: a dumped config of Megatron-Bridge or NeMo, with TransformerConfig's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from thdprof.analyze.settings.model_reading import (
    FP8_FORMATS,
    OF_COMMUNICATION,
    OF_THE_RUN,
    VOCAB_MULTIPLE,
    ModelReading,
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
_READ_APART = (OF_COMMUNICATION - {"calculate_per_token_loss"}) | {
    "precision",
    "fp8_recipe",
    "vocab_size",
    "rotary",
    "untie_embeddings_and_output_weights",
    "num_moe_layers",
    "hybrid_layer_pattern",
    "moe_expert_capacity_factor",
    "normalization",
    "use_distributed_optimizer",
    "gated_linear_unit",
    "num_experts",
    "add_bias_linear",
    "lora_dim",
    "lora_target_modules",
    "lora_dropout",
}
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
_NOT_KNOWN = {
    "experimental_attention_variant": "this kind of attention is not known",
    "linear_attention_freq": "layers of linear attention are not known",
    "heterogeneous_block_specs": "layers of different sizes are not known",
    "moe_latent_size": "experts with a width of their own are not known",
}


def is_recipe(content: Mapping[str, Any]) -> bool:
    """Whether `content` has a mapping with TransformerConfig's keys in it."""
    return _find_architecture(content) is not None


def read_recipe(content: Mapping[str, Any], source: str) -> ModelReading:
    """What the recipe `content` says of the model and of the run; `source` is its file, as the user named it.

    Raises:
        DataError: a key has an impossible value.
    """
    return _Recipe(content, source).read()


def settings_of_recipe(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of TransformerConfig that a recipe trains with, by name; None where it is no recipe.

    Those of its precision, of its overlap of communication and of its wrapper stand beside the model's.
    """
    path = _find_architecture(content)
    if path is None:
        return None
    beside = [_mapping(content, part) for part in ("ddp", "dist", "comm_overlap", "mixed_precision")]
    fields: dict[str, Any] = {}
    for place in (*reversed(_find_beside(content)), path[0], *beside):
        fields |= {name: value for name, value in place.items() if value is not None}
    return fields


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


class _Recipe:
    """Looks keys up in the mapping of the architecture, then in those around it, then beside it."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        path = _find_architecture(content) or [content]
        self.content = content
        self.source = source
        self.shown = f"--model {source}"
        self.places = [*path, *_find_beside(content)]
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.unsettled: dict[str, str] = {}

    def read(self) -> ModelReading:
        for field in model_definitions():
            if field not in _READ_APART:
                self._take(field, *_OTHER_NAMES.get(field, (field,)))
        self._normalization()
        self._take("gated_linear_unit", "gated_linear_unit", *(["swiglu"] if self._get("swiglu") is not None else []))
        activation = self._get("activation")
        if "gated_linear_unit" not in self.values and isinstance(activation, str):
            self.values["gated_linear_unit"] = any(word in activation for word in ("swiglu", "geglu", "reglu"))
        self._take("add_bias_linear", "add_bias_linear", "bias")
        shared = self._get("share_embeddings_and_output_weights")
        self._take("untie_embeddings_and_output_weights", "untie_embeddings_and_output_weights")
        if isinstance(shared, bool):
            self.values["untie_embeddings_and_output_weights"] = not shared
        positions = self._get("position_embedding_type")
        if isinstance(positions, str) or self.values.get("multi_latent_attention"):
            latent = bool(self.values.get("multi_latent_attention"))
            self.values["rotary"] = latent or positions in ("rope", "yarn", "mrope")
        self._hybrid()
        self._experts()
        self._optimizer()
        self._adapters()
        try:
            self.values |= read_precision(self.content, self.places, self.shown, self.unsettled)
        except ValueError as error:
            raise DataError(f"{self.shown}: {error}") from error
        for key, reason in _NOT_KNOWN.items():
            if self._get(key):
                self.unsettled[key] = f"{self.shown}: {key}: {reason}"
        return ModelReading(
            source=self.source,
            values=self.values,
            vocabulary=self._vocabulary(),
            origins=self.origins,
            unsettled=self.unsettled,
            training=self._training(),
        )

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

    def _normalization(self) -> None:
        known = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
        value = self._get("normalization")
        if value is not None:
            self._set("normalization", known.get(str(value).lower(), value), "normalization")

    def _hybrid(self) -> None:
        pattern = self._get("hybrid_layer_pattern", "hybrid_override_pattern")
        if pattern is None:
            return
        try:
            self.values |= read_pattern(str(pattern))
        except ValueError as error:
            if "is not known" not in str(error):
                raise DataError(f"{self.shown}: hybrid_layer_pattern {pattern!s:.60}: {error}") from error
            self.unsettled["hybrid_layer_pattern"] = f"{self.shown}: hybrid_layer_pattern: {error}"

    def _experts(self) -> None:
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

    def _optimizer(self) -> None:
        for part in ("ddp", "optimizer", "optim"):
            place = _mapping(self.content, part)
            if place.get("use_distributed_optimizer") is True or place.get("name") == "distributed_fused_adam":
                self.values["use_distributed_optimizer"] = True
        chunks = self._get("virtual_pipeline_model_parallel_size")
        ddp = read_ddp(self.content, interleaved=isinstance(chunks, int) and chunks > 1)
        for field, (value, key) in ddp.items():
            self._set(field, value, key)

    def _adapters(self) -> None:
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

    def _vocabulary(self) -> Vocabulary | None:
        tokens = self._whole("vocab_size", self._get("padded_vocab_size", "vocab_size"))
        if tokens is None:
            return None
        if self._get("padded_vocab_size") is not None or self._get("should_pad_vocab") is False:
            self._set("vocab_size", tokens, "vocab_size")
            return None
        multiple = self._whole("make_vocab_size_divisible_by", self._get("make_vocab_size_divisible_by"))
        return Vocabulary(tokens=tokens, multiple=multiple or VOCAB_MULTIPLE)

    def _whole(self, key: str, value: Any) -> int | None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31):
            raise DataError(f"{self.shown}: {key} {value!r:.60}: must be a whole number of at least 1")
        return value

    def _training(self) -> dict[str, Any]:
        """Training settings of the run; one chunk a rank is no interleaving."""
        found: dict[str, Any] = {}
        places = [*self.places, *(_mapping(self.content, key) for key in ("train", "dataset", "data"))]
        for name, keys in _TRAINING.items():
            value = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
            if value is None or (name == "virtual_pipeline_size" and value == 1):
                continue
            try:
                definitions()[name].check(value)
            except UsageError as error:
                raise DataError(f"{self.shown}: {error}") from error
            found[name] = value
        return found


def _find_beside(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Mappings beside the model's that hold parallel sizes and precision: NeMo's strategy and plugins."""
    paths = (("trainer", "strategy"), ("strategy",), ("trainer", "plugins"), ("trainer",))
    return [_mapping(content, *path) for path in paths]


# --- how gradients are reduced and parameters gathered ----------------------------------------------------------------


_DDP = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather_with_optimizer_step",
    "align_param_gather": "align_param_gather",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "grad_reduce_in_fp32": "grad_reduce_in_fp32",
    "fp8_param_gather": "fp8_param_gather",
    "bucket_size": "ddp_bucket_size",
    "num_buckets": "ddp_num_buckets",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
}
"""Keys of the wrapper, with the fields of `Model` that they give."""
_OF_MIXED_PRECISION = ("grad_reduce_in_fp32", "fp8_param_gather")
_BUCKET_OF_COMM_OVERLAP = 128 * 1024 * 1024
"""Parameters of a bucket that Megatron-Bridge's CommOverlapConfig asks for."""


def read_ddp(content: Mapping[str, Any], *, interleaved: bool) -> dict[str, tuple[Any, str]]:
    """Fields of `Model` that say how the run communicates over data-parallel ranks, as far as the recipe says them:
    their values, and the keys that give them.

    `comm_overlap` and `mixed_precision` win over `ddp`, as in Megatron-Bridge. Several data-parallel ranks are taken,
    without which nothing is communicated.

    Args:
        content: the whole recipe.
        interleaved: whether a pipeline rank has several model chunks.
    """
    given: dict[str, tuple[Any, str]] = {}

    def take(part: str, place: Mapping[str, Any], keys: Iterable[str]) -> None:
        given.update({key: (place[key], f"{part}.{key}") for key in keys if place.get(key) is not None})

    ddp = _mapping(content, "ddp")
    for part in ("optim", "optimizer", "ddp"):
        take(part, _mapping(content, part), _DDP)
    if ddp and "align_param_gather" not in given:
        given["align_param_gather"] = (False, "ddp.align_param_gather")
    take("mixed_precision", _named_precision(content), _OF_MIXED_PRECISION)
    if isinstance(content.get("comm_overlap"), dict) and ddp.get("use_distributed_optimizer"):
        usual = {  # what Megatron-Bridge's CommOverlapConfig writes over the keys of `ddp`
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "overlap_param_gather_with_optimizer_step": False,
            "align_param_gather": interleaved,
            "bucket_size": _BUCKET_OF_COMM_OVERLAP,
        }
        take("comm_overlap", usual, usual)
        take("comm_overlap", content["comm_overlap"], usual)
    if "num_buckets" in given:
        given.pop("bucket_size", None)  # which Megatron derives from it
    found = {field: given[key] for key, field in _DDP.items() if key in given}
    aligned = _mapping(content, "dist").get("align_grad_reduce")
    if aligned is not None:
        found["align_grad_reduce"] = (aligned, "dist.align_grad_reduce")
    return found


def _named_precision(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the recipe of mixed precision says, which may be a name such as bf16_with_fp8_current_scaling_mixed."""
    name = content.get("mixed_precision")
    if not isinstance(name, str):
        return _mapping(content, "mixed_precision")
    name = name.lower()
    return {
        "grad_reduce_in_fp32": name.startswith(("bf16", "nano", "nemotron")),
        "fp8_param_gather": "fp8" in name and "subchannel" not in name,
    }


def _mapping(content: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at `path` within `content`; an empty one where there is none."""
    place: Any = content
    for key in path:
        place = place.get(key) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}


# --- precision --------------------------------------------------------------------------------------------------------


_IN_NAMES = (
    ("nanov2_bf16_with_fp8_current_scaling", "blockwise"),
    ("fp8_delayed_scaling", "delayed"),
    ("fp8_current_scaling", "tensorwise"),
    ("fp8_subchannel_scaling", "blockwise"),
    ("mxfp8", "mxfp8"),
    ("with_fp8", "delayed"),
)
"""Parts of the names of Megatron-Bridge's recipes, the first that fits, with the scaling that they set."""
_WORDS = {"bf16": "bf16", "bfloat16": "bf16", "16": "fp16", "fp16": "fp16", "32": "fp32", "fp32": "fp32"}
"""First words of the names of precisions."""


def read_precision(
    content: Mapping[str, Any], places: Sequence[Mapping[str, Any]], shown: str, unsettled: dict[str, str]
) -> dict[str, Any]:
    """The fields precision and fp8_recipe, as far as the recipe says them.

    Args:
        content: the whole recipe.
        places: mappings in which TransformerConfig's own keys are looked up, the first that has one.
        shown: the file's name in messages.
        unsettled: takes the reason where the precision is one that is not known.

    Raises:
        ValueError: a name is no precision, or no format of FP8; the message names key and value.
    """
    mixed = content.get("mixed_precision")
    if isinstance(mixed, str):
        return _read_precision_name("mixed_precision", mixed, shown, unsettled)
    if isinstance(mixed, dict):
        places = [mixed, *places]

    def get(name: str) -> Any:
        return next((place[name] for place in places if place.get(name) is not None), None)

    found: dict[str, Any] = {}
    if get("bf16") is True:
        found["precision"] = "bf16"
    elif get("fp16") is True:
        found["precision"] = "fp16"
    elif get("precision") is not None:
        found |= _read_precision_name("precision", str(get("precision")), shown, unsettled)
    elif get("bf16") is False and get("fp16") is False:
        found["precision"] = "fp32"
    if get("fp4"):
        unsettled["fp8_recipe"] = f"{shown}: fp4 {get('fp4')!s:.40}: matrix products in FP4 are not known"
    fp8 = get("fp8")
    if isinstance(fp8, str) and fp8.lower() not in ("none", *FP8_FORMATS):
        raise ValueError(f"fp8 {fp8!r:.60}: not one of {', '.join(FP8_FORMATS)}, none")
    if fp8 and str(fp8).lower() != "none":
        recipe = str(_read_enumeration(get("fp8_recipe")) or "delayed")
        if recipe in get_args(Fp8Recipe):
            found["fp8_recipe"] = recipe
        else:
            unsettled["fp8_recipe"] = f"{shown}: fp8_recipe {recipe:.40}: this recipe is not known"
    return found


def _read_precision_name(key: str, text: str, shown: str, unsettled: dict[str, str]) -> dict[str, Any]:
    """The fields that a name such as bf16_with_fp8_current_scaling_mixed says."""
    name = text.lower().replace("-", "_")
    word = next((part for part in name.split("_") if part in _WORDS), None)
    if word is None:
        raise ValueError(f"{key} {text!r:.60}: names no precision, such as bf16_mixed")
    if "fp4" in name:
        unsettled["fp8_recipe"] = f"{shown}: {key} {text:.60}: matrix products in FP4 are not known"
    found = {"precision": _WORDS[word]}
    recipe = next((recipe for part, recipe in _IN_NAMES if part in name), None)
    return {**found, **({} if recipe is None else {"fp8_recipe": recipe})}


def _read_enumeration(value: Any) -> Any:
    """The value of an enumeration, which a dumped config writes as a mapping with its arguments."""
    if isinstance(value, dict):
        arguments = value.get("_args_")
        return arguments[0] if isinstance(arguments, list) and arguments else value.get("_name_")
    return value
