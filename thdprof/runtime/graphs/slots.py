"""Slots and leases: the static memory that graphs replay over, and the right of one micro-batch to use it.

A slot is one copy of the static buffers and of every bucket's graphs. The graphs of all its buckets share one memory
pool, so that only one bucket of a slot can be in use at a time. A lease is a slot held by one micro-batch, from its
forward to the end of its backward: until then the pool holds the activations that its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.agreement import alone
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.capture import CapturedPass
from thdprof.runtime.graphs.module_state import GradientBuffers
from thdprof.runtime.graphs.watch.watch import Watched
from thdprof.runtime.offload import HostBuffers
from thdprof.runtime.options import Surroundings
from thdprof.runtime.padding import Boundaries, PackedSequence, document_of_tokens, fill_padded

_ALIGNED = 64
"""`seq_idx` begins at a multiple of so many integers: kernels are compiled anew for unaligned pointers."""
_STAGING_BUFFERS = 4
"""Pinned buffers of a slot. The host can run so many micro-batches ahead of the GPU before it waits."""


class StagingBuffer:
    """A pinned int32 buffer of shape [size] on the host, and the event after which the host may write to it again."""

    def __init__(self, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.array: NDArray[np.int32] = self.pinned.numpy()  # the same memory
        self.copied = torch.cuda.Event()
        """Recorded after the last copy out of the buffer."""


class Metadata:
    """The static metadata of one slot, which the graphs of all its buckets read. It owns the buffers.

    One int32 buffer on the GPU holds `cu_seqlens`, then `cu_seqlens_padded` and `seq_idx` where micro-batches come with
    them, each as long as the largest bucket needs.
    """

    def __init__(self, buckets: Sequence[Bucket], packed: PackedSequence, device: torch.device) -> None:
        """Buffers on `device` that fit every one of `buckets`, for micro-batches with the parts that `packed` has."""
        with_padded, with_seq_idx = packed.cu_seqlens_padded is not None, packed.seq_idx is not None
        self._num_boundaries = max(b.max_seqs for b in buckets) + 1
        self._with_padded, self._with_seq_idx = with_padded, with_seq_idx
        self._idx_begins = -(-self._num_boundaries * (2 if with_padded else 1) // _ALIGNED) * _ALIGNED
        size = self._idx_begins + (max(b.n_tokens * b.cp_size for b in buckets) if with_seq_idx else 0)
        self._metadata = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [StagingBuffer(size) for _ in range(_STAGING_BUFFERS)]
        self._next = 0

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read: views of the static buffer."""
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
        """Queue the copy of one micro-batch's boundaries, padded for `bucket`, into the static buffer. The host waits
        only when all staging buffers are still being copied, never for all that the GPU has to do.
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
    Context parallelism cuts them into 2 * cp_size equal parts, and would read outside its buffers if they left a tail.
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

    def __init__(self, buckets: Sequence[Bucket], sample: Call) -> None:
        """An empty slot for `buckets`, on the GPU of `sample`, whose metadata has the parts of all micro-batches'."""
        self.pool = torch.cuda.graph_pool_handle()
        """Handle of the memory pool that all graphs of the slot are captured into."""
        self.metadata = Metadata(buckets, sample.packed, sample.tensors[0].device)
        self.busy = False
        """Whether a micro-batch holds the slot."""
        self.dropped = False
        """Whether that micro-batch's outputs were dropped without a backward, so that `FreeSlots` may give it back."""
        self.closed = False
        """Whether the graphs were freed: a backward that is still to come then raises."""

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return ()

    def close(self) -> None:
        """Free the graphs. A backward that is still to come raises."""
        self.closed = True
        self._free_graphs()

    def begin_anew(self) -> None:
        """Free all graphs of a slot that is not in use, and take another memory pool: the old one's memory can go."""
        self._free_graphs()
        self.pool = torch.cuda.graph_pool_handle()

    def _free_graphs(self) -> None:
        """Free the graphs that the slot holds."""


