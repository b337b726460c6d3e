"""Verified micro-batches of graphs of single layers: each layer is verified inside its own backward.

Gradients reach the parameters through autograd, layer by layer. What a layer's graphs got and made is therefore read by
hooks of the node that replays its backward: right before the replay, and right after it, when autograd has handed no
gradient on and no hook of a parameter has run. The layer can be replayed again there, even while gradients of later
layers are being reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.graphs.module_state import GradientBuffers
from thdprof.runtime.graphs.watch.twin import Subject
from thdprof.runtime.graphs.watch.watch import Parts, Watch, Watched
from thdprof.runtime.megatron.graphs.layer_slots import LayerLease, LayerReplays
from thdprof.runtime.padding import Boundaries, PackedSequence

SubjectOf = Callable[[int, dict[str, Any]], Subject]
"""The type of a function that returns what is verified of a layer: it takes the layer's number and the arguments of
its call besides the hidden states.
"""


class WatchedLayers:
    """One micro-batch whose layers are verified."""

    def __init__(
        self,
        watch: Watch,
        subject_of: SubjectOf,
        parameters: Sequence[Sequence[nn.Parameter]],
        lease: LayerLease,
        packed: PackedSequence,
        boundaries: Boundaries,
        slot: int,
    ) -> None:
        """Verify the micro-batch that is about to be replayed.

        Args:
            watch: the watch of the layers' decoder.
            subject_of: returns what is verified of a layer.
            parameters: for each layer, the trainable parameters of what is captured.
            lease: the micro-batch's lease.
            packed: its metadata, padded for its bucket, in memory that no other micro-batch writes to.
            boundaries: its boundaries.
            slot: number of its slot.
        """
        self._watch, self._subject_of, self._parameters, self._lease = watch, subject_of, parameters, lease
        self._rest = packed, boundaries, slot
        self._parts = Parts(left=len(lease.replays.graphs))

    def run(self, number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
        """As `LayerLease.run`, for a layer that is called with these `constants` besides its hidden states."""
        lease, replays = self._lease, self._lease.replays
        if self._watch.has_ended:
            return lease.run(number, hidden)
        try:
            subject = self._subject_of(number, constants)
            layer = WatchedLayer(replays, number, lease.bucket, self._parameters[number], subject.around)
            given, name = [hidden.detach().requires_grad_()], f"layer {number}: "
            watched = self._watch.begin(subject, layer, given, *self._rest, parts=self._parts, name=name)
        except Exception as error:
            self._watch.end(error)
            return lease.run(number, hidden)
        outputs = lease.run(number, hidden)
        flat: list[torch.Tensor] = tree_flatten(outputs)[0]
        watched.forward_ended(flat)
        layer.attach(watched, next(o.grad_fn for o in flat if o.grad_fn is not None))
        return outputs


class WatchedLayer:
    """The graphs of one layer, as a twin replays them again."""

    def __init__(
        self,
        replays: LayerReplays,
        number: int,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.bucket, self._around = bucket, around
        self._graph, self._own = replays.graphs[number], replays.parameters[number]
        self._fused = [id(p) in replays.fused for p in self._own]
        others = [p for p in parameters if all(p is not own for own in self._own)]  # the graphs give them no gradient
        self._parameters = [*self._own, *others]
        self.touched = [True] * len(self._own) + [False] * len(others)
        self._gradients = GradientBuffers([])
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def attach(self, watched: Watched, node: Any) -> None:
        """Let `watched` know of the replay of the backward, which `node` makes."""

        def begins(grads: Sequence[torch.Tensor | None]) -> None:
            with watched.failing_alone():
                self._gradients = self._zeros()
                watched.backward_begins(self._gradients, grads)  # no graph's memory: verified layers give copies out

        def ended(grads: Sequence[torch.Tensor | None], _: object) -> Sequence[torch.Tensor | None] | None:
            first = len(grads) - len(self._own)
            copies: list[torch.Tensor | None] = []
            with watched.failing_alone():  # another replay overwrites what this one gives out
                fused = [True] * (first - 1) + [False] + self._fused
                copies = [g if g is None or f else g.clone() for g, f in zip(grads, fused, strict=True)]
                self._receive(copies[first:])
            if not copies:
                return None
            watched.backward_ended(self._gradients, copies[first - 1 : first])
            self._inputs, self._outputs = [], []
            return tuple(copies)

        node.register_prehook(begins)
        node.register_hook(ended)

    def _zeros(self) -> GradientBuffers:
        """Buffers of what a replay adds: `main_grad` where its kernels add to that, else zeros that hold no memory."""
        mains = [getattr(p, "main_grad", None) for p in self._parameters]
        fused = [*self._fused, *[False] * (len(mains) - len(self._fused))]
        buffers = [
            main
            if main is not None and added
            else torch.zeros((), dtype=p.dtype if main is None else main.dtype, device=p.device).expand(p.shape)
            for p, main, added in zip(self._parameters, mains, fused, strict=True)
        ]
        return GradientBuffers(self._parameters, buffers, [main is not None for main in mains])

    def _receive(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients that the backward gave its parameters, and that no kernel has added to `main_grad`."""
        buffers = self._gradients.buffers
        for i, buffer in enumerate(buffers):
            if i >= len(grads) or not self._fused[i]:
                grad = grads[i] if i < len(grads) else None
                buffers[i] = (
                    torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device) if grad is None else grad
                )

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> Sequence[torch.Tensor]:
        """Replay the forward, over the boundaries that the slot holds; the outputs are copies."""
        self._inputs = [t.detach().requires_grad_() for t in (*tensors, *self._own)]
        with self._around(), torch.enable_grad(), teardown.LAUNCH:
            self._outputs = tree_flatten(self._graph(*self._inputs))[0]
        return [o.detach().clone() for o in self._outputs]

    def backward_again(self, output_grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replay the backward after another forward, and add to the gradients."""
        heads = [(o, g) for o, g in zip(self._outputs, output_grads, strict=True) if o.requires_grad]
        given = [torch.zeros_like(o) if g is None else g for o, g in heads]
        with self._around(), teardown.LAUNCH:
            hidden, *grads = torch.autograd.grad([o for o, _ in heads], self._inputs, given, allow_unused=True)
        for buffer, grad, fused in zip(self._gradients.buffers, grads, self._fused, strict=False):
            if grad is not None and not fused:
                buffer.add_(grad)
        return [None if hidden is None else hidden.clone()]
