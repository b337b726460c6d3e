"""Buckets x slots of captured passes: leases from forward to the end of backward, one memory pool a slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.offload.plan import Choice, OffloadPlan
from thdprof.runtime.graphs.capture import CapturedPass, capture_pass
from thdprof.runtime.graphs.gradients import GradientBuffers
from thdprof.runtime.graphs.module_state import Placement
from thdprof.runtime.graphs.slots import Lease, Slot
from thdprof.runtime.graphs.static_metadata import sample_boundaries
from thdprof.runtime.graphs.surroundings import Surroundings, refuse_half_a_pass
from thdprof.runtime.offload.copies import CudaMover
from thdprof.runtime.offload.passes import EagerOffload, PassOffload
from thdprof.runtime.padding import PackedSequence

logger = logging.getLogger(__name__)
Call = Callable[[Sequence[torch.Tensor], PackedSequence], Any]
"""Runs the module on tensors and metadata."""


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
        packed = slot.metadata.packed(bucket)
        slot.metadata.stage(sample_boundaries(bucket), bucket)
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
