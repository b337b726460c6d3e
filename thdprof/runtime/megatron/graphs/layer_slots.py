"""What graphs of single layers are captured from and replayed over: a layer's pass, the slots, and their leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.slots import SlotLease, SlotMemory
from thdprof.runtime.megatron.offload.layers import LayerMoves

Moves = Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]
"""Runs a layer on hidden states and moves what it saves to the host."""


class LayerPass(nn.Module):
    """One layer as Transformer Engine captures it: hidden states in, its outputs out, all else static.

    The layer's parameters are arguments too, and not this module's own: a replay then takes the model's parameters,
    although the capture ran over aliases of them.
    """

    def __init__(self, captured: Callable[..., Any], constants: dict[str, Any], moves: Moves | None = None) -> None:
        super().__init__()
        self._captured, self._constants, self._moves = captured, constants, moves

    def forward(self, hidden_states: torch.Tensor, *parameters: torch.Tensor) -> Any:
        """Hidden states after the layer, or what of it is captured gives out."""
        return self._run(hidden_states) if self._moves is None else self._moves(hidden_states, self._run)

    def _run(self, hidden_states: torch.Tensor) -> Any:
        return self._captured(hidden_states, **self._constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one layer was called with."""

    hidden: torch.Tensor
    """Zeros like its hidden states."""
    constants: dict[str, Any]
    """Its other arguments, over static tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReplays:
    """The graphs of one bucket in one slot; the static memory that they share is the slot's."""

    graphs: tuple[Callable[..., Any], ...]
    """One a layer, in order: takes hidden states and the layer's parameters, gives the graph's own output buffers."""
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """The model's parameters that each layer gives a gradient to."""
    fused: dict[int, tuple[nn.Parameter, torch.Tensor, int]]
    """Those whose gradient the graphs add to `main_grad`, that and where it lay, by identity; autograd gets a dummy."""

    def reset(self) -> None:
        """Free the graphs."""
        for graph in self.graphs:
            graph.reset()  # type: ignore[attr-defined]


class LayerSlot(SlotMemory):
    """Static tensors and one memory pool for the graphs of all buckets. Only one bucket is alive at a time."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        *,
        with_padded: bool,
        with_seq_idx: bool,
        device: torch.device,
    ) -> None:
        super().__init__(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx, device=device)
        self.others = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors[1:]]
        """The decoder's other tensors, static: every layer may read them."""
        self.hidden: list[torch.Tensor] = []
        """Static input of every layer."""
        self.replays: dict[Bucket, LayerReplays] = {}
        self.moves: LayerMoves | None = None
        """What the layers move to the host; None where all stays on the device."""

    def inputs_like(self, recorded: Sequence[Recorded]) -> list[torch.Tensor]:
        """Static inputs of the layers, the same for every bucket."""
        if not self.hidden:
            self.hidden = [r.hidden.requires_grad_() for r in recorded]
        return self.hidden

    def stage(self, call: Call, bucket: Bucket) -> None:
        """Queue one micro-batch's metadata and other tensors into the static ones."""
        self.metadata.stage(call.boundaries, bucket)
        for static, tensor in zip(self.others, call.tensors[1:], strict=True):
            static.copy_(tensor)

    def static_bytes(self) -> int:
        """Bytes of the layers' static inputs."""
        return sum(t.numel() * t.element_size() for t in (*self.hidden, *self.others))

    def close(self) -> None:
        """Free the graphs; a backward still to come raises."""
        self.closed = True
        for replays in self.replays.values():
            replays.reset()
        self.replays.clear()
        self.moves = None
        self.hidden.clear()


class LayerLease(SlotLease):
    """A slot held by one micro-batch from its forward to the end of its backward, or until it is dropped."""

    slot: LayerSlot
    """The slot that is held."""

    def __init__(self, slot: LayerSlot, bucket: Bucket, anchor: torch.Tensor) -> None:
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
        return self.replays.graphs[number](hidden, *arguments)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer, copied for the caller to keep."""
        output: torch.Tensor = _Leave.apply(self, hidden)
        return output

    def begin_backward(self) -> None:
        """Before any layer's backward graph is replayed.

        Weights whose gradient a graph adds to `main_grad` are marked as the captured kernels would mark them: what
        Megatron's gradient reduction then finds in `.grad` is a dummy.

        Raises:
            RuntimeError: a second backward of the same micro-batch: its activations may be overwritten by now.
        """
        self.check_backward()
        for parameter, main_grad, pointer in self.replays.fused.values():
            if getattr(parameter, "main_grad", None) is not main_grad or main_grad.data_ptr() != pointer:
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was replaced or moved after its "
                    "graphs were captured; call recapture()"
                )
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class _Enter(torch.autograd.Function):
    """Before the first layer: its backward runs after all of theirs, and gives the slot back.

    The anchor takes a gradient, so that there is a backward even where the hidden states take none.
    """

    @staticmethod
    def forward(ctx: Any, lease: LayerLease, anchor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.lease = lease
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        copied = grad.clone()  # out of the graph's memory
        ctx.lease.release()
        return None, None, copied


class _Leave(torch.autograd.Function):
    """After the last layer: copies its output out of the graph's memory; its backward runs before all of theirs."""

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

    Applied right before the layer, its backward runs right after the layer's, before another graph overwrites them;
    what accumulates them may run on another stream.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> Any:
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return tuple(None if grad is None else grad.clone() for grad in grads)
