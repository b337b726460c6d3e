"""The table of limits as analysis reads it: a run that `install` would always refuse is refused before data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.megatron_limits.limit import Run
from thdprof.megatron_limits.offloading import moved_by_core
from thdprof.megatron_limits.recompute import RECOMPUTE_LIMITS
from thdprof.megatron_limits.table import limits_of
from thdprof.training import DYNAMIC_CP, Experts, Recompute

if TYPE_CHECKING:
    from thdprof.plan import Impl, Plan


def check_run(run: Run) -> None:
    """Refuse a run that meets a limit which an analysis can know.

    Raises:
        UsageError: the message of the first such limit: the option, its value, the reason and what to use instead.
    """
    for limit in limits_of(run):
        if limit.options is not None:
            raise UsageError(limit.in_options(run))


def check_settings(given: Mapping[str, Any], impl: Impl) -> None:
    """Refuse training settings that Megatron's graphs of kind `impl` cannot serve, whatever the data.

    Args:
        given: training settings by name; names may be missing.
        impl: the kind of graphs; "none" and "module" are not Megatron's and refuse nothing.

    Raises:
        UsageError: as `check_run`.
    """
    if impl in ("none", "module"):
        return
    packer = given.get("packer")
    check_run(
        Run(
            impl=impl,
            pipeline_parallel_size=given.get("pipeline_parallel_size"),
            dynamic_cp=packer in DYNAMIC_CP,
            packer=packer,
            experts=given.get("experts"),
        )
    )


def check_captured(experts: Experts, impl: Impl, modules: Sequence[str]) -> None:
    """Refuse graphs of kind `impl` over `modules` of each layer (empty: all of it) where the model's experts forbid it.

    Raises:
        UsageError: as `check_run`.
    """
    if impl != "none":
        check_run(Run(impl=impl, experts=experts, modules=tuple(modules)))


def check_offload(modules: Sequence[str], *, impl: Impl, experts: Experts) -> None:
    """Refuse to move activations of `modules` to the host where graphs of kind `impl` would not move them.

    Raises:
        UsageError: as `check_run`.
    """
    if impl == "module":
        return
    check_run(
        Run(impl=impl, experts=experts, offload_modules=tuple(modules), core_offload=moved_by_core(impl, experts))
    )


def check_layers_per_graph(
    layers_per_graph: int | None, *, impl: Impl, packer: str | None = None, offloads: bool = False
) -> None:
    """Refuse groups of layers that graphs of kind `impl` could not capture.

    Args:
        layers_per_graph: layers of one graph; None: all of a model chunk.
        impl: the kind of graphs.
        packer: the packer that training uses; None: not known yet.
        offloads: whether activations are moved to the host.

    Raises:
        UsageError: as `check_run`.
    """
    check_run(
        Run(
            impl=impl,
            layers_per_graph=layers_per_graph,
            packer=packer,
            dynamic_cp=packer in DYNAMIC_CP,
            offload_modules=("all",) if offloads and layers_per_graph is not None and impl == "chunk" else None,
        )
    )


def check_recompute(
    recompute: Recompute | None,
    *,
    impl: Impl,
    packer: str | None = None,
    layers_per_graph: int | None = None,
) -> None:
    """Refuse graphs of kind `impl` that cannot recompute what the model does.

    Args:
        recompute: how much a backward computes again; None: nothing.
        impl: the kind of graphs; "none" and "module" are not Megatron's and refuse nothing.
        packer: the packer that training uses; None: not known.
        layers_per_graph: layers of one graph; None: all of a model chunk.

    Raises:
        UsageError: as `check_run`.
    """
    if recompute is None or impl in ("none", "module"):
        return
    run = Run(
        impl=impl,
        recompute=recompute,
        packer=packer,
        dynamic_cp=packer in DYNAMIC_CP,
        layers_per_graph=layers_per_graph,
    )
    for limit in RECOMPUTE_LIMITS:
        if limit.holds(run) and limit.options is not None:
            raise UsageError(limit.in_options(run))


def check_plan(plan: Plan) -> None:
    """Refuse graphs of several context-parallel sizes that could not be captured.

    Raises:
        UsageError: as `check_run`.
    """
    if plan.graphs.impl in ("none", "module"):
        return
    training = plan.training
    check_run(
        Run(
            impl=plan.graphs.impl,
            context_parallel_size=training.context_parallel_size,
            dynamic_cp=training.max_seqlen_per_dp_cp_rank is not None,
            packer=training.packer,
            max_seqlen_per_dp_cp_rank=training.max_seqlen_per_dp_cp_rank,
            bucket_cp_sizes=tuple(bucket.cp_size for bucket in plan.graphs.buckets),
        )
    )
