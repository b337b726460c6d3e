"""Slots and leases: the static memory that graphs replay over, and the right of one micro-batch to use it.

A slot is one copy of the static buffers and of every bucket's graphs. The graphs of all its buckets share one memory
pool, so that only one bucket of a slot can be in use at a time. A lease is a slot held by one micro-batch, from its
forward to the end of its backward: until then the pool holds the activations that its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.agreement import alone
from thdprof.runtime.graphs.capture import CapturedPass
from thdprof.runtime.graphs.module_state import GradientBuffers
from thdprof.runtime.offload import HostBuffers
from thdprof.runtime.padding import Boundaries, PackedSequence, document_of_tokens, fill_padded

_ALIGNED = 64
"""The place of `seq_idx` in the buffer is rounded up to a multiple of so many integers: kernels are compiled anew for
pointers that are aligned to less than 16 bytes.
"""
_STAGING_BUFFERS = 4
"""Pinned buffers of a slot. The host can run so many micro-batches ahead of the GPU before it waits."""


class StagingBuffer:
    """A pinned buffer on the host, and the event after which the host may write to it again."""

    def __init__(self, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        """int32, shape [size], pinned."""
        self.array: NDArray[np.int32] = self.pinned.numpy()
        """The same memory as a NumPy array."""
        self.copied = torch.cuda.Event()
        """Recorded after the last copy out of the buffer."""


class Metadata:
    """The static metadata of one slot, which the graphs of all its buckets read. It owns the buffers.

    One int32 buffer on the GPU holds `cu_seqlens`, then `cu_seqlens_padded` and `seq_idx` where micro-batches come with
    them, each as long as the largest bucket needs.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, with_padded: bool, with_seq_idx: bool, device: torch.device
    ) -> None:
        """Buffers that fit every one of `buckets`.

        Args:
            buckets: the shapes whose graphs read the metadata.
            with_padded: whether micro-batches come with `cu_seqlens_padded`.
            with_seq_idx: whether the module reads the document of every token.
            device: the GPU on which the buffer lies.
        """
        self._num_boundaries = max(b.max_seqs for b in buckets) + 1
        self._with_padded, self._with_seq_idx = with_padded, with_seq_idx
        self._idx_begins = -(-self._num_boundaries * (2 if with_padded else 1) // _ALIGNED) * _ALIGNED
        size = self._idx_begins + (max(b.n_tokens * b.cp_size for b in buckets) if with_seq_idx else 0)
        self._metadata = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [StagingBuffer(size) for _ in range(_STAGING_BUFFERS)]
        self._next = 0

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read: views of the static buffer, at the same addresses for every
        call.
        """
        idx = self._metadata[self._idx_begins :][: bucket.n_tokens * bucket.cp_size]
        padded = self._metadata[self._num_boundaries :][: bucket.max_seqs + 1]
        return PackedSequence(
            cu_seqlens=self._metadata[: bucket.max_seqs + 1],
            cu_seqlens_padded=padded if self._with_padded else None,
            max_seqlen=bucket.max_seqlen,
            seq_idx=idx if self._with_seq_idx else None,
            cp_size=bucket.cp_size,
        )

    def stage(self, boundaries: Boundaries, bucket: Bucket) -> None:
        """Queue the copy of one micro-batch's boundaries, padded for `bucket`, into the static buffer.

        The host waits only when all staging buffers are still being copied, never for all work that is queued on the
        GPU.
        """
        valid, memory = boundaries.valid, boundaries.in_memory
        if isinstance(valid, torch.Tensor) or isinstance(memory, torch.Tensor):
            self._stage_from_device(boundaries, bucket)
            return
        staging = self._staging[self._next]
        self._next = (self._next + 1) % _STAGING_BUFFERS
        staging.copied.synchronize()  # the last copy out of this pinned buffer has ended
        used = bucket.max_seqs + 1
        fill_padded(staging.array[:used], valid)
        if self._with_padded:
            fill_padded(staging.array[self._num_boundaries :][: bucket.max_seqs + 1], memory)
            used = self._num_boundaries + bucket.max_seqs + 1
        if self._with_seq_idx:
            n_tokens = bucket.n_tokens * bucket.cp_size
            staging.array[self._idx_begins :][:n_tokens] = document_of_tokens(memory, n_tokens)
            used = self._idx_begins + n_tokens
        self._metadata[:used].copy_(staging.pinned[:used], non_blocking=True)
        staging.copied.record()

    def _stage_from_device(self, boundaries: Boundaries, bucket: Bucket) -> None:
        static = self.packed(bucket)
        pairs = [(static.cu_seqlens, boundaries.valid)]
        if static.cu_seqlens_padded is not None:
            pairs.append((static.cu_seqlens_padded, boundaries.in_memory))
        if static.seq_idx is not None:
            assert boundaries.seq_idx is not None  # a module that reads it gets it with every micro-batch
            static.seq_idx.copy_(boundaries.seq_idx)
        for target, source in pairs:
            assert isinstance(source, torch.Tensor)
            target[: len(source)].copy_(source)
            target[len(source) :] = source[-1]


def sample_boundaries(bucket: Bucket) -> Boundaries:
    """Boundaries for warm-up and capture: documents of equal length that cover all tokens, where `bucket` allows it.

    Context parallelism cuts every document into 2 * cp_size parts of equal length, and would read outside its buffers
    if the boundaries left a tail.
    """
    tokens, parts = bucket.n_tokens * bucket.cp_size, 2 * bucket.cp_size if bucket.cp_size > 1 else 1
    longest = max(bucket.max_seqlen // parts, 1) * parts
    length = min(longest, -(-tokens // bucket.max_seqs))
    length = min(longest, -(-length // parts) * parts)
    return Boundaries(valid=np.minimum(np.arange(bucket.max_seqs + 1) * length, tokens).astype(np.int32))


_ASKS_AFTER = 64
"""Most micro-batches without a free slot between two times that ranks ask each other for dropped outputs."""
_RACE_S = 1e-3
"""Seconds that an idle stream may take to run past an event."""


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
        self.dropped = False
        """Whether that micro-batch's outputs were dropped without a backward, so that `FreeSlots` may give it back."""
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


class ReplayOrder:
    """Keeps a bank's replays one after the other: they share gradients, buffers and random states.

    A replay on another stream than the last one waits for it, by an event. It is an error where the caller's own work
    was not ordered: the new stream has run past this point while the last replay still runs, which it would not have if
    it had waited for it. So inputs and weights would be raced for, too. A replayed backward runs on the stream of its
    forward, where autograd puts it.
    """

    def __init__(self, device: torch.device) -> None:
        """No replay yet on `device`."""
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._ended = torch.cuda.Event()
        self._seen: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """A replay is about to be queued on the current stream.

        Raises:
            RuntimeError: the current stream did not wait for the stream of the last replay.
        """
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and current != self._last and not self._ended.query():
            self._refuse_race(self._last, current)
            self._ended.wait(current)
        self._last = current

    def end(self) -> None:
        """The replay was queued, with the copies of what it made."""
        self._ended.record(self._last)

    def _refuse_race(self, last: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        """Raise where `current` is seen to run ahead of the last replay. The first time for two streams it is given a
        millisecond to get there.
        """
        streams = last.cuda_stream, current.cuda_stream
        until = perf_counter() + (0 if streams in self._seen else _RACE_S)
        self._seen.add(streams)
        here = torch.cuda.Event()
        here.record(current)
        while True:
            if here.query() and not self._ended.query():
                raise RuntimeError(
                    "a micro-batch is replayed on another stream than the last one, and did not wait for it: run whole "
                    "steps on one stream, or call torch.cuda.current_stream().wait_stream(the stream before) first"
                )
            if self._ended.query() or perf_counter() > until:
                return


class FreeSlots:
    """Finds the slots that no micro-batch holds: the same ones on all ranks that share collectives.

    A backward gives a slot back at a moment of the program, which is the same on these ranks. Outputs without a
    backward do so when Python frees them. Those in a cycle are freed by the collector, at another micro-batch on every
    rank. So a slot whose outputs were dropped counts as held until no slot is free. Then the ranks ask each other, and
    give it back if all of them have dropped the outputs. Where nothing was dropped they ask ever more rarely, so that a
    plan with few slots does not make each of its eager micro-batches wait for the GPU.
    """

    def __init__(self, agreed: Callable[[bool], bool] = alone) -> None:
        """Nothing was asked yet.

        Args:
            agreed: whether its argument is true on all ranks that share collectives, which call it together.
        """
        self._agreed, self._found_none, self._asks_after = agreed, 0, 1

    def find[SomeSlot: SlotMemory](self, slots: Sequence[SomeSlot], index: int | None = None) -> list[SomeSlot]:
        """The free ones among `slots`, in order.

        Args:
            slots: all slots.
            index: the only slot that may be taken, on which the ranks have agreed; None: any may be.
        """
        if index is not None:
            slots = slots[index : index + 1]
        if index is not None or self._agreed is alone:
            self._give_back(slots)
        elif all(slot.busy for slot in slots):
            self._found_none += 1
            if self._found_none >= self._asks_after:
                self._ask(slots)
        return [slot for slot in slots if not slot.busy]

    def _ask(self, slots: Sequence[SlotMemory]) -> None:
        """Give back the slots whose outputs all ranks have dropped."""
        none_dropped = self._agreed(not any(slot.dropped for slot in slots))
        self._found_none, self._asks_after = 0, min(2 * self._asks_after, _ASKS_AFTER) if none_dropped else 1
        if not none_dropped:
            self._give_back([slot for slot in slots if self._agreed(slot.dropped)])

    @staticmethod
    def _give_back(slots: Sequence[SlotMemory]) -> None:
        """Free those of `slots` whose outputs were dropped."""
        for slot in slots:
            if slot.dropped:
                slot.busy = slot.dropped = False


class SlotLease:
    """A slot held by one micro-batch from its forward to the end of its backward, or until its outputs are dropped."""

    slot: SlotMemory
    """The slot that is held."""

    def __init__(self, slot: SlotMemory) -> None:
        self.slot = slot
        self._held = True
        slot.busy, slot.dropped = True, False

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
        """Mark the slot when the micro-batch's outputs were dropped without a backward."""
        if self._held:
            self._held, self.slot.dropped = False, True


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
        order: ReplayOrder,
        on_backward: Callable[[], None],
        on_piece: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold `slot` for a micro-batch that fits `bucket`.

        Args:
            slot: a free slot in which `bucket` has been captured.
            bucket: the shape to replay.
            gradients: the buffers that the backward adds the parameters' gradients to.
            order: keeps the replays of all leases one after the other.
            on_backward: called after the backward, before the parameters' hooks.
            on_piece: called after the backward of each of several pieces, before the hooks of the parameters that it
                gets.
            after_backward: called after the whole backward, before `on_backward` or the last piece's `on_piece`.
        """
        self.bucket, self.captured = bucket, slot.passes[bucket]
        self._gradients, self._on_backward, self._on_piece = gradients, on_backward, on_piece
        self._order = order
        self._after_backward = after_backward
        self._redrawn: list[tuple[int, int]] = []
        self.witness: Witness | None = None
        """Who verifies the micro-batch; None: nobody."""
        super().__init__(slot)

    @property
    def touched(self) -> Sequence[bool]:
        """Whether the backward gives each parameter a gradient."""
        return self.captured.touched

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
        self._order.begin()
        self._redrawn = [again.noted() for again in self.captured.redrawn]
        self.slot.metadata.stage(boundaries, self.bucket)
        self.slot.stage_inputs(tensors)

    def copied_outputs(self) -> tuple[torch.Tensor, ...]:
        """Copies of the outputs, which the caller may keep."""
        copies = tuple(o.clone() for o in self.captured.outputs)
        self._order.end()
        return copies

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
        self._order.begin()
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
        copies = [g.clone() if g is not None else None for g in self.captured.input_grads]
        self._order.end()
        return copies

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
