"""What graphs cannot serve of quantized matrix products (FP8, FP4), and what they serve but nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off

_USE_CHUNK = "set graphs.impl to chunk"
UNMEASURED = "THDPROF_UNMEASURED"
"""Environment variable; the value `allow` accepts quantization that has graphs but was never measured."""
_MEASURED = ("delayed", "tensorwise", "blockwise")
"""Recipes of FP8 that Hopper GPUs have, by megatron-core's names."""


def takes_unmeasured(environment: Mapping[str, str]) -> bool:
    """Whether the user takes quantization that was never measured."""
    return environment.get(UNMEASURED) == "allow"


def _recipe(run: Run) -> str:
    """The name of a run's FP8 recipe, megatron-core's own where none is given."""
    recipe = run.field("fp8_recipe")
    return str(getattr(recipe, "value", recipe) or "delayed")


def _captures(run: Run) -> bool:
    return run.impl not in (None, "none")


def _in_local(run: Run) -> bool:
    return run.impl == "local"


def _in_layers(run: Run) -> bool:
    return run.impl == "transformer_engine" and bool(run.field("fp8") or run.field("fp4"))


def _otherwise(run: Run) -> bool:
    return _captures(run) and not _in_local(run)


def _quantizes(run: Run) -> bool:
    return _captures(run) and bool(run.field("fp8") or run.field("fp4"))


def _sized(run: Run) -> bool:
    return _captures(run) and bool(run.dynamic_cp)


_local = partial(
    must_be_off,
    off=None,
    reason="Megatron's own layer graphs were not checked with it",
    applies=_in_local,
    graphs="`local`",
    remedy=_USE_CHUNK,
)
_layers = partial(must_be_off, applies=_in_layers, graphs="`transformer_engine`, with FP8 or FP4", remedy=_USE_CHUNK)
_PARAMETERS = "parameters that are quantized themselves were not checked as arguments of graphs of single layers"
_quantized = partial(must_be_off, applies=_quantizes, graphs="all, with FP8 or FP4")
_ATTENTION = "attention in FP8 was not checked in a graph"
_CUSTOM = "what its quantizers keep between passes is not known"
_unmeasured = partial(
    must_be_off,
    reason="its graphs are made as those of other recipes, but no GPU that has it was there to measure them",
    applies=_otherwise,
    graphs="`chunk`, `transformer_engine`",
    remedy=f"with {UNMEASURED}=allow in the environment it is taken all the same",
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
    _layers(
        "fp8_recipe",
        "tensorwise",
        "graphs of single layers do not keep the states of delayed scaling",
        is_on=lambda run: bool(run.field("fp8")) and _recipe(run) == "delayed",
        remedy="set it to 'tensorwise' or 'blockwise', or graphs.impl to chunk",
    ),
    _layers("fp8_param", False, _PARAMETERS),
    _layers("fp4_param", False, _PARAMETERS),
    _unmeasured(
        "fp8_recipe",
        "tensorwise",
        is_on=lambda run: bool(run.field("fp8")) and _recipe(run) not in (*_MEASURED, "custom") and not run.unmeasured,
    ),
    _unmeasured("fp4", None, is_on=lambda run: bool(run.field("fp4")) and not run.unmeasured),
    _quantized("fp8_quantizer_factory", None, _CUSTOM),
    _quantized("fp4_quantizer_factory", None, _CUSTOM),
    _quantized("fp8_dot_product_attention", False, _ATTENTION),
    _quantized("fp8_multi_head_attention", False, _ATTENTION),
    _quantized("use_transformer_engine_op_fuser", False, "its operations keep scales in places of their own"),
    _sizes("fp8"),
    _sizes("fp4"),
    Limit(
        name="offloading of quantized activations",
        holds=lambda run: _quantizes(run) and run.offload_modules is not None,
        reason="it was not checked with FP8 or FP4",
        fields=Words(case=lambda run: "graphs.offload", remedy="set it to null"),
    ),
)
"""Everything else keeps its scales and quantized weights (`thdprof.runtime.megatron.quantized`)."""
