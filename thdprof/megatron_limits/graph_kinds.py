"""What graphs of each kind cannot serve: fields that must be off, groups of layers, recompute, offloading, FP8 and FP4.

Two mechanisms move activations: thdprof's own, inside the graphs of `chunk` and of `transformer_engine`, and
megatron-core's `fine_grained_activation_offloading` around graphs of single layers, where the model was built with it.
Behind a router's graph (dropless experts) only the second one works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.models import NO_PAGED_STASH
from thdprof.megatron_limits.run import UNMEASURED, Run
from thdprof.offload import CORE_MODULES, CORE_MODULES_WITH_EXPERTS

_USE_CHUNK = "set graphs.impl to chunk"
_MEASURED = ("delayed", "tensorwise", "blockwise")
"""Recipes of FP8 that Hopper GPUs have, by megatron-core's names."""


def _recipe(run: Run) -> str:
    """The name of a run's FP8 recipe, megatron-core's own where none is given."""
    recipe = run.field("fp8_recipe")
    return str(getattr(recipe, "value", recipe) or "delayed")


def _by_module(run: Run) -> Iterator[Mapping[str, Any]]:
    """What a run's `quant_recipe` says of modules by their names; nothing where it is not known."""
    for one in (getattr(run.field("quant_recipe"), "configs", None) or {}).values():
        yield one
        parts = (one.get(key) for key in ("training_recipe", "evaluation_recipe"))
        yield from (part for part in parts if isinstance(part, Mapping))


def _new_by_module(run: Run) -> list[str]:
    """The recipes of FP8 and FP4 that modules have by their names, and that Hopper GPUs do not have."""
    keys = ("fp8_quantization_recipe", "fp4_quantization_recipe")
    values = {part.get(key) for part in _by_module(run) for key in keys} - {None}
    return sorted({str(getattr(value, "value", value)) for value in values} - {*_MEASURED, "custom"})


def _quantizes(run: Run) -> bool:
    return run.captures and any(run.field(name) for name in ("fp8", "fp4", "quant_recipe"))


def _in_local(run: Run) -> bool:
    return run.impl == "local"


def _otherwise(run: Run) -> bool:
    return run.captures and not _in_local(run)


_NO_GPU = "its graphs are made as those of other recipes, but no GPU that has it was there to measure them"
TAKEN_ALL_THE_SAME = f"with {UNMEASURED}=allow in the environment it is taken all the same"
"""What to do about a setting that is accepted where the user says so."""
_UNCHECKED = "Megatron's own layer graphs were not checked with it"
_local = partial(must_be_off, applies=_in_local, graphs="`local`", remedy=_USE_CHUNK)
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
    applies=lambda run: run.captures and run.dynamic_cp,
    graphs="dynamic context parallelism",
)

