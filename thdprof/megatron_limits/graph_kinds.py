"""Rows of the table by the kind of graphs: fields that must be off, groups of layers, and recomputed activations."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.experts import NO_PAGED_STASH
from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.quantization import QUANTIZATION_LIMITS
from thdprof.megatron_limits.run import Run

_off_in_local = partial(must_be_off, applies=lambda run: run.impl == "local", graphs="`local`")
_USE_CHUNK = "set graphs.impl to chunk"

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
    _off_in_local(
        "pipeline_model_parallel_size",
        1,
        "Megatron's layer graphs then take turns by micro-batch, and one that runs eagerly would let them overwrite "
        "each other",
        remedy=_USE_CHUNK,
        is_on=lambda run: (run.pipeline_parallel_size or 1) > 1,
        options=Words("--impl local with --pipeline-parallel-size {pipeline_parallel_size}", "use --impl chunk"),
    ),
    _off_in_local(
        "expert_model_parallel_size",
        1,
        "ranks that share experts may record other buckets, and making graphs communicates",
        remedy=_USE_CHUNK,
    ),
    _off_in_local(
        "mtp_num_layers",
        None,
        "the layers of multi-token prediction have graphs too, and take boundaries that are not padded",
        remedy=_USE_CHUNK,
    ),
)
"""With Megatron's own layer graphs."""


def _in_groups(run: Run) -> bool:
    return run.layers_per_graph is not None and run.captures


def _field(run: Run) -> str:
    return f"graphs.layers_per_graph is {run.layers_per_graph}"


_NULL = "set graphs.layers_per_graph to null"

LAYERS_PER_GRAPH_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="`graphs.layers_per_graph` with graphs of another kind than `chunk`",
        holds=lambda run: _in_groups(run) and run.impl != "chunk",
        reason="only the graphs of a whole model chunk can be cut between layers",
        options=Words(
            "--impl {impl} with layers_per_graph {layers_per_graph}", "use --impl chunk, or layers_per_graph all"
        ),
        fields=Words(lambda run: f"{_field(run)} with graphs.impl {run.impl}", _NULL),
    ),
    Limit(
        name="`graphs.layers_per_graph` with offloading",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and run.offload_modules is not None,
        reason="copies to the host begin in one graph and end in another one",
        options=Words(
            "--offload with layers_per_graph {layers_per_graph}", "leave --offload out, or use layers_per_graph all"
        ),
        fields=Words(lambda run: f"{_field(run)} with graphs.offload", f"{_NULL}, or graphs.offload to null"),
    ),
    Limit(
        name="`graphs.layers_per_graph` under dynamic context parallelism",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and run.dynamic_cp,
        reason="graphs of several context-parallel sizes were not run in groups of layers",
        options=Words("--packer {packer} with layers_per_graph {layers_per_graph}", "use layers_per_graph all"),
        fields=Words(_field, _NULL),
    ),
)


def _granularity(run: Run) -> str | None:
    granularity: str | None = run.recompute or run.field("recompute_granularity")
    return granularity


def _recomputes(run: Run) -> bool:
    return bool(_granularity(run))


def _chunks(run: Run) -> bool:
    return run.captures and run.impl not in ("local", "transformer_engine")


RECOMPUTE_LIMITS: tuple[Limit, ...] = (
    must_be_off(
        "recompute_granularity",
        None,
        "Megatron recomputes nothing in its own layer graphs",
        applies=lambda run: run.impl == "local",
        graphs="`local`",
        remedy=_USE_CHUNK,
        is_on=_recomputes,
        options=Words("--impl local with recompute_granularity {recompute}", "use --impl chunk"),
    ),
    must_be_off(
        "distribute_saved_activations",
        False,
        "it puts other memory in the place of a graph's input",
        applies=lambda run: run.captures and _recomputes(run),
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
        holds=lambda run: _chunks(run) and run.offload_modules is not None and _recomputes(run),
        reason="a recomputed tensor has no memory that could be moved",
        fields=Words(
            "recompute_granularity is {recompute_granularity!r} with graphs.offload",
            "set graphs.offload to null, or recompute_granularity to None",
        ),
    ),
    Limit(
        name="recompute under dynamic context parallelism",
        holds=lambda run: _chunks(run) and run.dynamic_cp and _recomputes(run),
        reason="a backward would recompute with the process groups of another context-parallel size",
        options=Words("--packer {packer} with recompute_granularity {recompute}", "use recompute_granularity none"),
        fields=Words("recompute_granularity is {recompute_granularity!r} with {packer}", "set it to None"),
    ),
)
"""Recomputed activations."""

RECOMPUTE_CASES = frozenset(limit.name for limit in RECOMPUTE_LIMITS if limit.off is None)
"""Names of the limits that recompute meets together with something else."""
