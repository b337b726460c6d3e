"""`graphs.impl: chunk`: every model chunk's decoder is one graph pair a bucket and slot, replayed from the bank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.bank import Surroundings
from thdprof.runtime.graphs.graphed_module import GraphedModule

_DDP = "megatron.core.distributed.distributed_data_parallel"


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank; Megatron's parameter gathering and gradient reduction go on around it."""

    def _open(self, call: Call) -> None:
        self._generators = generators()
        gather_parameters(self.module)
        super()._open(call)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        gather_parameters(self.module)
        return super()._replay(bucket, call)

    def close(self) -> None:
        """Free all graphs; the module runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        for parameter in self.module.parameters():
            vars(parameter).pop("_cudagraph_wgrad_ready_event", None)


def generators() -> tuple[torch.Generator, ...]:
    """The states of Megatron's RNG tracker; loading a checkpoint replaces them."""
    from megatron.core.tensor_parallel.random import get_all_rng_states

    return tuple(get_all_rng_states().values())


def prepare_experts(config: Any, device: torch.device) -> None:
    """Give the scale of experts' auxiliary losses its memory before a capture bakes it in; schedules write into it.

    Without this a first backward would make it a number without dimensions, into which Megatron cannot copy its own.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if getattr(config, "num_moe_experts", None) and MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))


def surroundings(block: nn.Module, *, communicates: bool = False) -> Surroundings:
    """What a decoder touches outside itself: losses of experts, and the event that gradient reduction waits for."""
    ready = torch.cuda.Event()
    parameters = [p for p in block.parameters() if p.requires_grad]

    def on_backward() -> None:
        ready.record()
        for parameter in parameters:
            parameter._cudagraph_wgrad_ready_event = ready  # type: ignore[attr-defined]

    return Surroundings(
        extra_state=_expert_metrics,
        while_capturing=capturing,
        on_backward=on_backward,
        communicates=communicates,
    )


def gather_parameters(module: nn.Module) -> None:
    """Run the hooks with which Megatron's DistributedDataParallel waits for gathered parameters: a replay runs none."""
    for part in module.modules():
        for hook in tuple(part._forward_pre_hooks.values()):
            hook(part, ())


def foreign_hooks(block: nn.Module) -> tuple[str, ...]:
    """Submodules with hooks that a replay would leave out."""
    found = []
    for name, part in block.named_modules():
        ours = all(_is_ddp(hook) for hook in part._forward_pre_hooks.values())
        if not ours or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks:
            found.append(name or type(block).__name__)
    return tuple(found)


def _is_ddp(hook: Any) -> bool:
    module = inspect.getmodule(hook)
    return module is not None and module.__name__ == _DDP


def _expert_metrics() -> Sequence[torch.Tensor]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


@contextmanager
def capturing() -> Iterator[None]:
    """Let megatron-core take what runs for the capture of a graph."""
    from megatron.core.transformer import cuda_graphs

    already = cuda_graphs.is_graph_capturing()
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        if not already:
            cuda_graphs._set_capture_end()