QUANTIZATION_LIMITS: tuple[Limit, ...] = (
    _local("fp8", None, _UNCHECKED),
    _local("fp4", None, _UNCHECKED),
    _local("quant_recipe", None, _UNCHECKED),
    must_be_off(
        "fp8_recipe",
        "tensorwise",
        "whole layers of delayed scaling were not run as graphs beside eager training",
        applies=lambda run: run.impl == "transformer_engine",
        graphs="`transformer_engine`, with FP8 or FP4",
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
        applies=lambda run: run.captures and run.modules is not None and run.impl != "transformer_engine",
        graphs="`chunk`, `local`",
        remedy="set graphs.impl to transformer_engine, whose graphs hold none of its operations, or set it to False",
    ),
    _sizes("fp8"),
    _sizes("fp4"),
    _sizes("quant_recipe"),
    Limit(
        name="`quant_recipe` with quantizers of one's own or Kitchen's",
        holds=lambda run: (
            _quantizes(run)
            and any("kitchen_config_type" in part or part.get("custom_recipe_factory") for part in _by_module(run))
        ),
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
        holds=lambda run: run.captures and run.field("quant_recipe") and run.field("overlap_moe_expert_parallel_comm"),
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


# --- kinds of graphs --------------------------------------------------------------------------------------------------

ALL_GRAPHS: tuple[Limit, ...] = (
    *QUANTIZATION_LIMITS,
    must_be_off("cpu_offloading", False, "megatron-core refuses it with graphs"),
    must_be_off("use_kitchen", False, "cached quantized weights would not be renewed in replays"),
    must_be_off("moe_enable_routing_replay", False, "it keeps routing decisions in Python"),
    must_be_off("moe_paged_stash", False, f"{NO_PAGED_STASH}; dropless experts run eagerly (graphs.modules)"),
    must_be_off("qk_clip", False, "it keeps a maximum in Python"),
    must_be_off("log_max_attention_logit", False, "it keeps a maximum in Python"),
    Limit(
        name="norms by fused operations",
        holds=lambda run: run.captures and run.field("fused_residual_rmsnorm"),
        reason="Transformer Engine's operations keep parameters in places of their own",
        fields=Words("fused_residual_rmsnorm is True", "set it to False"),
    ),
)
"""With graphs of any kind."""

LOCAL_GRAPHS: tuple[Limit, ...] = (
    _local(
        "pipeline_model_parallel_size",
        1,
        "Megatron's layer graphs then take turns by micro-batch, and one that runs eagerly would let them overwrite "
        "each other",
        is_on=lambda run: (run.pipeline_parallel_size or 1) > 1,
        options=Words("--impl local with --pipeline-parallel-size {pipeline_parallel_size}", "use --impl chunk"),
    ),
    _local(
        "expert_model_parallel_size",
        1,
        "ranks that share experts may record other buckets, and making graphs communicates",
    ),
    _local(
        "mtp_num_layers",
        None,
        "the layers of multi-token prediction have graphs too, and take boundaries that are not padded",
    ),
)
"""With Megatron's own layer graphs."""


def _in_groups(run: Run) -> bool:
    return run.layers_per_graph is not None and run.captures


_NULL = "set graphs.layers_per_graph to null"

LAYERS_PER_GRAPH_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="`graphs.layers_per_graph` with graphs of another kind than `chunk`",
        holds=lambda run: _in_groups(run) and run.impl != "chunk",
        reason="only the graphs of a whole model chunk can be cut between layers",
        options=Words(
            "--impl {impl} with layers_per_graph {layers_per_graph}", "use --impl chunk, or layers_per_graph all"
        ),
        fields=Words("graphs.layers_per_graph is {layers_per_graph} with graphs.impl {impl}", _NULL),
    ),
    Limit(
        name="`graphs.layers_per_graph` with offloading",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and run.offload_modules is not None,
        reason="copies to the host begin in one graph and end in another one",
        options=Words(
            "--offload with layers_per_graph {layers_per_graph}", "leave --offload out, or use layers_per_graph all"
        ),
        fields=Words(
            "graphs.layers_per_graph is {layers_per_graph} with graphs.offload", f"{_NULL}, or graphs.offload to null"
        ),
    ),
    Limit(
        name="`graphs.layers_per_graph` under dynamic context parallelism",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and run.dynamic_cp,
        reason="graphs of several context-parallel sizes were not run in groups of layers",
        options=Words("--packer {packer} with layers_per_graph {layers_per_graph}", "use layers_per_graph all"),
        fields=Words("graphs.layers_per_graph is {layers_per_graph}", _NULL),
    ),
)


def _granularity(run: Run) -> Any:
    return run.recompute or run.field("recompute_granularity")


def _chunks(run: Run) -> bool:
    return run.captures and run.impl not in ("local", "transformer_engine")


RECOMPUTE_LIMITS: tuple[Limit, ...] = (
    _local(
        "recompute_granularity",
        None,
        "Megatron recomputes nothing in its own layer graphs",
        is_on=_granularity,
        options=Words("--impl local with recompute_granularity {recompute}", "use --impl chunk"),
    ),
    must_be_off(
        "distribute_saved_activations",
        False,
        "it puts other memory in the place of a graph's input",
        applies=lambda run: run.captures and _granularity(run),
    ),
    Limit(
        name="full recompute with `graphs.layers_per_graph`",
        holds=lambda run: _chunks(run) and run.layers_per_graph is not None and _granularity(run) == "full",
        reason="layers run inside recomputed functions, between which no pass can be cut",
        options=Words(
            "--impl {impl} with layers_per_graph {layers_per_graph} and recompute_granularity {recompute}",
            "use layers_per_graph all, or recompute_granularity selective",
        ),
        fields=Words(
            "recompute_granularity is 'full' with graphs.layers_per_graph {layers_per_graph}",
            "set graphs.layers_per_graph to null, or recompute_granularity to selective",
        ),
    ),
    Limit(
        name="recompute with offloading",
        holds=lambda run: _chunks(run) and run.offload_modules is not None and _granularity(run),
        reason="a recomputed tensor has no memory that could be moved",
        fields=Words(
            "recompute_granularity is {recompute_granularity!r} with graphs.offload",
            "set graphs.offload to null, or recompute_granularity to None",
        ),
    ),
    Limit(
        name="recompute under dynamic context parallelism",
        holds=lambda run: _chunks(run) and run.dynamic_cp and _granularity(run),
        reason="a backward would recompute with the process groups of another context-parallel size",
        options=Words("--packer {packer} with recompute_granularity {recompute}", "use recompute_granularity none"),
        fields=Words("recompute_granularity is {recompute_granularity!r} with {packer}", "set it to None"),
    ),
)
"""Recomputed activations."""

