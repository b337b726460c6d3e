"""The precision that a recipe trains in: the names of Megatron-Bridge's and NeMo's mixed-precision recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thdprof.analyze.settings.model.reading import FP8_FORMATS

_SCALINGS = {
    "delayed": "delayed",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}
"""megatron-core's fp8_recipe."""
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
        return _named("mixed_precision", mixed, shown, unsettled)
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
        found |= _named("precision", str(get("precision")), shown, unsettled)
    elif get("bf16") is False and get("fp16") is False:
        found["precision"] = "fp32"
    if get("fp4"):
        unsettled["fp8_recipe"] = f"{shown}: fp4 {get('fp4')!s:.40}: matrix products in FP4 are not known"
    fp8 = get("fp8")
    if isinstance(fp8, str) and fp8.lower() not in ("none", *FP8_FORMATS):
        raise ValueError(f"fp8 {fp8!r:.60}: not one of {', '.join(FP8_FORMATS)}, none")
    if fp8 and str(fp8).lower() != "none":
        recipe = str(_plain(get("fp8_recipe")) or "delayed")
        if recipe not in _SCALINGS:
            unsettled["fp8_recipe"] = f"{shown}: fp8_recipe {recipe:.40}: this recipe is not known"
        else:
            found["fp8_recipe"] = _SCALINGS[recipe]
    return found


def _named(key: str, text: str, shown: str, unsettled: dict[str, str]) -> dict[str, Any]:
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


def _plain(value: Any) -> Any:
    """The value of an enumeration, which a dumped config writes as a mapping with its arguments."""
    if isinstance(value, dict):
        arguments = value.get("_args_")
        return arguments[0] if isinstance(arguments, list) and arguments else value.get("_name_")
    return value
