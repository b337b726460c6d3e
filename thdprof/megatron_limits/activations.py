"""What graphs cannot serve of offloading, of groups of layers, and of recompute.

Two mechanisms move activations: thdprof's own, inside the graphs of `chunk` and of `transformer_engine`, and
megatron-core's `fine_grained_activation_offloading` around graphs of single layers, where the model was built with it.
Behind a router's graph (dropless experts) only the second one works.
"""

from __future__ import annotations

from typing import Any

from thdprof.megatron_limits.limit import Limit, Words, must_be_off
from thdprof.megatron_limits.run import Run
from thdprof.offload import CORE_MODULES, CORE_MODULES_WITH_EXPERTS


def _in_groups(run: Run) -> bool:
    return run.layers_per_graph is not None and run.captures


_NULL = "set graphs.layers_per_graph to null"


def _granularity(run: Run) -> Any:
    return run.recompute or run.field("recompute_granularity")


def _chunks(run: Run) -> bool:
    return run.captures and run.impl not in ("local", "transformer_engine")


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


LIMITS: tuple[Limit, ...] = (
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
    # --- groups of layers
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
    # --- recompute
    must_be_off(
        "recompute_granularity",
        None,
        "Megatron recomputes nothing in its own layer graphs",
        applies=lambda run: run.impl == "local",
        graphs="`local`",
        remedy="set graphs.impl to chunk",
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
"""In the order of messages."""
