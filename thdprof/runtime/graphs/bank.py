"""Buckets x slots of captured passes: leases from forward to the end of backward, one memory pool a slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.offload.plan import Choice, OffloadPlan
from thdprof.runtime.graphs.capture import CapturedPass, GradientBuffers, WarmupError, capture_pass
from thdprof.runtime.offload.copies import CudaMover, HostBuffers
from thdprof.runtime.offload.saved_tensors import EagerOffload, PassOffload
from thdprof.runtime.padding import Boundaries, PackedSequence, document_of_tokens, fill_padded

logger = logging.getLogger(__name__)

_ALIGNED = 64
"""Integers to whose multiple the start of seq_idx is rounded up: kernels are compiled anew for less than 16 bytes."""
_STAGING_BUFFERS = 4
"""Pinned buffers of a slot, so that the host can run this many micro-batches ahead before it waits."""

Call = Callable[[Sequence[torch.Tensor], PackedSequence], Any]
"""Runs the module on tensors and metadata."""


class _Staging:
    """A pinned buffer and the event after which the host may write it again."""

    def __init__(self, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.array: NDArray[np.int32] = self.pinned.numpy()
        self.copied = torch.cuda.Event()


class Metadata:
    """The static metadata of a slot, which the graphs of all its buckets read."""

    def __init__(
        self, buckets: Sequence[Bucket], *, with_padded: bool, with_seq_idx: bool, device: torch.device
    ) -> None:
        self._num_boundaries = max(b.max_seqs for b in buckets) + 1
        self._with_padded, self._with_seq_idx = with_padded, with_seq_idx
        self._idx_begins = -(-self._num_boundaries * (2 if with_padded else 1) // _ALIGNED) * _ALIGNED
        size = self._idx_begins + (max(b.n_tokens * b.cp_size for b in buckets) if with_seq_idx else 0)
        self._metadata = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [_Staging(size) for _ in range(_STAGING_BUFFERS)]
        self._next = 0

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read: views of these buffers."""
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
        """Queue the padded boundaries of one micro-batch into the static buffers; never waits for the GPU's queue."""
        valid, memory = boundaries.valid, boundaries.in_memory
        if isinstance(valid, torch.Tensor) or isinstance(memory, torch.Tensor):
            self._stage_from_device(boundaries, bucket)
            return
        staging = self._staging[self._next]
        self._next = (self._next + 1) % _STAGING_BUFFERS
        staging.copied.synchronize()  # the pinned memory may be written again
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
            assert boundaries.seq_idx is not None  # whoever wants it says so in every micro-batch
            static.seq_idx.copy_(boundaries.seq_idx)
        for target, given in pairs:
            assert isinstance(given, torch.Tensor)
            target[: len(given)].copy_(given)
            target[len(given) :] = given[-1]


