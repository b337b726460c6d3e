"""What graphs cannot recompute. Graphs of whole model chunks recompute all that Megatron can, but for these cases."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off


def _granularity(run: Run) -> str | None:
    granularity: str | None = run.recompute or run.field("recompute_granularity")
    return granularity


def _recomputes(run: Run) -> bool:
    return bool(_granularity(run))


def _chunks(run: Run) -> bool:
    return run.impl not in (None, "none", "local", "transformer_engine")


def _of_impl(impl: str, run: Run) -> bool:
    return run.impl == impl


def _option(run: Run) -> str:
    return f"recompute_granularity {run.recompute}"


_USE_CHUNK = "set graphs.impl to chunk"

RECOMPUTE_LIMITS: tuple[Limit, ...] = (
    must_be_off(
        "recompute_granularity",
        None,
        "Megatron recomputes nothing in its own layer graphs",
        applies=partial(_of_impl, "local"),
        graphs="`local`",
        remedy=_USE_CHUNK,
        is_on=_recomputes,
        options=Words(case=lambda run: f"--impl local with {_option(run)}", remedy="use --impl chunk"),
    ),
    must_be_off(
        "distribute_saved_activations",
        False,
        "it puts other memory in the place of a graph's input",
        applies=lambda run: run.impl not in (None, "none") and _recomputes(run),
    ),
    Limit(
        name="full recompute with `graphs.layers_per_graph`",
        holds=lambda run: _chunks(run) and run.layers_per_graph is not None and _granularity(run) == "full",
        reason="layers run inside recomputed functions, between which no pass can be cut",
        options=Words(
            case=lambda run: f"--impl {run.impl} with layers_per_graph {run.layers_per_graph} and {_option(run)}",
            remedy="use layers_per_graph all, or recompute_granularity selective",
        ),
        fields=Words(
            case=lambda run: f"recompute_granularity is 'full' with graphs.layers_per_graph {run.layers_per_graph}",
            remedy="set graphs.layers_per_graph to null, or recompute_granularity to selective",
        ),
    ),
    Limit(
        name="recompute with offloading",
        holds=lambda run: _chunks(run) and run.offload_modules is not None and _recomputes(run),
        reason="a recomputed tensor has no memory that could be moved",
        fields=Words(
            case=lambda run: f"recompute_granularity is {run.field('recompute_granularity')!r} with graphs.offload",
            remedy="set graphs.offload to null, or recompute_granularity to None",
        ),
    ),
    Limit(
        name="recompute under dynamic context parallelism",
        holds=lambda run: _chunks(run) and bool(run.dynamic_cp) and _recomputes(run),
        reason="a backward would recompute with the process groups of another context-parallel size",
        options=Words(
            case=lambda run: f"--packer {run.packer} with {_option(run)}", remedy="use recompute_granularity none"
        ),
        fields=Words(
            case=lambda run: f"recompute_granularity is {run.field('recompute_granularity')!r} with {run.packer}",
            remedy="set it to None",
        ),
    ),
)
"""Recomputed activations."""

RECOMPUTE_CASES = frozenset(limit.name for limit in RECOMPUTE_LIMITS if limit.off is None)
"""Names of the limits that recompute meets together with something else."""
