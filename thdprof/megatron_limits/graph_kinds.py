"""What graphs of any model, or of one kind, cannot serve: FP8 and FP4, parallelism, overlapped communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import UNMEASURED, UP_TO_ROUTER, Run

_FORMATS = ("fp8", "fp4", "quant_recipe")
"""Fields that quantize a model."""
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
    return run.captures and any(run.field(name) for name in _FORMATS)


def _in_local(run: Run) -> bool:
    return run.impl == "local"


def _otherwise(run: Run) -> bool:
    return run.captures and not _in_local(run)


_NO_GPU = "its graphs are made as those of other recipes, but no GPU that has it was there to measure them"
TAKEN_ALL_THE_SAME = f"with {UNMEASURED}=allow in the environment it is taken all the same"
"""What to do about a setting that is accepted where the user says so."""
_local = partial(must_be_off, applies=_in_local, graphs="`local`", remedy="set graphs.impl to chunk")
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
_NO_PAGED_STASH = (
    "it needs moe_expert_rank_capacity_factor, which megatron-core 0.19 takes with the flex dispatcher's hybridep and "
    "ncclep alone: hybridep failed on an H200 without graphs, too, for Transformer Engine then asks for cuBLAS 13.4, "
    "and torch 2.11 has 13.1; ncclep asks for NCCL 2.30.4, and torch 2.11 has 2.28.9"
)
"""Why moe_paged_stash, which would put dropless experts into a graph, is refused."""
_SERVED = ("p2p", "a2a", "all_gather")
"""Ways in which ranks of context parallelism exchange tokens that were replayed beside eager ones."""
_GATHERED = (
    "weights are gathered and their gradients given back by Python between the layers' passes, which a replay does not "
    "run"
)
_OVERLAP = "overlap_moe_expert_parallel_comm"


def _beyond_nodes(run: Run) -> bool:
    """Whether graphs hold something else than what a node of the schedule does: a layer up to its router.

    Where nothing is captured, as with `replay=False`, it is not known what would be.
    """
    in_part = run.impl == "transformer_engine" and {*UP_TO_ROUTER} <= {*(run.modules or ())}
    return run.captures and run.modules is not None and not in_part


LIMITS: tuple[Limit, ...] = (
    *(_local(field, None, "Megatron's own layer graphs were not checked with it") for field in _FORMATS),
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
    *map(_sizes, _FORMATS),
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
    must_be_off("cpu_offloading", False, "megatron-core refuses it with graphs"),
    must_be_off("use_kitchen", False, "cached quantized weights would not be renewed in replays"),
    must_be_off("moe_enable_routing_replay", False, "it keeps routing decisions in Python"),
    must_be_off("moe_paged_stash", False, f"{_NO_PAGED_STASH}; dropless experts run eagerly (graphs.modules)"),
    must_be_off("qk_clip", False, "it keeps a maximum in Python"),
    must_be_off("log_max_attention_logit", False, "it keeps a maximum in Python"),
    must_be_off(
        "fused_residual_rmsnorm", False, "Transformer Engine's operations keep parameters in places of their own"
    ),
    # --- parallelism
    must_be_off(
        "gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set tensor_parallel_num_weight_shards to tensor_model_parallel_size",
    ),
    must_be_off(
        "expert_gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set expert_tensor_parallel_num_weight_shards to expert_tensor_parallel_size",
    ),
    must_be_off(
        "cp_comm_type",
        "p2p",
        "of context parallelism only p2p, a2a and all_gather were checked in a graph",
        applies=lambda run: run.captures and not run.dynamic_cp and (run.context_parallel_size or 1) > 1,
        is_on=lambda run: {*run.list_values("cp_comm_type")} - {*_SERVED},
    ),
    must_be_off("hierarchical_context_parallel_sizes", None, "groups of two levels were not checked in a graph"),
    # --- overlapped expert communication
    must_be_off(
        _OVERLAP,
        False,
        "its schedule goes past the decoder's forward",
        applies=_beyond_nodes,
        remedy="analyse with --experts dropless, whose graphs its nodes replay, or set it to False",
    ),
    Limit(
        name="overlapped expert communication in hybrid models",
        holds=lambda run: run.captures and run.field(_OVERLAP) and run.field("hybrid_layer_pattern"),
        reason="their schedule has other nodes",
        fields=Words(f"{_OVERLAP} is True in a hybrid model", f"set {_OVERLAP} to False"),
    ),
    # --- Megatron's own layer graphs
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
"""In the order of messages. Layers may be spread unevenly: slots and graphs are of a chunk, whatever it holds."""
