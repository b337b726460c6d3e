"""Makes a graphed module as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from thdprof.offload.plan import Choice
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.stats import Prediction

if TYPE_CHECKING:
    from thdprof.plan import Plan


def offload_of(plan: Plan) -> Choice | None:
    """Which activations `plan` keeps in host memory; None where all stay on the device.

    Raises:
        ValueError: the plan delays copies, which graphs cannot do.
    """
    asked = plan.graphs.offload
    if asked is None:
        return None
    if asked.delayed_commit:
        raise ValueError(
            "graphs.offload.delayed_commit is true: copies inside graphs cannot be delayed; set it to false"
        )
    return Choice(modules=tuple(asked.modules), fraction=asked.fraction, min_bytes=asked.min_bytes)


def graphed(
    module: nn.Module,
    plan: Plan,
    *,
    pipeline_rank: int = 0,
    chunk: int = 0,
    generators: Sequence[torch.Generator] = (),
    token_dim: int = 0,
    reduced_by_hooks: bool = False,
) -> GraphedModule:
    """`module`, run through the graphs of `plan`.

    Args:
        module: a module that takes tensors and one PackedSequence.
        plan: a plan that `thdprof analyze` wrote.
        pipeline_rank: the pipeline rank whose number of slots is used.
        chunk: which of that rank's model chunks this module is.
        generators: CUDA generators, besides the default one, that the module draws from.
        token_dim: dimension of the first tensor that runs over tokens.
        reduced_by_hooks: whether hooks on the parameters' gradient accumulation must run after a replay, as those of a
            DistributedDataParallel around the module do.

    Raises:
        ValueError: the plan captures parts of Megatron's layers, or groups of them.
    """
    graphs = plan.graphs
    if graphs.modules:
        raise ValueError(
            f"graphs.modules is {list(graphs.modules)}: the plan captures parts of Megatron's layers, which only "
            "thdprof.runtime.megatron.install can do; set it to [] to capture this module whole"
        )
    if graphs.layers_per_graph is not None:
        raise ValueError(
            f"graphs.layers_per_graph is {graphs.layers_per_graph}: only thdprof.runtime.megatron.install captures a "
            "model's layers in groups; set it to null to capture this module whole"
        )
    graphed_module = GraphedModule(
        module,
        plan.captured,
        num_slots=graphs.slots[pipeline_rank][chunk],
        tail_policy=graphs.tail_policy,
        overflow=graphs.overflow,
        capture=graphs.capture,
        no_grad=graphs.no_grad,
        generators=generators,
        token_dim=token_dim,
        offload=offload_of(plan),
        verify_every=graphs.verify_every,
        reduced_by_hooks=reduced_by_hooks,
    )
    graphed_module.stats().prediction = Prediction.of(plan)
    return graphed_module
