"""`graphs.impl: chunk`: every model chunk's decoder is one graph pair a bucket and slot, replayed from the bank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thdprof.runtime.bank import Surroundings
from thdprof.runtime.dispatch import Bucket
from thdprof.runtime.dispatched import Call
from thdprof.runtime.module import GraphedModule

_DDP = "megatron.core.distributed.distributed_data_parallel"


class ChunkGraphs(GraphedModule):
    """A decoder run through a bank; Megatron's parameter gathering and gradient reduction go on around it."""

    def _open(self, call: Call) -> None:
        gather_parameters(self.module)
        super()._open(call)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        gather_parameters(self.module)
        return super()._replay(bucket, call)


def surroundings(block: nn.Module) -> Surroundings:
    """What a decoder touches outside itself: losses of experts, and the event that gradient reduction waits for."""
    ready = torch.cuda.Event()
    parameters = [p for p in block.parameters() if p.requires_grad]

    def on_backward() -> None:
        ready.record()
        for parameter in parameters:
            parameter._cudagraph_wgrad_ready_event = ready  # type: ignore[attr-defined]

    return Surroundings(extra_state=_expert_metrics, while_capturing=_capturing, on_backward=on_backward)


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
def _capturing() -> Iterator[None]:
    from megatron.core.transformer import cuda_graphs

    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()