class Slot:
    """Static buffers and the graphs over them. Only one of its buckets is alive at a time."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        *,
        with_padded: bool,
        with_seq_idx: bool,
        device: torch.device,
    ) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.host = HostBuffers()
        self.passes: dict[Bucket, CapturedPass] = {}
        self.busy = self.closed = False
        self.inputs = [
            torch.zeros_like(t, memory_format=torch.contiguous_format).requires_grad_(t.requires_grad) for t in tensors
        ]
        self._output_grads: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._metadata = Metadata(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx, device=device)

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read."""
        return self._metadata.packed(bucket)

    def stage_metadata(self, boundaries: Boundaries, bucket: Bucket) -> None:
        """Queue the padded boundaries of one micro-batch into the static metadata."""
        self._metadata.stage(boundaries, bucket)

    def output_grads(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Static buffers for the gradients of `heads`, shared by the slot's buckets whose outputs are alike."""
        key = tuple((h.shape, h.dtype) for h in heads)
        if key not in self._output_grads:
            self._output_grads[key] = [torch.zeros_like(h, memory_format=torch.contiguous_format) for h in heads]
        return self._output_grads[key]

    def stage_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies of one micro-batch's tensors into the static inputs."""
        for static, given in zip(self.inputs, tensors, strict=True):
            static.detach().copy_(given)


class Lease:
    """A slot held by one micro-batch from its forward to the end of its backward, or until it is dropped."""

    def __init__(self, slot: Slot, bucket: Bucket, gradients: GradientBuffers, on_backward: Callable[[], None]) -> None:
        self.slot, self.bucket, self.captured = slot, bucket, slot.passes[bucket]
        self._gradients, self._on_backward = gradients, on_backward
        self._held = True
        slot.busy = True

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> tuple[torch.Tensor, ...]:
        """Replay the forward graph; the outputs are copies, the caller's to keep."""
        self.slot.stage_metadata(boundaries, self.bucket)
        self.slot.stage_inputs(tensors)
        self.captured.forward.replay()
        return tuple(o.clone() for o in self.captured.outputs)

    def backward(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward graph and give the slot back; the input gradients are copies, the caller's to keep.

        Raises:
            RuntimeError: a second backward of the same micro-batch: its activations may be overwritten by now.
        """
        if not self._held:
            raise RuntimeError(
                "a replayed micro-batch was backpropagated a second time; its slot is given back after the first: "
                "run it eagerly (thdprof.runtime.GraphedModule.eager) where a graph must be kept"
            )
        if self.slot.closed:
            raise RuntimeError("the graphs were closed or dropped before the backward of a replayed micro-batch")
        heads = (i for i, d in enumerate(self.captured.differentiable) if d)
        for static, position in zip(self.captured.output_grads, heads, strict=True):
            grad = output_grads[position]
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        self._gradients.attach(self.captured.touched)
        self.captured.backward.replay()
        found = [g.clone() if g is not None else None for g in self.captured.input_grads]
        self.release()
        self._on_backward()
        self._gradients.run_hooks(self.captured.touched)
        return found

    def accumulated_elsewhere(self) -> list[nn.Parameter]:
        """Parameters whose gradient the backward adds to `main_grad`; their `.grad` stays as it is."""
        return self._gradients.with_main_grad(self.captured.touched)

    def release(self) -> None:
        """Give the slot back."""
        if self._held:
            self._held = False
            self.slot.busy = False

    def __del__(self) -> None:
        """A micro-batch whose outputs were dropped without a backward gives its slot back too."""
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a module touches outside itself, and who must hear of its captures and replays."""

    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Tensors that a pass changes besides buffers and gradients; captures leave them as they were."""
    while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every warm-up and capture."""
    on_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, before hooks of parameters run."""
    communicates: bool = False
    """Whether its passes communicate with other ranks: one that failed half-way has then put them out of step."""


@dataclass(slots=True, kw_only=True)
class BankOptions:
    """What a bank is made for."""

    buckets: Sequence[Bucket]
    num_slots: int
    generators: Sequence[torch.Generator]
    """Every CUDA generator that the module draws from."""
    with_padded: bool = False
    """Whether boundaries come with padded ones."""
    with_seq_idx: bool = False
    on_capture: Callable[[], None] = lambda: None
    """Called after every capture."""
    surroundings: Surroundings
    """What the module touches outside itself."""
    offload: Choice | None = None
    """Which activations are on the host between forward and backward."""


class Placement:
    """Where a module's parameters and buffers lay when its graphs were captured."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [
            (owner._parameters, name, p, p.data_ptr(), (p.requires_grad, bool(p._backward_hooks)))
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]
        self._buffers = [
            (owner._buffers, name, b, b.data_ptr())
            for owner in module.modules()
            for name, b in owner._buffers.items()
            if b is not None
        ]

    def check(self) -> None:
        """Make sure that everything lies where it did.

        Raises:
            RuntimeError: a parameter moved in memory since the captures, so that graphs would read what is given back,
                or was frozen or unfrozen.
        """
        for home, name, parameter, pointer, marks in self._parameters:
            if (parameter.requires_grad, bool(parameter._backward_hooks)) != marks:
                raise RuntimeError(
                    f"requires_grad of a parameter of shape {tuple(parameter.shape)} changed after its graphs were "
                    "captured, or it got a gradient hook; call recapture()"
                )
            if home[name] is not parameter or parameter.data_ptr() != pointer:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} moved in memory after its graphs were captured; "
                    "load and move weights before the first micro-batch, or call recapture()"
                )
        for buffers, name, buffer, pointer in self._buffers:
            if buffers[name] is not buffer or buffer.data_ptr() != pointer:
                raise RuntimeError(
                    f"buffer {name} was replaced or moved after its graphs were captured; call recapture()"
                )


def refuse_half_a_pass(error: Exception, surroundings: Surroundings) -> None:
    """Do not go on eagerly after a warm-up pass that stopped on this rank alone.

    Raises:
        RuntimeError: other ranks are inside communication that this one has left, so that any number could be wrong.
    """
    if surroundings.communicates and isinstance(error, WarmupError):
        raise RuntimeError(
            f"a pass before a capture failed on this rank ({error}), while others communicate with it: training cannot "
            "go on; with less memory for graphs (--graph-memory-gib, --buckets) or graphs.impl none it could"
        ) from error


