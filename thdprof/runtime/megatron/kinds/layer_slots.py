"""Slots and leases of graphs of single layers: the captured modules, the static memory, and the replays of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.slots import ReplayOrder, SlotLease, SlotMemory
from thdprof.runtime.megatron.layer_offload import LayerMoves
from thdprof.runtime.megatron.quantized import is_quantized

Moves = Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]
"""The type of a function that runs a layer on its hidden states and moves the tensors that the layer saves to the
host.
"""


class LayerPass(nn.Module):
    """One layer as Transformer Engine captures it: it takes hidden states and returns its outputs; all else is static.

    The layer's parameters are arguments, too, and not parameters of this module: a replay then takes the model's
    parameters, although the capture ran over aliases of them.
    """

    def __init__(
        self,
        captured: Callable[..., Any],
        constants: dict[str, Any],
        moves: Moves | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """What `captured` runs of a layer, with `constants` over static tensors; `around` returns a context for every
        pass.
        """
        super().__init__()
        self._captured, self._constants, self._moves, self._around = captured, constants, moves, around

    def forward(self, hidden_states: torch.Tensor, *parameters: torch.Tensor) -> Any:
        """The outputs of the captured part of the layer."""
        return self._run(hidden_states) if self._moves is None else self._moves(hidden_states, self._run)

    def _run(self, hidden_states: torch.Tensor) -> Any:
        with self._around():
            return self._captured(hidden_states, **self._constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The arguments that one layer was called with."""

    hidden: torch.Tensor
    """Zeros of the shape, dtype and device of the layer's hidden states."""
    constants: dict[str, Any]
    """The layer's other arguments, over static tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReplays:
    """The graphs of one bucket in one slot. The slot owns the static memory that they share."""

    graphs: tuple[Callable[..., Any], ...]
    """One for each layer, in order. Each takes hidden states and the layer's parameters, and returns the graph's own
    outputs.
    """
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """For each layer, the model's parameters that it gives a gradient to."""
    fused: dict[int, tuple[nn.Parameter, torch.Tensor, int]]
    """The parameters whose gradient the graphs add to `main_grad`, by id: the parameter, its `main_grad`, and the
    address of that. Autograd gets a dummy for them.
    """

    def reset(self) -> None:
        """Free the graphs."""
        for graph in self.graphs:
            graph.reset()  # type: ignore[attr-defined]


class LayerSlot(SlotMemory):
    """A slot whose graphs hold single layers: static tensors, and the graphs of all layers for each bucket."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        *,
        with_padded: bool,
        with_seq_idx: bool,
        device: torch.device,
        outside: Sequence[bool] = (),
    ) -> None:
        """A slot without graphs, for micro-batches whose tensor arguments are like `tensors`; the first is the hidden
        states.

        `outside` says whether each of the others is read between layers alone; empty: none is.
        """
        super().__init__(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx, device=device)
        self._outside = tuple(outside) or (False,) * (len(tensors) - 1)
        self.others = [
            t.new_zeros(()).expand_as(t) if skipped else torch.zeros_like(t, memory_format=torch.contiguous_format)
            for t, skipped in zip(tensors[1:], self._outside, strict=True)
        ]
        """Static copies of the decoder's tensor arguments besides the hidden states; every layer may read them. Those
        that no layer reads are zeros without memory.
        """
        self.hidden: list[torch.Tensor] = []
        """The static input of every layer: shape [tokens of this rank, 1, hidden size]; empty before the first
        capture.
        """
        self.replays: dict[Bucket, LayerReplays] = {}
        """The graphs of every bucket that has been captured."""
        self.moves: LayerMoves | None = None
        """Moves the tensors that the layers save to the host; None: they stay on the device."""

    def inputs_like(self, recorded: Sequence[Recorded]) -> list[torch.Tensor]:
        """The static inputs of the layers, which all buckets share; made at the first capture."""
        if not self.hidden:
            self.hidden = [r.hidden.requires_grad_() for r in recorded]
        return self.hidden

    def stage(self, call: Call, bucket: Bucket) -> None:
        """Queue the copies of one micro-batch's metadata, and of its tensors besides the hidden states, into the static
        ones.
        """
        self.metadata.stage(call.boundaries, bucket)
        for static, tensor, skipped in zip(self.others, call.tensors[1:], self._outside, strict=True):
            if not skipped:
                static.copy_(tensor)

    def static_bytes(self) -> int:
        """Bytes of the layers' static inputs."""
        others = [t for t, skipped in zip(self.others, self._outside, strict=True) if not skipped]
        return sum(t.numel() * t.element_size() for t in (*self.hidden, *others))

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return tuple(self.replays)

    def close(self) -> None:
        """Free the graphs. A backward that is still to come raises."""
        self.closed = True
        self._free_graphs()
        self.moves = None
        self.hidden.clear()

    def _free_graphs(self) -> None:
        for replays in self.replays.values():
            replays.reset()
        self.replays.clear()


