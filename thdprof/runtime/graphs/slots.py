"""Slots and leases: the static memory that graphs replay over, and the right of one micro-batch to use it.

A slot is one copy of the static buffers and of every bucket's graphs. The graphs of all its buckets share one memory
pool, so that only one bucket of a slot can be in use at a time. A lease is a slot held by one micro-batch, from its
forward to the end of its backward: until then the pool holds the activations that its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.graphs.capture import CapturedPass
from thdprof.runtime.graphs.gradients import GradientBuffers
from thdprof.runtime.graphs.static_metadata import Metadata
from thdprof.runtime.offload.copies import HostBuffers
from thdprof.runtime.padding import Boundaries


class SlotMemory:
    """The part that slots of every kind have: a memory pool, the static metadata, and two marks."""

    def __init__(
        self, buckets: Sequence[Bucket], *, with_padded: bool, with_seq_idx: bool, device: torch.device
    ) -> None:
        """An empty slot.

        Args:
            buckets: the shapes whose graphs the slot will hold.
            with_padded: whether micro-batches come with `cu_seqlens_padded`.
            with_seq_idx: whether the module reads the document of every token.
            device: the GPU on which the buffers are allocated.
        """
        self.pool = torch.cuda.graph_pool_handle()
        """Handle of the memory pool that all graphs of the slot are captured into."""
        self.metadata = Metadata(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx, device=device)
        """The packed-sequence metadata that all graphs of the slot read."""
        self.busy = False
        """Whether a micro-batch holds the slot."""
        self.closed = False
        """Whether the graphs were freed: a backward that is still to come then raises."""

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return ()

    def begin_anew(self) -> None:
        """Free all graphs, and take another memory pool, so that the old one's memory can be given back.

        The slot must not be in use.
        """
        self._free_graphs()
        self.pool = torch.cuda.graph_pool_handle()

    def _free_graphs(self) -> None:
        """Free the graphs that the slot holds; a slot without graphs has none."""


class SlotLease:
    """A slot held by one micro-batch from its forward to the end of its backward, or until its outputs are dropped."""

    slot: SlotMemory
    """The slot that is held."""

    def __init__(self, slot: SlotMemory) -> None:
        self.slot = slot
        self._held = True
        slot.busy = True

    def check_backward(self) -> None:
        """Make sure that the pool still holds the activations of this micro-batch.

        Raises:
            RuntimeError: this is the second backward of the micro-batch, whose activations another one may have
                overwritten since the first; or the graphs were freed.
        """
        if not self._held:
            raise RuntimeError(
                "a replayed micro-batch was backpropagated a second time; its slot is given back after the first: "
                "run it eagerly (thdprof.runtime.GraphedModule.eager) where a graph must be kept"
            )
        if self.slot.closed:
            raise RuntimeError("the graphs were closed or dropped before the backward of a replayed micro-batch")

    def release(self) -> None:
        """Give the slot back; does nothing when it was given back before."""
        if self._held:
            self._held = False
            self.slot.busy = False

    def __del__(self) -> None:
        """Give the slot back when the micro-batch's outputs were dropped without a backward."""
        self.release()


