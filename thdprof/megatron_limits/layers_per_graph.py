"""What model chunks cannot do that are captured in groups of layers (`graphs.layers_per_graph`)."""

from __future__ import annotations

from thdprof.megatron_limits.limit import Limit, Run, Words


def _in_groups(run: Run) -> bool:
    return run.layers_per_graph is not None and run.impl not in (None, "none")


def _option(run: Run) -> str:
    return f"layers_per_graph {run.layers_per_graph}"


def _field(run: Run) -> str:
    return f"graphs.layers_per_graph is {run.layers_per_graph}"


_NULL = "set graphs.layers_per_graph to null"

LAYERS_PER_GRAPH_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="`graphs.layers_per_graph` with graphs of another kind than `chunk`",
        holds=lambda run: _in_groups(run) and run.impl != "chunk",
        reason="only the graphs of a whole model chunk can be cut between layers",
        options=Words(
            case=lambda run: f"--impl {run.impl} with {_option(run)}",
            remedy="use --impl chunk, or layers_per_graph all",
        ),
        fields=Words(case=lambda run: f"{_field(run)} with graphs.impl {run.impl}", remedy=_NULL),
    ),
    Limit(
        name="`graphs.layers_per_graph` with offloading",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and run.offload_modules is not None,
        reason="copies to the host begin in one graph and end in another one",
        options=Words(
            case=lambda run: f"--offload with {_option(run)}",
            remedy="leave --offload out, or use layers_per_graph all",
        ),
        fields=Words(
            case=lambda run: f"{_field(run)} with graphs.offload", remedy=f"{_NULL}, or graphs.offload to null"
        ),
    ),
    Limit(
        name="`graphs.layers_per_graph` under dynamic context parallelism",
        holds=lambda run: _in_groups(run) and run.impl == "chunk" and bool(run.dynamic_cp),
        reason="graphs of several context-parallel sizes were not run in groups of layers",
        options=Words(case=lambda run: f"--packer {run.packer} with {_option(run)}", remedy="use layers_per_graph all"),
        fields=Words(case=_field, remedy=_NULL),
    ),
)