class ReplayOrder:
    """Keeps a bank's replays one after the other: they share gradients, buffers and random states.

    A replay on another stream than the last one waits for it, by an event. It is an error where the new stream has run
    past this point while the last replay still runs: the caller's own work was not ordered, and would race for inputs
    and weights. A replayed backward runs on the stream of its forward, where autograd puts it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._ended = torch.cuda.Event()
        self._seen: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """A replay is about to be queued on the current stream. RuntimeError: it did not wait for the last replay."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and current != self._last and not self._ended.query():
            self._refuse_race(self._last, current)
            self._ended.wait(current)
        self._last = current

    def end(self) -> None:
        """The replay and the copies of what it made were queued."""
        self._ended.record(self._last)

    def _refuse_race(self, last: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        """Raise where `current` runs ahead of the last replay, for which it has `_RACE_S` the first time."""
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

    A backward gives a slot back at the same moment of the program on these ranks. Outputs without a backward do so when
    Python frees them, and the collector frees those in a cycle at another micro-batch on every rank. So a slot whose
    outputs were dropped counts as held until no slot is free. Then the ranks ask each other, and give it back if all
    have dropped the outputs; where none has, they ask ever more rarely, because asking waits for the GPU.
    """

    def __init__(self, agreed: Callable[[bool], bool] = alone) -> None:
        """`agreed`: whether its argument is true on all ranks that share collectives, which call it together."""
        self._agreed, self._found_none, self._asks_after = agreed, 0, 1

    def find[SomeSlot: SlotMemory](self, slots: Sequence[SomeSlot], index: int | None = None) -> list[SomeSlot]:
        """The free ones among `slots`, in order; with `index` only that one, on which the ranks have agreed."""
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
        for slot in slots:
            if slot.dropped:
                slot.busy = slot.dropped = False


class SlotLease:
    """A slot held by one micro-batch from its forward to the end of its backward, or until its outputs are dropped."""

    slot: SlotMemory

    def __init__(self, slot: SlotMemory) -> None:
        self.slot = slot
        self._held = True
        slot.busy, slot.dropped = True, False

    def check_backward(self) -> None:
        """Raise RuntimeError at a micro-batch's second backward, or after its graphs were freed."""
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

    def __init__(self, buckets: Sequence[Bucket], sample: Call) -> None:
        """A slot without graphs for `buckets`; its static inputs are shaped after the tensors of `sample`."""
        super().__init__(buckets, sample)
        self.host = HostBuffers()
        """Pinned host memory for the activations that the slot's passes move there."""
        self.passes: dict[Bucket, CapturedPass] = {}
        self.inputs = [
            torch.zeros_like(t, memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)
            for t in sample.tensors
        ]
        """Static inputs on the GPU, one a tensor argument, of its shape and dtype; graphs read them."""
        self._output_grads: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def output_grads(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Static gradients of `outputs`, of their shapes and dtypes; buckets whose outputs are alike share them."""
        key = tuple((o.shape, o.dtype) for o in outputs)
        if key not in self._output_grads:
            self._output_grads[key] = [torch.zeros_like(o, memory_format=torch.contiguous_format) for o in outputs]
        return self._output_grads[key]

    def pool_bytes(self) -> int:
        """Bytes of GPU memory that the slot's pool holds; those of the static inputs come on top."""
        return sum(captured.pool_bytes for captured in self.passes.values())

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return tuple(self.passes)

    def _free_graphs(self) -> None:
        for captured in self.passes.values():
            captured.forward.reset()
            captured.backward.reset()
        self.passes.clear()


class Lease(SlotLease):
    """A lease of a slot of whole passes: replays the forward and the backward of one micro-batch."""

    slot: Slot

    def __init__(
        self,
        slot: Slot,
        bucket: Bucket,
        gradients: GradientBuffers,
        order: ReplayOrder,
        surroundings: Surroundings,
    ) -> None:
        """Hold the free `slot`, in which `bucket` has been captured, for a micro-batch that fits it. The backward adds
        to `gradients`; `order` keeps the replays of all leases one after the other.
        """
        self.bucket, self.captured = bucket, slot.passes[bucket]
        self.touched: Sequence[bool] = self.captured.touched
        self._gradients, self._order, self._surroundings = gradients, order, surroundings
        self._redrawn: list[tuple[int, int]] = []
        self.witness: Watched | None = None
        super().__init__(slot)

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> tuple[torch.Tensor, ...]:
        """Replay the forward graph; the outputs are copies, which the caller may keep."""
        self.stage(tensors, boundaries)
        with teardown.LAUNCH:
            self.captured.forward.replay()
        return self.copied_outputs()

    def backward(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward graph and give the slot back; the input gradients are copies, which the caller may keep.
        A None among `output_grads` counts as zeros. RuntimeError: as `check_backward`.
        """
        self.stage_output_grads(output_grads)
        with teardown.LAUNCH:
            self.captured.backward.replay()
        input_grads = self.copied_input_grads()
        if self.witness is not None:
            self.witness.backward_ended(self._gradients, input_grads)
        self.release()
        self._surroundings.after_backward()
        self._surroundings.on_backward()
        self._gradients.run_hooks(self.captured.touched)
        return input_grads

    def stage(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> None:
        """Queue the copies of tensors and boundaries into static buffers; note the random states before them."""
        self._order.begin()
        self._redrawn = [again.note_start() for again in self.captured.redrawn]
        self.slot.metadata.stage(boundaries, self.bucket)
        for static, tensor in zip(self.slot.inputs, tensors, strict=True):
            static.detach().copy_(tensor)

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
        """Replay the whole backward once more, after another `forward`, while the lease is held. It adds to the
        parameters' gradients again, which the caller puts back, and no hook runs.
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
        """Replay the backward of one piece, the last piece first, and run the hooks of parameters whose gradients are
        complete. Piece 0 returns copies of the input gradients and gives the slot back. RuntimeError: as for
        `backward`.
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
            self._surroundings.after_backward()
        self._surroundings.on_piece([p for p, c in zip(self._gradients.parameters, complete, strict=True) if c])
        self._gradients.run_hooks(complete)
        if piece == 0:
            self.release()
        return input_grads

    def find_accumulated(self, piece: int | None = None) -> list[nn.Parameter]:
        """Parameters to whose `main_grad` the backward, or that of `piece`, adds a gradient that is complete then."""
        captured = self.captured
        return self._gradients.with_main_grad(captured.touched if piece is None else captured.completed[piece])
