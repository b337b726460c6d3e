"""Offloading in graphs of single layers. Every copy ends in the graph in which it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.offload.plan import Choice, OffloadPlan, freed_in_turn, plan_in_turn
from thdprof.runtime.offload import CudaMover, Discovery, HostBuffers, Mover, PlannedMoves, report


class AtLayerInput(torch.autograd.Function):
    """Runs at a layer's input and calls a function in its backward.

    It comes first in the layer, so that its backward comes last, when no copy of the layer may be under way any more.
    """

    @staticmethod
    def forward(ctx: Any, at_end: Callable[[], None], hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states; `at_end` takes no argument and is called in the backward."""
        ctx.at_end = at_end
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Their gradient."""
        ctx.at_end()
        return None, grad


class LayerMoves(Protocol):
    """Moves the tensors that the layers of one slot save in their graphs. Buckets are rehearsed and captured one by
    one.
    """

    def capturing(self) -> AbstractContextManager[None]:
        """A context around a bucket's rehearsal, warm-up and captures."""

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see which tensors it saves; returns the layer's output.

        Args:
            number: the layer's position among the captured ones.
            layer: the layer.
            hidden: its hidden states.
            run: runs the layer on hidden states.
        """

    def settle(self) -> None:
        """Decide what is moved, after all layers were rehearsed."""

    def begin(self) -> None:
        """Begin the captures, after the warm-up."""

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """The function that runs layer `number` in a warm-up or a capture.

        It takes the hidden states and a function that runs the layer on them.
        """

    def freed_bytes(self) -> int:
        """Bytes by which offloading should reduce the slot's graph memory."""

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""


class Offloading(Protocol):
    """Moves activations of one decoder to the host."""

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """The moves of the `layers` of a new slot."""

    def eagerly(self) -> AbstractContextManager[None]:
        """A context around the forward of an eager micro-batch."""

    def replaying(self) -> AbstractContextManager[None]:
        """A context around a replayed forward, and the parts of it that run eagerly."""

    def host_bytes(self) -> int:
        """Bytes of pinned host memory besides the slots'."""

    def close(self) -> None:
        """Clean up, after all graphs were freed."""


class SavedTensors:
    """Offloading by saved tensors, in graphs only: eager micro-batches keep their activations on the device."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """The moves of the `layers` of a new slot; all slots copy on the same two streams."""
        self._streams = self._streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return LayerOffload.on_cuda(self._choice, len(layers), self._streams)

    def eagerly(self) -> AbstractContextManager[None]:
        """An empty context."""
        return nullcontext()

    def replaying(self) -> AbstractContextManager[None]:
        """An empty context."""
        return nullcontext()

    def host_bytes(self) -> int:
        """Always 0: all pinned memory is the slots'."""
        return 0

    def close(self) -> None:
        """Does nothing."""


class LayerOffload:
    """The moves of the layers of one slot: chosen in a rehearsal, followed in the captures.

    Buckets are rehearsed and captured one by one, and share the host memory, which this object owns.
    """

    def __init__(self, choice: Choice, num_layers: int, mover: Callable[[], Mover]) -> None:
        """Moves that are not chosen yet.

        Args:
            choice: which storages may be moved.
            num_layers: number of captured layers.
            mover: returns a mover that computes on the current stream.
        """
        self._choice, self._mover = choice, mover
        self._buffers = [
            HostBuffers() for _ in range(num_layers)
        ]  # one a layer: all layers' activations are there together
        self._found: list[OffloadPlan | None] = [None] * num_layers
        self._plans: list[OffloadPlan] = []
        self._hosts: list[list[torch.Tensor]] = []
        self._freed_bytes = 0

    @classmethod
    def on_cuda(cls, choice: Choice, num_layers: int, streams: Sequence[torch.cuda.Stream]) -> LayerOffload:
        """Moves that copy on two side streams: to the host, and back."""
        outwards, inwards = streams
        return cls(choice, num_layers, lambda: CudaMover(torch.cuda.current_stream(outwards.device), outwards, inwards))

    def capturing(self) -> AbstractContextManager[None]:
        """An empty context."""
        return nullcontext()

    def begin(self) -> None:
        """Does nothing: the warm-up moves the same storages as the captures."""

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see which tensors it saves; returns the layer's output."""
        layer_input = (
            hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        )  # its capture takes a gradient, too
        discovery = Discovery(layer, self._mover(), self._choice.whole(), [layer_input])
        with discovery.forward():
            output = run(layer_input)
        self._found[number] = discovery.plan
        return output

    def settle(self) -> None:
        """Decide what is moved, after all layers were rehearsed, and pin the memory for it."""
        plans = [plan for plan in self._found if plan is not None]
        assert len(plans) == len(self._found)
        mover = self._mover()
        self._plans = plan_in_turn(plans, self._choice)
        if not any(plan.offloaded_bytes for plan in self._plans):
            report(self._plans[0], self._choice)
        self._freed_bytes = max(self._freed_bytes, freed_in_turn(self._plans))
        self._hosts = [b.reserve(mover, p.slabs) for b, p in zip(self._buffers, self._plans, strict=True)]

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """The function that runs layer `number` in a warm-up or a capture, on the current stream.

        It takes the hidden states and a function that runs the layer on them. It raises OffloadError if the layer saves
        other tensors than in its rehearsal.
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
        """Bytes by which offloading should reduce the slot's graph memory."""
        return self._freed_bytes

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(buffers.nbytes() for buffers in self._buffers)
