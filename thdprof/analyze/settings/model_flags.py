"""The model out of the flags of a Megatron-LM launch script, by the rules of megatron.training's arguments.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from thdprof.analyze.settings.launch_flags import BlockError, LaunchFlags, Occurrence
from thdprof.analyze.settings.megatron_flags import EXPERTS, LAYERS, PADDED_EXPERTS, TENSOR_PARALLEL_SIZE
from thdprof.analyze.settings.model import flag_names as names
from thdprof.analyze.settings.model.layers import expert_layers, hybrid_layers, read_frequency
from thdprof.analyze.settings.model.reading import FP8_FORMATS, VOCAB_MULTIPLE, ModelReading, Vocabulary
from thdprof.errors import UsageError
from thdprof.training.model import read_field

_SCRIPT_DEFAULTS = {
    "precision": "fp32",
    "normalization": "LayerNorm",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""Values of the parser where no flag gives another."""
_KV_LORA_RANK = 32
"""The parser's; that of megatron-core's configuration is another."""
_RECIPES = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}


def read_model_flags(flags: LaunchFlags) -> ModelReading:
    """What the script says of the model.

    A flag that the text does not settle is no error, since only times are lost without it: its field is in the
    result's `unsettled`. A field that the caller has is passed over.

    Raises:
        UsageError: a flag has a value that Megatron refuses; the message names line, flag and value.
    """
    return _ModelFlags(flags).read()


