"""Megatron's own switches for graphs, and what graphs of single layers (`local`, `transformer_engine`) ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.refusals.facts import Facts


def refused_impl(config: Any, impl: str) -> Iterator[str]:
    """A line where the model was built for graphs of another kind than `impl`, which is not "none".

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        impl: the kind of graphs of the plan.
    """
    wanted = "none" if impl == "chunk" else impl
    if impl == "transformer_engine" and config.cuda_graph_impl == "none":
        return  # layers are captured as they are, and told of a split while they run
    if config.cuda_graph_impl != wanted and impl != "module":
        yield f"cuda_graph_impl is {config.cuda_graph_impl!r}, graphs.impl {impl} needs {wanted!r}"


def refused_operations(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """A line where a spec of one's own has fused operations in layers that graphs hold whole.

    Args:
        config: as `refused_impl` takes it.
        plan: the plan that training is to follow.
        facts: what else is known of the run.
    """
    known = getattr(config, "use_transformer_engine_op_fuser", False)  # which the table of limits refuses
    if plan.graphs.impl in ("chunk", "local") and facts.fused_operations and not known:
        yield (
            f"{facts.fused_operations[0]} runs by Transformer Engine's fused operations, which keep the parameters of "
            "a capture and train no others: build the layers without them, or set graphs.impl to transformer_engine"
        )


def refused_by_local(config: Any, plan: Plan, facts: Facts) -> Iterator[str]:
    """A line for every setting with which Megatron's own layer graphs cannot leave some micro-batches to run eagerly.

    Args:
        config: as `refused_impl` takes it.
        plan: the plan that training is to follow.
        facts: what else is known of the run.
    """
    if plan.graphs.impl != "local":
        return
    tensor_parallel_size = config.tensor_model_parallel_size
    expert_size = getattr(config, "expert_tensor_parallel_size", None) or tensor_parallel_size
    if expert_size > tensor_parallel_size:
        yield (
            f"expert_tensor_parallel_size is {expert_size}, tensor_model_parallel_size {tensor_parallel_size}: ranks "
            "that share experts may record other buckets; set graphs.impl to chunk"
        )
    if modules := _captured_modules(config):
        yield f"cuda_graph_modules is {modules}: only graphs of whole layers are led; set it to []"
    if getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None) == "block":
        yield "inference_cuda_graph_scope is 'block': layers have no graphs of their own then; set it to 'layer'"
    if not facts.wrapper:
        yield "the model is not wrapped: Megatron's graphs add to main_grad; wrap it in DistributedDataParallel"


def refused_by_transformer_engine(config: Any, plan: Plan) -> Iterator[str]:
    """A line for every setting that Transformer Engine's graphs of layers cannot serve, or for parts of layers in a
    plan for graphs of another kind.

    Args:
        config: as `refused_impl` takes it.
        plan: the plan that training is to follow.
    """
    planned = list(plan.graphs.modules)
    if plan.graphs.impl != "transformer_engine":
        if planned:
            yield (
                f"graphs.modules is {planned}: a part of a layer is captured by graphs.impl transformer_engine alone; "
                "set graphs.impl to it, or graphs.modules to []"
            )
        return
    modules = _captured_modules(config)
    if config.cuda_graph_impl == "transformer_engine" and sorted(modules) != sorted(planned):
        plan_captures = f"the plan's graphs.modules is {planned}" if planned else "the plan captures whole layers"
        yield f"cuda_graph_modules is {modules}: {plan_captures}; set it to {planned}"
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and plan.training.micro_batch_size > 1:
        yield (
            f"overlap_moe_expert_parallel_comm is True, and a micro-batch has {plan.training.micro_batch_size} "
            "samples: the nodes of its schedule give routers no samples behind a graph; set micro_batch_size to 1"
        )
    if getattr(config, "cuda_graph_retain_backward_graph", False):
        yield (
            "cuda_graph_retain_backward_graph is True: a slot's memory is given back after its backward; set it to "
            "False"
        )


def _captured_modules(config: Any) -> list[str]:
    """The names in the model's `cuda_graph_modules`."""
    return [getattr(module, "name", str(module)) for module in getattr(config, "cuda_graph_modules", None) or ()]