RECOMPUTE_CASES = frozenset(limit.name for limit in RECOMPUTE_LIMITS if limit.off is None)
"""Names of the limits that recompute meets together with something else."""


# --- offloading -------------------------------------------------------------------------------------------------------


def _by_core(run: Run) -> bool:
    return bool(run.core_offload) and run.impl == "transformer_engine"


def _turned_off_first(run: Run) -> bool:
    """Whether megatron-core's own offloading is on with graphs that do not work with it.

    `install` refuses that in any case, and says to turn it off or to set graphs.impl to transformer_engine.
    """
    return bool(run.core_offload) and run.impl != "transformer_engine"


def _unsupported(run: Run) -> list[str]:
    """Modules that megatron-core's own offloading has in no model."""
    return [name for name in run.offload_modules or () if name not in CORE_MODULES]


def _unsupported_with_experts(run: Run) -> list[str]:
    """Modules that it has, but not where a layer is captured up to its router."""
    known = [name for name in run.offload_modules or () if name in CORE_MODULES]
    return [name for name in known if name not in CORE_MODULES_WITH_EXPERTS]


def _has_experts(run: Run) -> bool:
    return run.experts not in (None, "none")


OFFLOAD_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="offloading with `local`",
        holds=lambda run: run.offload_modules is not None and run.impl == "local" and not _turned_off_first(run),
        reason="megatron-core does not offload with cuda_graph_impl='local' and whole-layer capture, so Megatron's own "
        "layer graphs move nothing",
        options=Words("--offload", "use --impl chunk or transformer_engine"),
        fields=Words("graphs.offload", "set graphs.impl to chunk or transformer_engine"),
    ),
    Limit(
        name="offloading by megatron-core itself of modules that it does not support",
        holds=lambda run: _by_core(run) and _unsupported(run),
        reason="megatron-core's own offloading supports only some modules around graphs of layers (attn_norm's tensor "
        "is a layer's input, which the layer's graph keeps)",
        options=Words(
            lambda run: f"--offload {','.join(_unsupported(run))} with --experts {run.experts}",
            f"choose some of {', '.join(CORE_MODULES_WITH_EXPERTS)}, or leave --offload out",
        ),
        fields=Words(
            lambda run: f"graphs.offload.modules has {', '.join(_unsupported(run))}",
            f"with fine_grained_activation_offloading choose some of {', '.join(CORE_MODULES)}",
        ),
    ),
    Limit(
        name="offloading `mlp_norm` of layers with experts by megatron-core itself",
        holds=lambda run: _by_core(run) and _has_experts(run) and _unsupported_with_experts(run),
        reason="megatron-core does not move its tensors where attn and moe_router are captured",
        options=Words(
            lambda run: f"--offload {','.join(_unsupported_with_experts(run))} with --experts {run.experts}",
            "leave mlp_norm out",
        ),
        fields=Words(
            lambda run: f"graphs.offload.modules has {', '.join(_unsupported_with_experts(run))} with num_moe_experts",
            "leave mlp_norm out",
        ),
    ),
    Limit(
        name="offloading by thdprof from graphs of single layers with experts",
        holds=lambda run: (
            run.offload_modules is not None
            and run.impl == "transformer_engine"
            and _has_experts(run)
            and run.core_offload is False
        ),
        reason="graphs of layers with experts move nothing",
        options=Words("--offload with --experts {experts}", "use --impl chunk"),
        fields=Words(
            "graphs.offload with num_moe_experts",
            "build the model with fine_grained_activation_offloading (dropless experts), set graphs.impl to chunk, or "
            "graphs.offload to null",
        ),
    ),
    Limit(
        name="offloading `attn_proj` without `core_attn`",
        holds=lambda run: (
            "attn_proj" in (run.offload_modules or ())
            and not {"all", "core_attn"} & {*(run.offload_modules or ())}
            and run.impl != "module"
            and not _turned_off_first(run)
        ),
        reason="the input of attn_proj is the output of core_attn, which the backward of core_attn needs too",
        options=Words(lambda run: f"--offload {','.join(run.offload_modules or ())}", "add core_attn"),
        fields=Words("graphs.offload.modules has attn_proj without core_attn", "add core_attn"),
    ),
)