class _ModelFlags:
    """Collects the fields of one script."""

    def __init__(self, flags: LaunchFlags) -> None:
        self.flags = flags
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.unsettled: dict[str, str] = {}
        self.notes: list[str] = []

    def read(self) -> ModelReading:
        if not self._given():
            return ModelReading(source=self.flags.where)
        self.values.update(_SCRIPT_DEFAULTS)
        for flag, field in {LAYERS: "num_layers", TENSOR_PARALLEL_SIZE: "tensor_model_parallel_size"}.items():
            self._field(flag, field, self._whole)
        for flag, field in names.SIZES.items():
            self._field(flag, field, self._whole)
        for flag, field in names.TEXTS.items():
            self._field(flag, field, str)
        for flag, field in names.NUMBERS.items():
            self._field(flag, field, _number)
        for flag, (field, value) in names.SWITCHES.items():
            if self._one(flag, field) is not None:
                self._set(field, value, self._one(flag, field))
        if self.values["precision"] == "fp16" and not self._parsed(names.LOSS_SCALE, "check_for_nan_in_grad", float):
            self.values["check_for_nan_in_grad"] = False  # a dynamic loss scale finds its bound by them
        self._gradients()
        self._attention()
        self._hybrid()
        self._experts()
        self._fp8()
        if (modules := self._one(names.RECOMPUTED, "recompute_modules")) is not None:
            self._set("recompute_modules", tuple(modules.texts), modules)
        vocabulary = self._vocabulary()
        self._elsewhere()
        return ModelReading(
            source=self.flags.where,
            values=self.values,
            vocabulary=vocabulary,
            origins=self.origins,
            unsettled=self.unsettled,
            notes=tuple(self.notes),
        )

    def _given(self) -> bool:
        """Whether any flag says something of the model's shape."""
        shape = (LAYERS, "--hidden-size", "--num-attention-heads", *names.PATTERNS, *names.ELSEWHERE)
        return any(flag in self.flags.occurrences for flag in shape)

    def _one(self, flag: str, field: str) -> Occurrence | None:
        """The occurrence of `flag`; None where it is absent, the caller has `field`, or the text does not settle it."""
        try:
            return self.flags.one(flag, field, f"{field} in --settings")
        except BlockError:
            raise
        except UsageError as error:
            self.unsettled.setdefault(field, str(error))
            return None

    def _set(self, field: str, value: Any, found: Occurrence | None) -> None:
        """Take `value` for `field`, or refuse it with the place that gives it."""
        if found is None:
            self.values[field] = value
            return
        given = " ".join([found.flag, *found.texts])
        place = f"{self.flags.script.place(found.line)}: {given}"
        try:
            self.values[field] = read_field(field, value)
        except UsageError as error:
            raise UsageError(f"{place}: {str(error).rpartition(': ')[2]}") from error
        self.origins[field] = place

    def _field(self, flag: str, field: str, parse: Callable[[str], Any]) -> None:
        found = self._one(flag, field)
        if found is not None:
            self._set(field, parse(found.text), found)

    def _parsed(self, flag: str, field: str, parse: Callable[[str], Any]) -> Any:
        """The value of `flag` by `parse`, whose ValueError becomes an error with the place; None where absent."""
        found = self._one(flag, field)
        if found is None:
            return None
        text = found.text
        try:
            return parse(text)
        except ValueError as error:
            raise UsageError(f"{self.flags.script.place(found.line)}: {flag} {text}: {error}") from error

    @staticmethod
    def _whole(text: str) -> int | str:
        """The whole number that `text` is; other text stays, and is refused with the field's own words."""
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text

    def _gradients(self) -> None:
        """With bf16 gradients are reduced in the precision of main gradients, if no flag says otherwise."""
        found = self._one(names.MAIN_GRADS, "grad_reduce_in_fp32")
        in_bf16 = self.values["precision"] == "bf16"
        if found is not None and in_bf16 and "grad_reduce_in_fp32" not in self.values:
            self._set("grad_reduce_in_fp32", found.text == "fp32", found)

    def _attention(self) -> None:
        grouped = self._one(names.GROUPED, "num_query_groups")
        if grouped is not None:
            found = self._one(names.GROUPS, "num_query_groups")
            text = "1" if found is None else found.text
            self._set("num_query_groups", self._whole(text), found or grouped)
        positions = self._one(names.POSITIONS, "rotary")
        if positions is not None and "rotary" not in self.origins:
            self._set("rotary", positions.text in ("rope", "yarn", "mrope"), positions)

    def _hybrid(self) -> None:
        field = "hybrid_layer_pattern"
        for flag in names.PATTERNS:
            try:
                layers = self._parsed(flag, field, hybrid_layers)
            except UsageError as error:
                if "is not known" not in str(error):
                    raise
                self.unsettled.setdefault(field, str(error))
                continue
            if layers is None:
                continue
            self._set(field, layers.pattern, self._one(flag, field))
            if "num_layers" not in self.flags.from_caller:
                self.unsettled.pop("num_layers", None)  # the pattern decides
                self._set("num_layers", len(layers.pattern), self._one(flag, field))
            if layers.latent_attention:
                self.values["multi_latent_attention"] = True
            if layers.mtp_num_layers:
                self.values["mtp_num_layers"] = layers.mtp_num_layers
            if experts := layers.pattern.count("E"):
                self.values["num_moe_layers"] = experts
        if self.values.get("multi_latent_attention"):
            self.values.setdefault("kv_lora_rank", _KV_LORA_RANK)
            self.values["rotary"] = True  # whatever the position embedding: latent attention has its own

    def _experts(self) -> None:
        found = self._one(EXPERTS, "num_experts")
        if found is None or found.text == "0":
            return
        self._set("num_experts", self._whole(found.text), found)
        if "num_moe_layers" not in self.values and "hybrid_layer_pattern" not in self.values:
            self._expert_layers()
        factor = self._parsed(names.CAPACITY, "moe_expert_capacity_factor", float)
        padded = self._one(PADDED_EXPERTS, "moe_expert_capacity_factor")
        if factor is not None and factor >= 0 and padded is not None:
            self._set("moe_expert_capacity_factor", factor, self._one(names.CAPACITY, "moe_expert_capacity_factor"))

    def _expert_layers(self) -> None:
        frequency = self._parsed(names.EXPERT_LAYERS, "num_moe_layers", read_frequency)
        layers = self.values.get("num_layers", self.flags.from_caller.get("num_layers"))
        if frequency is None or not isinstance(layers, int):
            return
        found = self._one(names.EXPERT_LAYERS, "num_moe_layers")
        try:
            self._set("num_moe_layers", expert_layers(frequency, layers), found)
        except ValueError as error:
            line = 0 if found is None else found.line
            raise UsageError(f"{self.flags.script.place(line)}: {names.EXPERT_LAYERS}: {error}") from error

    def _fp8(self) -> None:
        if self._parsed(names.FP8, "fp8_recipe", _fp8_format) is None:
            return
        found = self._one(names.FP8_RECIPE, "fp8_recipe")
        recipe = "delayed" if found is None else found.text
        if recipe in _RECIPES or found is None:
            self._set("fp8_recipe", recipe, found or self._one(names.FP8, "fp8_recipe"))
        else:
            self.unsettled.setdefault(
                "fp8_recipe",
                f"{self.flags.script.place(found.line)}: {names.FP8_RECIPE} {recipe}: this recipe is not known",
            )

    def _vocabulary(self) -> Vocabulary | None:
        field = "vocab_size"
        self._field(names.PADDED_VOCAB, field, self._whole)
        if field in self.values or field in self.unsettled:
            return None
        tokens = self._count(names.VOCAB, field)
        multiple = self._count(names.VOCAB_DIVISOR, field) or VOCAB_MULTIPLE
        if tokens is None or field in self.unsettled:
            return None
        if any(self._one(flag, field) is not None for flag in names.UNPADDED):
            self._set(field, tokens, self._one(names.VOCAB, field))
            return None
        return Vocabulary(tokens=tokens, multiple=multiple)

    def _count(self, flag: str, field: str) -> int | None:
        def parse(text: str) -> int:
            if not re.fullmatch(r"\+?[0-9]{1,9}", text) or int(text) < 1:
                raise ValueError("not a whole number of at least 1")
            return int(text)

        value: int | None = self._parsed(flag, field, parse)
        return value

    def _elsewhere(self) -> None:
        """Note flags that say that the model is another one than the other flags do, or that is not followed."""
        for flag, (_, reason) in names.ELSEWHERE.items():
            for found in self.flags.occurrences.get(flag, [])[-1:]:
                self.unsettled.setdefault(flag, f"{self.flags.script.place(found.line)}: {flag}: {reason}")
        for flag, taken in names.LEFT_OUT.items():
            for found in self.flags.occurrences.get(flag, [])[-1:]:
                self.notes.append(f"{self.flags.script.place(found.line)}: {flag}: {taken}")


def _fp8_format(text: str) -> str:
    if text not in FP8_FORMATS:
        raise ValueError(f"not one of {', '.join(FP8_FORMATS)}")
    return text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
