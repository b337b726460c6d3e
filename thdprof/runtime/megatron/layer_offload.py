"""The tensors that graphs of single layers keep in host memory between forward and backward.

Two mechanisms move activations to the host: megatron-core's own `fine_grained_activation_offloading`, where the model
was built with it, in graphs of single layers (`core_offload`); and `thdprof.runtime.offload`, which moves
any saved tensor, inside the graphs of `chunk` and of `transformer_engine`.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.offload.allocator import Gradients, Segments
from thdprof.offload.plan import Choice, OffloadPlan, freed_in_turn, plan_in_turn
from thdprof.runtime.offload import Discovery, HostBuffers, Mover, PlannedMoves, report

Stays = frozenset[tuple[str, int]]
"""Groups that stay on the device: their name, and how many groups of that name came before in the pass."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one layer that megatron-core moves together."""

    name: str
    """The name of the part of the layer that saves them."""
    copies: tuple[int, ...] | None
    """Bytes of each tensor that would be moved; None: not known beforehand."""
    frees: tuple[int, ...] = ()
    """Bytes of each storage that moving the group frees."""


def choose_staying(groups: Sequence[Group], fraction: float) -> Stays:
    """The groups of one pass, given in order, that stay on the device where the share `fraction` of them is moved.

    megatron-core 0.19 decides so (`PipelineOffloadManager.post_warmup_callback`): the last group of each name stays,
    because its backward would have to wait for it; and of the other groups that hold any tensor, the last int(count *
    (1 - fraction)) stay.
    """
    numbered = number_groups(groups)
    last = set({name: (name, count) for _, (name, count) in numbered}.values())
    eligible = [at for group, at in numbered if at not in last and group.copies != ()]
    kept = int(len(eligible) * (1 - fraction))
    return frozenset(last | set(eligible[len(eligible) - kept :]))


def freed_bytes(layers: Sequence[Sequence[Group]], stays: Stays) -> int:
    """Bytes by which offloading all groups of each layer but those in `stays` reduces the memory that graphs reserve.

    The tensors that a layer moves stay on the device until its graph ends. Those that come back, one group ahead, take
    memory besides all else, because megatron-core allocates it on the stream that copies.
    """
    numbered = iter(number_groups([group for layer in layers for group in layer]))
    passes = [[(group, at in stays) for group, at in itertools.islice(numbered, len(layer))] for layer in layers]
    everything = [[(group, True) for group in layer] for layer in layers]
    return max(0, _reserved(everything) - _reserved(passes))


def number_groups(groups: Sequence[Group]) -> list[tuple[Group, tuple[str, int]]]:
    """The groups of one pass, each with its name and how many groups of that name came before."""
    seen: Counter[str] = Counter()
    numbered = []
    for group in groups:
        numbered.append((group, (group.name, seen[group.name])))
        seen[group.name] += 1
    return numbered


def _reserved(layers: Sequence[Sequence[tuple[Group, bool]]]) -> int:
    """Bytes reserved for groups, each with whether it stays, and for gradients during the backward."""
    here, back = Segments(), Segments()
    for number, layer in enumerate(layers):
        names = [((number, i, j), nbytes) for i, (g, _) in enumerate(layer) for j, nbytes in enumerate(g.frees)]
        for name, nbytes in names:
            here.take(name, nbytes)
        for name, _ in names:
            if not layer[name[1]][1]:
                here.give_back(name)
    order = [(number, i) for number, layer in enumerate(layers) for i in range(len(layer))][::-1]
    waiting = deque((number, i) for number, i in order if not layers[number][i][1])
    gradients = Gradients(here)
    there: set[tuple[int, int]] = set()

    def reload() -> None:
        number, i = waiting.popleft()
        there.add((number, i))
        for j, nbytes in enumerate(layers[number][i][0].copies or ()):
            back.take((number, i, j), nbytes)

    for place, (number, i) in enumerate(order):
        group, stays = layers[number][i]
        if not stays and (number, i) not in there:
            reload()
        for nbytes in group.frees:
            gradients.take(nbytes)
        for j in range(len(group.frees if stays else group.copies or ())):
            (here if stays else back).give_back((number, i, j))
        if waiting and waiting[0] in order[place + 1 : place + 2]:
            reload()
    return here.reserved_bytes + back.reserved_bytes