class LayerLease(SlotLease):
    """A lease of a slot of single layers: replays the layers of one micro-batch one by one."""

    slot: LayerSlot
    """The slot that is held."""

    def __init__(self, slot: LayerSlot, bucket: Bucket, anchor: torch.Tensor, order: ReplayOrder) -> None:
        """Hold the free `slot` for a micro-batch that fits `bucket`, which has been captured in it.

        `anchor` is a scalar that takes a gradient, so that there is a backward even if the hidden states take none.
        `order` keeps the replays of all leases one after the other.
        """
        self.order, self.bucket = order, bucket
        self.replays = slot.replays[bucket]
        self._anchor = anchor
        super().__init__(slot)

    def run(self, number: int, hidden: torch.Tensor) -> Any:
        """Replay the forward graph of layer `number`; the outputs are the graph's own memory."""
        if number == 0:
            hidden = _Enter.apply(self, self._anchor, hidden)
        parameters = self.replays.parameters[number]
        unfused = [p for p in parameters if id(p) not in self.replays.fused]
        copied = iter(_Copied.apply(*unfused) if unfused else ())
        arguments = [p if id(p) in self.replays.fused else next(copied) for p in parameters]
        with teardown.LAUNCH:
            return self.replays.graphs[number](hidden, *arguments)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy of the hidden states after the last layer, which the caller may keep."""
        output: torch.Tensor = _Leave.apply(self, hidden)
        self.order.end()
        return output

    def begin_backward(self) -> None:
        """Prepare the backward, before any layer's backward graph is replayed.

        Parameters whose gradient a graph adds to `main_grad` are marked as the captured kernels would mark them: the
        tensor that Megatron's gradient reduction then finds in `.grad` is a dummy.

        Raises:
            RuntimeError: the slot no longer holds this micro-batch's activations; or a `main_grad` was replaced or
                moved since the captures.
        """
        self.check_backward()
        self.order.begin()
        for parameter, main_grad, pointer in self.replays.fused.values():
            if getattr(parameter, "main_grad", None) is not main_grad or main_grad.data_ptr() != pointer:
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was replaced or moved after its "
                    "graphs were captured; call recapture()"
                )
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class _Enter(torch.autograd.Function):
    """Runs before the first layer. Its backward runs after those of all layers, and gives the slot back."""

    @staticmethod
    def forward(ctx: Any, lease: LayerLease, anchor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.lease = lease
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        copied = grad.clone()  # the graph's own memory is overwritten by the next replay
        ctx.lease.order.end()
        ctx.lease.release()
        return None, None, copied


class _Leave(torch.autograd.Function):
    """Runs after the last layer, and copies its output out of the graph's memory. Its backward runs before those of all
    layers.
    """

    @staticmethod
    def forward(ctx: Any, lease: LayerLease, hidden: torch.Tensor) -> torch.Tensor:
        ctx.lease = lease
        return hidden.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.lease.begin_backward()
        return None, grad


class _Copied(torch.autograd.Function):
    """Parameters whose gradients are copied out of the graph's memory before autograd keeps or adds them.

    It is applied right before the layer, so that its backward runs right after the layer's, before another graph
    overwrites the gradients. Autograd may accumulate them on another stream.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> Any:
        # quantized parameters are no views of memory: another object over the same inner tensors stands for them
        return tuple(p.detach() if is_quantized(p) else p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return tuple(None if grad is None else grad.clone() for grad in grads)