class Slot(SlotMemory):
    """A slot whose graphs hold whole passes of a module: static inputs and output gradients, and one pass a bucket."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        *,
        with_padded: bool,
        with_seq_idx: bool,
        device: torch.device,
    ) -> None:
        """A slot without graphs.

        Args:
            tensors: the tensor arguments of one micro-batch, after which the static inputs are shaped.
            buckets: the shapes whose graphs the slot will hold.
            with_padded: whether micro-batches come with `cu_seqlens_padded`.
            with_seq_idx: whether the module reads the document of every token.
            device: the GPU on which the buffers are allocated.
        """
        super().__init__(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx, device=device)
        self.host = HostBuffers()
        """Pinned host memory for the activations that the slot's passes move there."""
        self.passes: dict[Bucket, CapturedPass] = {}
        """The pass of every bucket that has been captured."""
        self.inputs = [
            torch.zeros_like(t, memory_format=torch.contiguous_format).requires_grad_(t.requires_grad) for t in tensors
        ]
        """Static inputs on the GPU, one a tensor argument, of its shape and dtype; graphs read them."""
        self._output_grads: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def output_grads(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Static gradients of `outputs`, of their shapes and dtypes; buckets whose outputs are alike share them."""
        key = tuple((o.shape, o.dtype) for o in outputs)
        if key not in self._output_grads:
            self._output_grads[key] = [torch.zeros_like(o, memory_format=torch.contiguous_format) for o in outputs]
        return self._output_grads[key]

    def static_bytes(self) -> int:
        """Bytes of the static inputs."""
        return sum(t.numel() * t.element_size() for t in self.inputs)

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return tuple(self.passes)

    def close(self) -> None:
        """Free the graphs. A backward that is still to come raises."""
        self.closed = True
        self._free_graphs()

    def _free_graphs(self) -> None:
        for captured in self.passes.values():
            captured.forward.reset()
            captured.backward.reset()
        self.passes.clear()

    def stage_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies of one micro-batch's tensors into the static inputs."""
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.detach().copy_(tensor)


class Witness(Protocol):
    """What a lease tells of a replayed backward to whoever verifies it."""

    def backward_begins(self, gradients: GradientBuffers, output_grads: Sequence[torch.Tensor | None]) -> None:
        """Called before the first backward graph adds to `gradients`."""

    def gradients_complete(self, gradients: GradientBuffers, complete: Sequence[bool]) -> None:
        """Called after each of several backward graphs but the last one, before the hooks of the parameters whose
        gradients are complete by then: hooks may change these gradients.
        """

    def backward_ended(self, gradients: GradientBuffers, input_grads: Sequence[torch.Tensor | None]) -> None:
        """Called after the last backward graph, before the hooks of the parameters whose gradients it completes.

        The lease is still held. `input_grads` are copies, which the caller may keep.
        """


class Lease(SlotLease):
    """A lease of a slot of whole passes: replays the forward and the backward of one micro-batch."""

    slot: Slot
    """The slot that is held."""

    def __init__(
        self,
        slot: Slot,
        bucket: Bucket,
        gradients: GradientBuffers,
        on_backward: Callable[[], None],
        on_piece: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold `slot` for a micro-batch that fits `bucket`.

        Args:
            slot: a free slot in which `bucket` has been captured.
            bucket: the shape to replay.
            gradients: the buffers that the backward adds the parameters' gradients to.
            on_backward: called after the backward, before the parameters' hooks.
            on_piece: called after the backward of each of several pieces, before the hooks of the parameters that it
                gets.
            after_backward: called after the whole backward, before `on_backward` or the last piece's `on_piece`.
        """
        self.bucket, self.captured = bucket, slot.passes[bucket]
        self._gradients, self._on_backward, self._on_piece = gradients, on_backward, on_piece
        self._after_backward = after_backward
        self._redrawn: list[tuple[int, int]] = []
        self.witness: Witness | None = None
        """Who verifies the micro-batch; None: nobody."""
        super().__init__(slot)

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> tuple[torch.Tensor, ...]:
        """Replay the forward graph; the outputs are copies, which the caller may keep."""
        self.stage(tensors, boundaries)
        with teardown.LAUNCH:
            self.captured.forward.replay()
        return self.copied_outputs()

    def backward(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward graph and give the slot back; the input gradients are copies, which the caller may keep.

        Args:
            output_grads: the gradient of every output; None counts as zeros.

        Raises:
            RuntimeError: the slot no longer holds this micro-batch's activations.
        """
        self.stage_output_grads(output_grads)
        with teardown.LAUNCH:
            self.captured.backward.replay()
        input_grads = self.copied_input_grads()
        if self.witness is not None:
            self.witness.backward_ended(self._gradients, input_grads)
        self.release()
        self._after_backward()
        self._on_backward()
        self._gradients.run_hooks(self.captured.touched)
        return input_grads

    def stage(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> None:
        """Queue the copies of the micro-batch's tensors and boundaries into the static buffers, and note the random
        states with which the forward begins.
        """
        self._redrawn = [again.noted() for again in self.captured.redrawn]
        self.slot.metadata.stage(boundaries, self.bucket)
        self.slot.stage_inputs(tensors)

    def copied_outputs(self) -> tuple[torch.Tensor, ...]:
        """Copies of the outputs, which the caller may keep."""
        return tuple(o.clone() for o in self.captured.outputs)

    def stage_output_grads(self, output_grads: Sequence[torch.Tensor | None]) -> None:
        """Make everything ready for the first graph of the backward; the arguments are those of `backward`."""
        self.check_backward()
        self._write_output_grads(output_grads)
        self._gradients.attach(self.captured.touched)
        if self.witness is not None:
            self.witness.backward_begins(self._gradients, output_grads)

    def backward_again(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the whole backward once more, after another `forward` of the micro-batch, while the lease is held.

        The graphs add to the parameters' gradients again, and no hook runs: the caller puts the gradients back.

        Args:
            output_grads: as for `backward`.
        """
        self._write_output_grads(output_grads)
        with teardown.LAUNCH:
            self.captured.backward.replay()
        return self.copied_input_grads()

    def _write_output_grads(self, output_grads: Sequence[torch.Tensor | None]) -> None:
        for again, (seed, offset) in zip(self.captured.redrawn, self._redrawn, strict=True):
            again.begin_at(seed, offset)
        differentiable = (i for i, d in enumerate(self.captured.differentiable) if d)
        for static, position in zip(self.captured.output_grads, differentiable, strict=True):
            grad = output_grads[position]
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)

    def copied_input_grads(self) -> list[torch.Tensor | None]:
        """Copies of the input gradients, which the caller may keep; None for inputs without a gradient."""
        return [g.clone() if g is not None else None for g in self.captured.input_grads]

    def backward_piece(self, piece: int) -> list[torch.Tensor | None]:
        """Replay the backward of one piece, the last piece first, and run the hooks of the parameters whose gradients
        are complete. Piece 0 gives the slot back.

        Returns:
            Copies of the input gradients after piece 0; nothing after the others.

        Raises:
            RuntimeError: the slot no longer holds this micro-batch's activations.
        """
        self.check_backward()
        with teardown.LAUNCH:
            self.captured.backward.each[len(self.captured.completed) - 1 - piece].replay()
        complete = self.captured.completed[piece]
        input_grads = self.copied_input_grads() if piece == 0 else []
        if self.witness is not None and piece > 0:
            self.witness.gradients_complete(self._gradients, complete)
        elif self.witness is not None:
            self.witness.backward_ended(self._gradients, input_grads)
        if piece == 0:
            self._after_backward()
        self._on_piece([p for p, c in zip(self._gradients.parameters, complete, strict=True) if c])
        self._gradients.run_hooks(complete)
        if piece == 0:
            self.release()
        return input_grads

    def accumulated_in(self, piece: int) -> list[nn.Parameter]:
        """Parameters whose gradient in `main_grad` is complete after the backward of `piece`."""
        return self._gradients.with_main_grad(self.captured.completed[piece])

    def accumulated_elsewhere(self) -> list[nn.Parameter]:
        """Parameters whose gradient the backward adds to `main_grad`; their `.grad` stays as it is."""
        return self._gradients.with_main_grad(self.captured.touched)