def uses_core(config: Any) -> bool:
    """Whether megatron-core's own offloading is what moves activations."""
    return bool(getattr(config, "fine_grained_activation_offloading", False))


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


Moves = Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]
"""The type of a function that takes hidden states and a function that runs a layer on them; it runs the layer, and
moves the tensors that the layer saves to the host.
"""


class LayerMoves(Protocol):
    """Moves the tensors that the layers of one slot save in their graphs, bucket by bucket."""

    freed_bytes: int
    """Bytes by which offloading should reduce the slot's graph memory."""

    def capturing(self) -> AbstractContextManager[None]:
        """A context around a bucket's rehearsal, warm-up and captures; an empty one if not overridden."""
        return nullcontext()

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run `layer`, the captured one of that number, eagerly to see which tensors it saves; returns its output.

        `run` runs it on the hidden states, which take a gradient, as in a capture.
        """

    def settle(self) -> None:
        """Decide what is moved, after all layers were rehearsed, and pin the memory for it."""

    def begin(self) -> None:
        """Begin the captures, after the warm-up, which moves the same storages."""
        return

    def layer(self, number: int) -> Moves:
        """The function that runs layer `number` in a warm-up or a capture."""

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""


class Offloading(Protocol):
    """Moves activations of one decoder to the host."""

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """The moves of the `layers` of a new slot."""

    def eagerly(self) -> AbstractContextManager[None]:
        """A context around the forward of an eager micro-batch; an empty one if not overridden."""
        return nullcontext()

    def replaying(self) -> AbstractContextManager[None]:
        """A context around a replayed forward, and the parts of it that run eagerly."""
        return nullcontext()

    def host_bytes(self) -> int:
        """Bytes of pinned host memory besides the slots'."""
        return 0

    def close(self) -> None:
        """Clean up, after all graphs were freed."""
        return


class SavedTensors(Offloading):
    """Offloading by saved tensors, in graphs only: eager micro-batches keep their activations on the device."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> LayerMoves:
        """The moves of the `layers` of a new slot; all slots copy on the same two streams: to the host, and back."""
        outwards, inwards = self._streams = self._streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return LayerOffload(
            self._choice, len(layers), lambda: Mover(torch.cuda.current_stream(device), outwards, inwards)
        )


class LayerOffload(LayerMoves):
    """The moves of the layers of one slot: chosen in a rehearsal, followed in the captures.

    Buckets share the host memory, which this object owns.
    """

    def __init__(self, choice: Choice, num_layers: int, mover: Callable[[], Mover]) -> None:
        self._choice, self._mover = choice, mover
        # one a layer: all layers' activations are there together
        self._buffers = [HostBuffers() for _ in range(num_layers)]
        self._found: list[OffloadPlan | None] = [None] * num_layers
        self._plans: list[OffloadPlan] = []
        self._hosts: list[list[torch.Tensor]] = []
        self.freed_bytes = 0

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """As `LayerMoves.rehearse`."""
        discovery = Discovery(layer, self._mover(), self._choice.whole(), [hidden])
        with discovery.forward():
            output = run(hidden)
        self._found[number] = discovery.plan
        return output

    def settle(self) -> None:
        """As `LayerMoves.settle`."""
        plans = [plan for plan in self._found if plan is not None]
        assert len(plans) == len(self._found)
        mover = self._mover()
        self._plans = plan_in_turn(plans, self._choice)
        if not any(plan.offloaded_bytes for plan in self._plans):
            report(self._plans[0], self._choice)
        self.freed_bytes = max(self.freed_bytes, freed_in_turn(self._plans))
        self._hosts = [b.reserve(mover, p.slabs) for b, p in zip(self._buffers, self._plans, strict=True)]

    def layer(self, number: int) -> Moves:
        """As `LayerMoves.layer`, on the current stream. The function raises OffloadError if the layer saves other
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

    def host_bytes(self) -> int:
        """As `LayerMoves.host_bytes`."""
        return sum(buffers.nbytes() for buffers in self._buffers)
