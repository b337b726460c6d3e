"""The bank: every captured pass of one module, one for each bucket in each slot, and the leases on them.

Captures succeed on every rank that shares their collectives, or on none. A rank that replays while a peer runs eagerly
would hold its group back, or replay other collectives than its peer: so ranks that communicate inside captured passes
agree about every capture, in the order in which all of them make them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import WATCHED_BYTES, WATCHED_COPIES, Bucket, FallbackReason
from thdprof.offload.plan import OffloadPlan
from thdprof.runtime import teardown
from thdprof.runtime.agreement import alone
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.capture import capture_pass
from thdprof.runtime.graphs.failed_captures import (
    cause_of_warmup,
    is_programming_error,
    refuse_half_a_pass,
    refuse_lost_state,
)
from thdprof.runtime.graphs.module_state import GradientBuffers, Placement, changes_since, remember_state
from thdprof.runtime.graphs.slots import FreeSlots, Lease, Metadata, ReplayOrder, Slot, SlotMemory, sample_boundaries
from thdprof.runtime.graphs.watch.twin import Subject, missing_bytes
from thdprof.runtime.offload import EagerOffload, Mover, PassOffload
from thdprof.runtime.options import GraphOptions, Surroundings
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.random_states import RegisteredStates, with_default
from thdprof.runtime.stats import Captured

logger = logging.getLogger(__name__)

ELSEWHERE = "it failed on another rank, which shares its collectives; that rank's log says why"
"""The reason of a capture that this rank has dropped although it succeeded here."""


class AgreedCaptures[SomeSlot: SlotMemory]:
    """Captures buckets in slots, on all peers together."""

    def __init__(
        self,
        make: Callable[[SomeSlot, Bucket], int],
        *,
        agreed: Callable[[bool], bool],
        surroundings: Surroundings,
        on_capture: Callable[[Captured], None],
        judged: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        """Captures that `make` makes, which returns the bytes by which the slot's pool grew.

        `agreed` says whether what succeeded here has succeeded on every peer; all call it together. `judged` returns
        the error as which a failure is judged: a WarmupError may be fatal.
        """
        self._make, self._agreed, self._surroundings = make, agreed, surroundings
        self._on_capture, self._judged = on_capture, judged
        self.failures: dict[Bucket, str] = {}
        """Buckets that could not be captured, and the reason of each."""

    def has(self, slot: SomeSlot, bucket: Bucket) -> bool:
        """Whether `slot` has graphs of `bucket`, as on all peers; they are captured now if they were not before.

        If a capture fails here or on a peer, the slot begins anew on all of them: the memory that the failed capture
        took is given back, and the buckets that the slot had are captured again.

        Raises:
            RuntimeError: a pass before the capture failed while peers communicate with it, a failed capture left torch
                in a state that could not be put right, or a peer met a programming error.
            Exception: a programming error, as it was raised here.
        """
        if bucket in slot.held():
            return True
        if bucket in self.failures:
            return False
        reason, grown, begun = "", 0, perf_counter()
        bug: BaseException | None = None  # no other error is kept: its traceback holds memory of the failed capture
        try:
            grown = self._make(slot, bucket)
        except Exception as error:
            refuse_lost_state(error)
            refuse_half_a_pass(self._judged(error), self._surroundings)
            reason = f"{type(error).__name__}: {error}"
            bug = cause_of_warmup(error) if is_programming_error(error) else None
        if self._agreed(not reason):
            self._on_capture(Captured(bucket=bucket, seconds=perf_counter() - begun, pool_bytes=grown))
            return True
        self.failures[bucket] = reason or ELSEWHERE
        if not self._agreed(bug is None):  # peers, too, are here only after a failure: all of them end together
            raise bug or RuntimeError(f"capture of {bucket} met a bug on another rank; that rank's log says which")
        logger.warning("capture of %s failed, its micro-batches run eagerly: %s", bucket, self.failures[bucket])
        again = [other for other in slot.held() if other != bucket]
        slot.begin_anew()
        gc.collect()  # tensors of the failed capture may be in cycles
        torch.cuda.empty_cache()
        for other in again:
            self.has(slot, other)
        return False

    def all_of(self, slots: Sequence[SomeSlot], buckets: Sequence[Bucket]) -> Iterator[tuple[SomeSlot, Bucket]]:
        """Capture every bucket in every slot, and yield each pair before its capture.

        The largest bucket comes first, so that the others fit into its memory; the order is that of all peers.
        """
        for slot in slots:
            for bucket in sorted(buckets, reverse=True):
                yield slot, bucket
                self.has(slot, bucket)


class Bank:
    """All captured passes of one module. It owns the slots and the parameters' gradient buffers until `close`."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Sequence[torch.Tensor], PackedSequence], Any],
        sample: Call,
        buckets: Sequence[Bucket],
        options: GraphOptions,
        *,
        find_generators: Callable[[], Sequence[torch.Generator]],
        on_capture: Callable[[Captured], None],
        is_joint: bool,
    ) -> None:
        """A bank without graphs of `module`, which `call` runs on static tensors and metadata.

        Args:
            sample: a micro-batch on the GPU, after which the static inputs are shaped.
            find_generators: returns the CUDA generators, besides the default one, from which the module draws now;
                those of this moment are registered with the graphs.
            on_capture: called after every capture that succeeded.
            is_joint: whether ranks that share collectives run every micro-batch together, and take the same slots.
        """
        self._device = device = sample.tensors[0].device
        self._module, self._call, self._options, self._on_capture = module, call, options, on_capture
        self._stream, self._outwards, self._inwards = (torch.cuda.Stream(device) for _ in range(3))
        self._gradients = GradientBuffers.allocate(
            [p for p in module.parameters() if p.requires_grad], all_are_inputs=options.reduced_by_hooks
        )
        self._find_generators = lambda: with_default(device, find_generators())
        self._generators = self._find_generators()
        self._states = RegisteredStates(self._generators)
        self._placement: Placement | None = None  # made after the first capture: layers may make buffers in it
        self.slots = [Slot(buckets, sample) for _ in range(options.num_slots)]
        """The slots; none after `close`."""
        self._free, self._order = FreeSlots(options.agreed if is_joint else alone), ReplayOrder(device)
        self.captures = AgreedCaptures(
            self._make, agreed=options.agreed, surroundings=options.surroundings, on_capture=self._captured
        )
        self._eager = EagerOffload(self._outwards, self._inwards)

    def _make(self, slot: Slot, bucket: Bucket) -> int:
        """Capture `bucket` in `slot`; returns the bytes by which the slot's pool grew."""
        packed = slot.metadata.packed(bucket)
        slot.metadata.stage(sample_boundaries(bucket), bucket)
        options, around = self._options, self._options.surroundings
        offload = None
        if options.offload is not None:
            mover = Mover(self._stream, self._outwards, self._inwards)
            offload = PassOffload(self._module, options.offload, mover, slot.host, slot.inputs)
        with around.while_capturing(), around.quantizing():
            slot.passes[bucket] = capture_pass(
                self._module,
                lambda: self._call(slot.inputs, packed),
                inputs=slot.inputs,
                static_output_grads=slot.output_grads,
                gradients=self._gradients,
                generators=self._generators,
                pool=slot.pool,
                stream=self._stream,
                options=options,
                offload=offload,
            )
        return slot.passes[bucket].pool_bytes

    def _captured(self, captured: Captured) -> None:
        self._placement = self._placement or Placement(self._module, self._options.surroundings.runs_hook)
        self._on_capture(captured)

    def lease(self, bucket: Bucket, slot: int | None = None) -> Lease | FallbackReason:
        """A lease of slot number `slot`, or of the first free one, for `bucket`; or the reason why there is none.

        Raises:
            RuntimeError: the module or a random state was changed since the captures; or as `AgreedCaptures.has`.
        """
        if self._placement is not None:
            self._placement.check()
        self._check_states()
        free = self._free.find(self.slots, slot)
        for one in free:
            if self.captures.has(one, bucket):
                return Lease(one, bucket, self._gradients, self._order, self._options.surroundings)
        return FallbackReason.capture_failed if free else FallbackReason.no_free_slot

    def changed(self) -> str:
        """How the module, its `main_grad`s or its random states differ from those that were captured; "" if not."""
        changed = changes_since(self._placement, self._gradients.check, self._check_states)
        return changed or self._options.surroundings.changed()

    def _check_states(self) -> None:
        self._states.check(self._find_generators())

    def remember_state(self) -> Callable[[], None]:
        """A function that puts back what a replayed forward is about to change besides its outputs."""
        return remember_state(self._module, self._generators, self._options.surroundings.extra_state)

    def subject(self) -> Subject:
        """The module as its graphs were captured, for an eager run that a replay must agree with."""
        return Subject(
            module=self._module,
            call=self._call,
            generators=self._generators,
            surroundings=self._options.surroundings,
            around=self._options.surroundings.repeating(),
            around_forward=self.eager_offload,
        )

    def missing_for_eager(self, slot: Slot) -> int:
        """Bytes of GPU memory that are missing to run a micro-batch of `slot` eagerly, and to compare; 0 if it fits."""
        largest = max((b.nbytes for b in self._gradients.buffers), default=0)
        others = (WATCHED_COPIES + bool(self._options.cuts)) * max(largest, WATCHED_BYTES)
        return missing_bytes(slot.inputs[0].device, slot_bytes=slot.pool_bytes(), others=others)

    def metadata_of(self, call: Call, bucket: Bucket) -> PackedSequence:
        """One micro-batch's metadata as the graphs of `bucket` read it, in memory of its own."""
        metadata = Metadata([bucket], call.packed, self._device)
        metadata.stage(call.boundaries, bucket)
        return metadata.packed(bucket)

    def offloaded(self) -> OffloadPlan | None:
        """The offload plan of the largest captured bucket; None where nothing was captured or all activations stay."""
        plans = [(bucket, p.offload) for slot in self.slots for bucket, p in slot.passes.items() if p.offload]
        return max(plans, key=lambda pair: pair[0])[1] if plans else None

    def eager_offload(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A context for an eager forward of `inputs`, which moves the same storages as the largest bucket's pass."""
        plan = self.offloaded() if torch.is_grad_enabled() else None
        return nullcontext() if plan is None else self._eager.forward(plan, inputs)

    def host_bytes(self) -> int:
        """Bytes of pinned host memory, also of eager passes."""
        return self._eager.nbytes() + sum(slot.host.nbytes() for slot in self.slots)

    def close(self) -> None:
        """Free all graphs; gradients stay. A held lease's backward then raises. Any thread may call it."""
        teardown.wait_for_gpu(self._device)
        with teardown.LAUNCH:
            for slot in self.slots:
                slot.close()
            self.slots.clear()
        self._options.surroundings.forget()
