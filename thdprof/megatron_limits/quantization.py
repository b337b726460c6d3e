"""What graphs cannot serve of quantized matrix products (FP8, FP4), and what they serve but nobody has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import UNMEASURED, Run

_USE_CHUNK = "set graphs.impl to chunk"
_MEASURED = ("delayed", "tensorwise", "blockwise")
"""Recipes of FP8 that Hopper GPUs have, by megatron-core's names."""


def _recipe(run: Run) -> str:
    """The name of a run's FP8 recipe, megatron-core's own where none is given."""
    recipe = run.field("fp8_recipe")
    return str(getattr(recipe, "value", recipe) or "delayed")


def _in_local(run: Run) -> bool:
    return run.impl == "local"


def _in_layers(run: Run) -> bool:
    return run.impl == "transformer_engine" and bool(run.field("fp8") or run.field("fp4"))


def _otherwise(run: Run) -> bool:
    return run.captures and not _in_local(run)


def _beyond_layers(run: Run) -> bool:
    """Whether graphs hold more than single layers. Where nothing is captured, as with `replay=False`, they do not."""
    return run.captures and run.modules is not None and run.impl != "transformer_engine"


def _by_module(run: Run) -> Iterator[Mapping[str, Any]]:
    """What a run's `quant_recipe` says of modules by their names; nothing where it is not known."""
    for one in (getattr(run.field("quant_recipe"), "configs", None) or {}).values():
        yield one
        parts = (one.get(key) for key in ("training_recipe", "evaluation_recipe"))
        yield from (part for part in parts if isinstance(part, Mapping))


def _kinds_by_module(run: Run) -> tuple[str, ...]:
    """The recipes of FP8 and FP4 that modules have by their names, by megatron-core's names."""
    keys = ("fp8_quantization_recipe", "fp4_quantization_recipe")
    values = (part.get(key) for part in _by_module(run) for key in keys)
    return tuple(sorted({str(getattr(value, "value", value)) for value in values if value is not None}))


def _foreign_by_module(run: Run) -> bool:
    """Whether modules are quantized by somebody else's quantizers: those of a factory, or of Kitchen."""
    return any("kitchen_config_type" in part or part.get("custom_recipe_factory") for part in _by_module(run))


def _new_by_module(run: Run) -> tuple[str, ...]:
    return tuple(kind for kind in _kinds_by_module(run) if kind not in (*_MEASURED, "custom"))


def _quantizes(run: Run) -> bool:
    return run.captures and any(run.field(name) for name in ("fp8", "fp4", "quant_recipe"))


def _sized(run: Run) -> bool:
    return run.captures and bool(run.dynamic_cp)


_NO_GPU = "its graphs are made as those of other recipes, but no GPU that has it was there to measure them"
TAKEN_ALL_THE_SAME = f"with {UNMEASURED}=allow in the environment it is taken all the same"
"""What to do about a setting that is accepted where the user says so."""
_local = partial(
    must_be_off,
    off=None,
    reason="Megatron's own layer graphs were not checked with it",
    applies=_in_local,
    graphs="`local`",
    remedy=_USE_CHUNK,
)
_layers = partial(must_be_off, applies=_in_layers, graphs="`transformer_engine`, with FP8 or FP4", remedy=_USE_CHUNK)
_quantized = partial(must_be_off, applies=_quantizes, graphs="all, with FP8 or FP4")
_ATTENTION = (
    "Transformer Engine 2.20 found no backend for attention in FP8 over packed input on an H200, with graphs or without"
)
_CUSTOM = "what its quantizers keep between passes is not known"
_unmeasured = partial(
    must_be_off,
    reason=_NO_GPU,
    applies=_otherwise,
    graphs="`chunk`, `transformer_engine`",
    remedy=TAKEN_ALL_THE_SAME,
)
_sizes = partial(
    must_be_off,
    off=None,
    reason="it was not checked with micro-batches of several context-parallel sizes",
    applies=_sized,
    graphs="dynamic context parallelism",
)

QUANTIZATION_LIMITS: tuple[Limit, ...] = (
    _local("fp8"),
    _local("fp4"),
    _local("quant_recipe"),
    _layers(
        "fp8_recipe",
        "tensorwise",
        "whole layers of delayed scaling were not run as graphs beside eager training",
        is_on=lambda run: run.field("fp8") and _recipe(run) == "delayed",
        remedy="set it to 'tensorwise' or 'blockwise', or graphs.impl to chunk",
    ),
    _unmeasured(
        "fp8_recipe",
        "tensorwise",
        is_on=lambda run: run.field("fp8") and _recipe(run) not in (*_MEASURED, "custom") and not run.unmeasured,
    ),
    _unmeasured("fp4", None, is_on=lambda run: run.field("fp4") and not run.unmeasured),
    _quantized("fp8_quantizer_factory", None, _CUSTOM),
    _quantized("fp4_quantizer_factory", None, _CUSTOM),
    _quantized("fp8_dot_product_attention", False, _ATTENTION),
    _quantized("fp8_multi_head_attention", False, _ATTENTION),
    must_be_off(
        "use_transformer_engine_op_fuser",
        False,
        "its operations keep parameters and scales in places of their own",
        applies=_beyond_layers,
        graphs="`chunk`, `local`",
        remedy="set graphs.impl to transformer_engine, whose graphs hold none of its operations, or set it to False",
    ),
    _sizes("fp8"),
    _sizes("fp4"),
    _sizes("quant_recipe"),
    Limit(
        name="`quant_recipe` with quantizers of one's own or Kitchen's",
        holds=lambda run: _quantizes(run) and _foreign_by_module(run),
        reason=_CUSTOM,
        fields=Words(
            "quant_recipe has a custom_recipe_factory or a kitchen_config_type",
            "choose among Transformer Engine's own recipes",
        ),
    ),
    Limit(
        name="`quant_recipe` with recipes that Hopper GPUs do not have",
        holds=lambda run: _otherwise(run) and _new_by_module(run) and not run.unmeasured,
        reason=_NO_GPU,
        fields=Words(lambda run: f"quant_recipe has {', '.join(_new_by_module(run))}", TAKEN_ALL_THE_SAME),
    ),
    Limit(
        name="`quant_recipe` with overlapped expert communication",
        holds=lambda run: (
            run.captures and bool(run.field("quant_recipe") and run.field("overlap_moe_expert_parallel_comm"))
        ),
        reason="what quantized weights keep was not checked between the schedule's nodes",
        fields=Words(
            "quant_recipe with overlap_moe_expert_parallel_comm", "set overlap_moe_expert_parallel_comm to False"
        ),
    ),
    Limit(
        name="offloading of quantized activations",
        holds=lambda run: _quantizes(run) and run.offload_modules is not None,
        reason="it was not checked with FP8 or FP4",
        fields=Words("graphs.offload", "set it to null"),
    ),
)
"""Everything else keeps its scales and quantized weights (`thdprof.runtime.megatron.quantized`)."""
