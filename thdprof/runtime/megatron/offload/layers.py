"""Activations on the host in graphs of single layers: saved tensors, whose copies end in the graph they began in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.offload.plan import Choice, OffloadPlan, freed_in_turn, plan_in_turn
from thdprof.runtime.offload.copies import CudaMover, HostBuffers, Mover
from thdprof.runtime.offload.discovery import Discovery, report
from thdprof.runtime.offload.planned_moves import PlannedMoves


class AtLayerInput(torch.autograd.Function):
    """At a layer's input: made first, its backward runs last, when nothing of the layer may be under way any more.

    It then calls what it is given.
    """

    @staticmethod
    def forward(ctx: Any, at_end: Callable[[], None], hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states."""
        ctx.at_end = at_end
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Their gradient."""
        ctx.at_end()
        return None, grad


class LayerMoves(Protocol):
    """What the layers of one slot move in their graphs. One bucket after the other is rehearsed and captured."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around a bucket's rehearsal, warm-up and captures."""

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see what it saves; `run` takes the hidden states and gives its output."""

    def settle(self) -> None:
        """After all layers were rehearsed: decide what is moved."""

    def begin(self) -> None:
        """After the warm-up: what runs from now on is captured."""

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """What runs layer `number` in a warm-up or a capture; it takes the hidden states and what runs the layer."""

    def freed_bytes(self) -> int:
        """By how much the slot's graph memory should be less than without offloading."""

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""


class Offloading(Protocol):
    """What moves activations of one decoder to the host."""

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """What the `layers` of a new slot move."""

    def eagerly(self) -> AbstractContextManager[None]:
        """Around the forward of an eager micro-batch."""

    def replaying(self) -> AbstractContextManager[None]:
        """Around a replayed forward, and what runs eagerly in it."""

    def host_bytes(self) -> int:
        """Bytes of pinned host memory besides the slots'."""

    def close(self) -> None:
        """No graph is left."""


class SavedTensors:
    """Moves saved tensors in graphs; eager micro-batches keep theirs."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """What the `layers` of a new slot move."""
        self._streams = self._streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return LayerOffload.on_cuda(self._choice, len(layers), self._streams)

    def eagerly(self) -> AbstractContextManager[None]:
        """Around the forward of an eager micro-batch."""
        return nullcontext()

    def replaying(self) -> AbstractContextManager[None]:
        """Around a replayed forward."""
        return nullcontext()

    def host_bytes(self) -> int:
        """None besides the slots'."""
        return 0

    def close(self) -> None:
        """Nothing is left to do."""


class LayerOffload:
    """What the layers of one slot move: found out when they are rehearsed, followed in their captures.

    One bucket after the other is rehearsed and captured; all share the host memory.
    """

    def __init__(self, choice: Choice, num_layers: int, mover: Callable[[], Mover]) -> None:
        """Nothing yet.

        Args:
            choice: what is to be moved.
            num_layers: layers that are captured.
            mover: one that computes on the current stream.
        """
        self._choice, self._mover = choice, mover
        self._buffers = [HostBuffers() for _ in range(num_layers)]  # all layers' activations are there at a time
        self._found: list[OffloadPlan | None] = [None] * num_layers
        self._plans: list[OffloadPlan] = []
        self._hosts: list[list[torch.Tensor]] = []
        self._freed_bytes = 0

    @classmethod
    def on_cuda(cls, choice: Choice, num_layers: int, streams: Sequence[torch.cuda.Stream]) -> LayerOffload:
        """Copies on two side streams, outwards and inwards."""
        outwards, inwards = streams
        return cls(choice, num_layers, lambda: CudaMover(torch.cuda.current_stream(outwards.device), outwards, inwards))

    def capturing(self) -> AbstractContextManager[None]:
        """Around a bucket's rehearsal, warm-up and captures."""
        return nullcontext()

    def begin(self) -> None:
        """After the warm-up, which moves as captures do."""

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see what it saves; `run` takes the hidden states and gives its output."""
        layer_input = hidden if hidden.requires_grad else hidden.detach().requires_grad_()  # as in its capture
        discovery = Discovery(layer, self._mover(), self._choice.whole(), [layer_input])
        with discovery.forward():
            output = run(layer_input)
        self._found[number] = discovery.plan
        return output

    def settle(self) -> None:
        """After all layers were rehearsed: decide what is moved and pin the memory for it."""
        plans = [plan for plan in self._found if plan is not None]
        assert len(plans) == len(self._found)
        mover = self._mover()
        self._plans = plan_in_turn(plans, self._choice)
        if not any(plan.offloaded_bytes for plan in self._plans):
            report(self._plans[0], self._choice)
        self._freed_bytes = max(self._freed_bytes, freed_in_turn(self._plans))
        self._hosts = [b.reserve(mover, p.slabs) for b, p in zip(self._buffers, self._plans, strict=True)]

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """What runs layer `number` in a warm-up or a capture, on the current stream.

        It takes the hidden states and what runs the layer on them, and raises OffloadError where that saves other
        tensors than in its rehearsal.
        """
        plan, hosts = self._plans[number], self._hosts[number]

        def run(hidden: torch.Tensor, layer: Callable[[torch.Tensor], Any]) -> Any:
            session = PlannedMoves(plan, hosts, self._mover(), [hidden], strict=True)
            entered = AtLayerInput.apply(session.finish, hidden)
            moving: AbstractContextManager[None] = session.forward()
            with moving:
                return layer(entered)

        return run

    def freed_bytes(self) -> int:
        """By how much the slot's graph memory should be less than without offloading."""
        return self._freed_bytes

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(buffers.nbytes() for buffers in self._buffers)
