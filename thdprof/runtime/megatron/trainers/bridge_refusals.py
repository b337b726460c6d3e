"""Settings of Megatron-Bridge that a plan cannot be followed with, by the names of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron.refusals import SettingsError

if TYPE_CHECKING:
    from thdprof.plan import Plan


def refusals(config: Any, plan: Plan, *, replay: bool = True) -> list[str]:
    """One line for every setting in the way, with the field to change; what `install` refuses itself is not among them.

    Args:
        config: Bridge's ConfigContainer.
        plan: the plan that training is to follow.
        replay: whether graphs are to be captured.
    """
    return [*_always(config, plan), *(_of_graphs(config) if replay and plan.captured else ())]


def joined(lines: Sequence[str], error: SettingsError | None) -> SettingsError:
    """All reasons in one error.

    Args:
        lines: the reasons that `refusals` found.
        error: what `install` raised; None if it raised nothing.
    """
    heading = (
        "thdprof cannot follow the plan in this run of Megatron-Bridge (a name without a dot is a field of model):"
    )
    own = [] if error is None else [line for line in str(error).splitlines() if line.startswith("- ")]
    if error is not None and not own:
        own = [f"- {error}"]
    return SettingsError("\n".join([heading, *(f"- {line}" for line in lines), *own]))


def _always(config: Any, plan: Plan) -> Iterator[str]:
    if plan.graphs.impl == "local":
        yield (
            "graphs.impl is local, whose graphs Megatron-Bridge would capture itself: analyse with --impl chunk or "
            "transformer_engine"
        )
    if plan.graphs.impl == "transformer_engine" and getattr(config.model, "cuda_graph_impl", "none") != "none":
        yield (
            f"cuda_graph_impl is {config.model.cuda_graph_impl!r}: Megatron-Bridge would capture the layers itself; "
            "set it to 'none'"
        )
    restart = getattr(config, "inprocess_restart", None)
    if restart is not None and restart.enabled:
        yield "inprocess_restart.enabled is True: a restart in the same process leaves no way to free graphs; set False"
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(config.dist, name, False):
            yield f"dist.{name} is True: parameters move in memory; set it to False, for DistributedDataParallel"
    if getattr(config.dist, "use_decentralized_pg", False):
        yield (
            "dist.use_decentralized_pg is True: thdprof asks megatron-core's parallel_state for the groups; set it to "
            "False"
        )
    own_size = getattr(config.model, "context_parallel_size", 1)
    if getattr(config.dist, "eval_context_parallel_size", None) not in (None, own_size):
        yield (
            f"dist.eval_context_parallel_size is {config.dist.eval_context_parallel_size}: evaluation would rebind the "
            f"groups of captured layers; set it to None or {own_size}"
        )


def _of_graphs(config: Any) -> Iterator[str]:
    if not config.rng.te_rng_tracker:
        yield "rng.te_rng_tracker is False: random states must be such that graphs can hold them; set it to True"
    inspection = getattr(config, "tensor_inspect", None)
    if inspection is not None and inspection.enabled:
        yield "tensor_inspect.enabled is True: a replay runs none of its inspections; set it to False"
    if getattr(config.optimizer, "optimizer_cuda_graph", False):
        yield "optimizer.optimizer_cuda_graph is True: it was not checked beside other graphs; set it to False"
    if getattr(config.model, "moe_expert_rank_capacity_factor", None) is not None:
        yield (
            "model.moe_expert_rank_capacity_factor is set: Bridge reruns steps whose experts overflow without graphs; "
            "set it to None"
        )