class Bank:
    """All captured passes of one module."""

    def __init__(self, module: nn.Module, call: Call, tensors: Sequence[torch.Tensor], options: BankOptions) -> None:
        device = tensors[0].device
        self._module, self._call, self._options = module, call, options
        self._stream, self._outwards, self._inwards = (torch.cuda.Stream(device) for _ in range(3))
        self._gradients = GradientBuffers.of([p for p in module.parameters() if p.requires_grad])
        self._placement: Placement | None = None  # layers may make buffers in the first pass
        self.slots = [
            Slot(
                tensors,
                options.buckets,
                with_padded=options.with_padded,
                with_seq_idx=options.with_seq_idx,
                device=device,
            )
            for _ in range(options.num_slots)
        ]
        self.failures: dict[Bucket, str] = {}
        """Buckets that could not be captured, and why."""
        self._eager = EagerOffload(self._outwards, self._inwards)

    def capture(self, slot: Slot, bucket: Bucket) -> CapturedPass | None:
        """The pass of `bucket` in `slot`, captured now if it is not yet; None if that has failed."""
        if bucket in slot.passes:
            return slot.passes[bucket]
        if bucket in self.failures:
            return None
        packed = slot.packed(bucket)
        slot.stage_metadata(sample_boundaries(bucket), bucket)
        try:
            with self._options.surroundings.while_capturing():
                slot.passes[bucket] = capture_pass(
                    self._module,
                    lambda: self._call(slot.inputs, packed),
                    inputs=slot.inputs,
                    static_output_grads=slot.output_grads,
                    gradients=self._gradients,
                    generators=self._options.generators,
                    pool=slot.pool,
                    stream=self._stream,
                    extra_state=self._options.surroundings.extra_state,
                    offload=self._offload_of(slot),
                )
        except Exception as error:
            refuse_half_a_pass(error, self._options.surroundings)
            self.failures[bucket] = f"{type(error).__name__}: {error}"
            logger.warning("capture of %s failed, it will run eagerly: %s", bucket, self.failures[bucket])
            return None
        self._placement = self._placement or Placement(self._module)
        logger.info("captured %s: %.1f MiB", bucket, slot.passes[bucket].pool_bytes / 2**20)
        self._options.on_capture()
        return slot.passes[bucket]

    def capture_all(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture every bucket in every slot, the largest first, so that the smaller ones fit into its memory."""
        work = [(slot, bucket) for slot in self.slots for bucket in sorted(self._options.buckets, reverse=True)]
        for done, (slot, bucket) in enumerate(work):
            progress(done, len(work))
            self.capture(slot, bucket)
        progress(len(work), len(work))

    def lease(self, bucket: Bucket) -> Lease | FallbackReason:
        """A free slot for `bucket`, or why there is none.

        Raises:
            RuntimeError: a parameter moved in memory since the captures, so that graphs would read what is given back,
                or was frozen or unfrozen.
        """
        if self._placement is not None:
            self._placement.check()
        free = [slot for slot in self.slots if not slot.busy]
        for slot in free:
            if self.capture(slot, bucket) is not None:
                return Lease(slot, bucket, self._gradients, self._options.surroundings.on_backward)
        return FallbackReason.capture_failed if free else FallbackReason.no_free_slot

    def _offload_of(self, slot: Slot) -> PassOffload | None:
        if self._options.offload is None:
            return None
        mover = CudaMover(self._stream, self._outwards, self._inwards)
        return PassOffload(self._module, self._options.offload, mover, slot.host, slot.inputs)

    def offloaded(self) -> OffloadPlan | None:
        """What a slot moves for its largest bucket; None where nothing was captured or nothing is moved."""
        found = [(bucket, p.offload) for slot in self.slots for bucket, p in slot.passes.items() if p.offload]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def eager_offload(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Around an eager forward of `inputs`: moves what the largest bucket's would."""
        plan = self.offloaded() if torch.is_grad_enabled() else None
        return nullcontext() if plan is None else self._eager.forward(plan, inputs)

    def host_bytes(self) -> int:
        """Bytes of pinned host memory, of all slots and of eager passes."""
        return self._eager.nbytes() + sum(slot.host.nbytes() for slot in self.slots)

    def pool_bytes(self) -> int:
        """Bytes that all slots' pools hold."""
        return sum(p.pool_bytes for slot in self.slots for p in slot.passes.values())

    def close(self) -> None:
        """Free all graphs and their memory; the parameters' gradients stay. Leases still held become useless."""
        torch.cuda.synchronize()
        for slot in self.slots:
            slot.closed = True
            for captured in slot.passes.values():
                captured.forward.reset()
                captured.backward.reset()
            slot.passes.clear()
        self.slots.clear()


def sample_boundaries(bucket: Bucket) -> Boundaries:
    """Boundaries for warming up: documents of equal length that cover all tokens, where the bucket's can.

    Context parallelism cuts a document into 2 * cp_size parts of equal length, and reads outside its buffers where
    boundaries leave a tail.
    """
    tokens, parts = bucket.n_tokens * bucket.cp_size, 2 * bucket.cp_size if bucket.cp_size > 1 else 1
    longest = max(bucket.max_seqlen // parts, 1) * parts
    length = min(longest, -(-tokens // bucket.max_seqs))
    length = min(longest, -(-length // parts) * parts)
    return Boundaries(valid=np.minimum(np.arange(bucket.max_seqs + 1) * length, tokens).astype(np.int32))
