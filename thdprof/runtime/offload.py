"""Saved tensors in host memory between forward and backward, around captured passes and eager ones.

A tensor that autograd keeps for a backward is a saved tensor; several may be views of one storage. Whole storages move
to host memory after the forward, and back before the backward needs them. Order makes this safe, without the
allocator's record of streams, which a capture would keep until its end:

- A storage is dropped from the device only after the computing stream has waited for its copy to the host.
- Memory for a reload is allocated on the computing stream, and the copying stream waits for that before it writes.
- No copy is under way at the end of a forward or a backward, so that each of them can be a graph of its own.

Host memory is pinned outside captures. It belongs to a slot, because it holds the activations of the micro-batch that
holds the slot. Tensors that an autograd function keeps without `save_for_backward` are never moved.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from thdprof.offload.plan import NOT_MOVED, Choice, OffloadPlan, SavedStorage, plan_offload

logger = logging.getLogger(__name__)


class Mover:
    """Copies to the host (`outwards`) and back (`inwards`) over side streams, both ordered with `compute`."""

    def __init__(self, compute: torch.cuda.Stream, outwards: torch.cuda.Stream, inwards: torch.cuda.Stream) -> None:
        self.device = compute.device
        self._compute, self._outwards, self._inwards = compute, outwards, inwards

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory: uint8, shape [nbytes]. A capture does not allow it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def out(self, host: torch.Tensor, device: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy from `device` to `host` after all work queued on the computing stream; returns its event."""
        return self._copy(self._outwards, host, device)

    def back(self, device: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy from `host` to `device`, which was allocated on the computing stream; returns its event."""
        return self._copy(self._inwards, device, host)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        ready, copied = torch.cuda.Event(), torch.cuda.Event()
        ready.record(self._compute)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        copied.record(stream)
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        """Make the computing stream wait for the copy's event."""
        self._compute.wait_event(copied)

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which the stream that computes is the current one, on whatever thread."""
        return torch.cuda.stream(self._compute)

    def is_computing(self) -> bool:
        """Whether the current stream is the one that computes."""
        return bool(torch.cuda.current_stream(self.device) == self._compute)


class HostBuffers:
    """Pinned host memory of one slot. Its buckets share it, because only one bucket of a slot is in use at a time."""

    def __init__(self) -> None:
        self.slabs: list[torch.Tensor] = []
        """Pieces of pinned memory: uint8, shape [bytes]. They are kept until this object is dropped."""

    def reserve(self, mover: Mover, sizes: Sequence[int]) -> list[torch.Tensor]:
        """One slab of at least as many bytes for each of `sizes`, of those that exist or else newly pinned."""
        free, taken = sorted(self.slabs, key=len), []
        for size in sizes:
            slab = next((s for s in free if len(s) >= size), None)
            if slab is None:
                slab = mover.pinned(size)
                self.slabs.append(slab)
            else:
                free = [s for s in free if s is not slab]
            taken.append(slab)
        return taken

    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(len(slab) for slab in self.slabs)


class OffloadError(RuntimeError):
    """A pass saved other tensors than the pass from which the plan was made."""


@dataclass(slots=True, eq=False)
class MovedStorage:
    """One storage that one pass moves to the host."""

    host: torch.Tensor
    """Host memory of its bytes: uint8, shape [bytes]; part of a slab of the slot."""
    device: torch.Tensor | None = None
    """Its bytes on the device: uint8, shape [bytes]; None while they are in host memory only."""
    copied: Any = None
    """The mover's token of the copy to the host; None before the copy begins and after it was waited for."""
    reloaded: Any = None
    """The mover's token of the copy back to the device; None before the copy begins and after it was waited for."""
    views: int = 0
    """Number of the storage's saved tensors that no backward has read yet."""


@dataclass(slots=True, eq=False)
class Handle:
    """The object that autograd keeps in place of a saved tensor that is moved: its storage, and its view of it."""

    entry: MovedStorage
    dtype: torch.dtype
    offset: int
    """Elements between the storage's begin and the tensor's."""
    size: torch.Size
    stride: tuple[int, ...]
    was_read: bool = False

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor, as a view of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


COUNTED_TYPES = (torch.Tensor, nn.Parameter)
"""Types of saved tensors that have a position in the plan. Others stay on the device: a compiler's stand-ins, for
example, appear in the first pass only."""


class StorageNumbers:
    """Chooses which saved tensors may be offloaded, and numbers their storages.

    Skipped are parameters and inputs, which are resident anyway; storages of fewer than `min_bytes` bytes, such as
    boundaries', of which a graph may share one; and tensors saved on another CUDA stream than the computing one, as by
    shared experts, because copies are ordered with that stream only.
    """

    def __init__(self, mover: Mover, min_bytes: int, inputs: Sequence[torch.Tensor]) -> None:
        self._mover, self._min_bytes = mover, max(1, min_bytes)
        self._inputs = {t.untyped_storage()._cdata for t in inputs}
        self._seen: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []
        """Weak references to the storages, by number; they keep a storage's address from being given to another one."""

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, in the order of their first tensors; NOT_MOVED if it is skipped."""
        # a view that a function's forward made of its input looks like a leaf; its base tells whether it is one
        source = tensor._base if tensor._base is not None else tensor
        is_leaf = source.is_leaf and source.requires_grad
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not is_plain or is_leaf or tensor.device != self._mover.device or tensor.is_conj() or tensor.is_neg():
            return NOT_MOVED
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not self._mover.is_computing() or key in self._inputs or storage.nbytes() < self._min_bytes:
            return NOT_MOVED
        if key not in self._seen:
            self._seen[key] = len(self.references)
            self.references.append(StorageWeakRef(storage))
        return self._seen[key]


def kept_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd gets for a saved tensor that stays: detached, so that no output keeps itself alive; or a leaf."""
    return tensor if tensor.is_leaf else tensor.detach()


def handle_of(entry: MovedStorage, tensor: torch.Tensor) -> Handle:
    """The handle of `tensor`, a view of the storage `entry`, which a backward has yet to ask for."""
    entry.views += 1
    return Handle(entry, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as one tensor over the same memory: uint8, shape [bytes], on the storage's device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Discovery:
    """A pass that copies every storage it may move to the host at once, which a capture does not allow, and sees which
    storages that releases.
    """

    def __init__(self, module: nn.Module, mover: Mover, choice: Choice, inputs: Sequence[torch.Tensor]) -> None:
        """A pass over `module`, the names of whose submodules tell who saved a tensor. `inputs` are never moved."""
        self._module, self._mover, self._choice = module, mover, choice
        self._numbers = StorageNumbers(mover, choice.min_bytes, inputs)
        self._at: list[int] = []
        self._hosts: list[torch.Tensor] = []  # copies of the storages' bytes, by number
        self._modules: list[dict[str, None]] = []  # names of those that saved their tensors
        self._running: list[str] = [""]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward inside this context, at whose end `plan` is made; its outputs must still be alive then."""
        with self._names(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        gc.collect()  # free storages that only reference cycles keep alive
        self.plan = plan_offload(self._at, self._storages(), self._choice)

    def _storages(self) -> list[SavedStorage]:
        last = {number: position for position, number in enumerate(self._at)}
        first = {number: position for position, number in reversed([*enumerate(self._at)])}
        return [
            SavedStorage(
                nbytes=len(self._hosts[number]),
                modules=tuple(self._modules[number]),
                first=first[number],
                last=last[number],
                released=reference.expired(),
            )
            for number, reference in enumerate(self._numbers.references)
        ]

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Keep the stack of the submodules that run, so that a saved tensor is known by the innermost one."""
        handles = []
        for name, part in self._module.named_modules():

            def begins(module: nn.Module, args: Any, name: str = name) -> None:
                self._running.append(name)

            def ends(module: nn.Module, args: Any, output: Any) -> None:
                self._running.pop()

            handles += [part.register_forward_pre_hook(begins), part.register_forward_hook(ends, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in COUNTED_TYPES:
            return tensor
        number = self._numbers.number(tensor)
        self._at.append(number)
        if number == NOT_MOVED:
            return kept_on_device(tensor)
        whole = bytes_of(tensor.untyped_storage())
        if number == len(self._hosts):
            self._hosts.append(torch.empty(len(whole), dtype=torch.uint8))
            self._modules.append({})
        self._modules[number][self._running[-1]] = None
        # copied anew for every tensor of the storage, whose other parts may have been written since
        self._hosts[number].copy_(whole)
        return handle_of(MovedStorage(host=self._hosts[number]), tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with self._mover.computing():
            return saved.view_of(saved.entry.host.to(self._mover.device).untyped_storage())  # type: ignore[no-any-return]


def report(plan: OffloadPlan, choice: Choice) -> None:
    """Log how many bytes a plan moves; warn when the choice moves nothing."""
    if plan.offloaded_bytes:
        logger.info(
            "activations to the host: %.1f of %.1f MiB, %.1f MiB less on the device",
            plan.offloaded_bytes / 2**20,
            plan.saved_bytes / 2**20,
            plan.device_bytes_freed / 2**20,
        )
    elif choice.fraction > 0:
        logger.warning(
            "offloading moves nothing: %s saves no tensor of at least %d bytes that only a backward needs",
            ", ".join(choice.modules),
            choice.min_bytes,
        )


class PlannedMoves:
    """One pass that moves the storages that its plan names, through the host memory that it is given.

    With `strict`, a pass that saves other tensors than the plan expects is an error. Without, a storage that does not
    agree with the plan stays on the device, and so do all storages after the first tensor of an unexpected storage.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        hosts: Sequence[torch.Tensor],
        mover: Mover,
        inputs: Sequence[torch.Tensor],
        *,
        strict: bool,
    ) -> None:
        """`hosts` is pinned memory of each of the plan's slabs: uint8, shape [bytes]. `inputs` are never moved."""
        self._plan, self._hosts, self._mover, self._strict = plan, hosts, mover, strict
        self._numbers = StorageNumbers(mover, plan.min_bytes, inputs)
        self._position = 0
        self._entries: dict[int, MovedStorage] = {}
        self._outward: deque[MovedStorage] = deque()
        self._outward_bytes = self._ahead_bytes = 0
        self._order = plan.reload_order()
        self._following = 0
        self._agrees = True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward inside this context, on the computing stream; OffloadError where a strict pass saves other
        tensors than the plan expects.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._arrive(0)
        if self._position != (expected := len(self._plan.storage_at)):
            self._note_change(f"{self._position} tensors were saved for backward, {expected} in the pass before")

    def begin_backward(self) -> None:
        """Begin to reload the storages that the backward needs first."""
        with self._mover.computing():
            self._look_ahead()

    def finish(self) -> None:
        """End the backward: wait for the copies that nothing has waited for, and drop all storages."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            for copied in (entry.copied, entry.reloaded):
                if copied is not None:
                    self._mover.wait(copied)
            entry.device = entry.copied = entry.reloaded = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in COUNTED_TYPES:
            return tensor
        position, self._position = self._position, self._position + 1
        number = self._numbers.number(tensor)
        expected = self._plan.storage_at[position] if position < len(self._plan.storage_at) else None
        if number != expected:
            self._agrees = False
            self._note_change(f"saved tensor {position} is of storage {number}, in the pass before of {expected}")
        if number == NOT_MOVED or not self._agrees:
            return kept_on_device(tensor)
        planned, place = self._plan.storages[number], self._plan.places[number]
        storage = tensor.untyped_storage()
        if place is None:
            return kept_on_device(tensor)
        if storage.nbytes() != planned.nbytes:
            change = f"a storage of {storage.nbytes()} bytes was saved, {planned.nbytes} bytes in the pass before"
            self._note_change(change)
            return kept_on_device(tensor)
        entry = self._entries.get(number)
        if entry is None:
            host = self._hosts[place.slab][place.offset :][: planned.nbytes]
            entry = self._entries[number] = MovedStorage(host=host, device=bytes_of(storage))
        if position == planned.last:
            assert entry.device is not None  # set when the storage's first tensor was saved
            entry.copied = self._mover.out(entry.host, entry.device)
            self._outward.append(entry)
            self._outward_bytes += planned.nbytes
            self._arrive(self._plan.window_bytes)
        return handle_of(entry, tensor)

    def _note_change(self, change: str) -> None:
        if self._strict:
            raise OffloadError(f"{change}: a module must save the same tensors in every pass")

    def _arrive(self, allowed_bytes: int) -> None:
        """Wait until at most `allowed_bytes` are on their way to the host; drop what has arrived from the device."""
        while self._outward_bytes > allowed_bytes:
            entry = self._outward.popleft()
            self._outward_bytes -= len(entry.host)
            self._mover.wait(entry.copied)
            entry.device = entry.copied = None

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        entry: MovedStorage = saved.entry
        with self._mover.computing():
            if entry.device is None:
                self._reload(entry)
            elif entry.reloaded is not None:
                self._ahead_bytes -= len(entry.host)
            if entry.reloaded is not None:
                self._mover.wait(entry.reloaded)
                entry.reloaded = None
            assert entry.device is not None
            tensor: torch.Tensor = saved.view_of(entry.device.untyped_storage())
            if not saved.was_read:
                saved.was_read = True
                entry.views -= 1
            if entry.views == 0:
                entry.device = None  # the tensors that the backward has read keep the memory
            self._look_ahead()
        return tensor

    def _reload(self, entry: MovedStorage) -> None:
        entry.device = torch.empty(len(entry.host), dtype=torch.uint8, device=self._mover.device)
        entry.reloaded = self._mover.back(entry.device, entry.host)

    def _look_ahead(self) -> None:
        """Begin to reload the storages that the backward needs next, up to the plan's window."""
        while self._following < len(self._order):
            entry = self._entries.get(self._order[self._following])
            if entry is not None and entry.device is None and entry.views > 0:
                if self._ahead_bytes + len(entry.host) > self._plan.window_bytes:
                    return
                self._reload(entry)
                self._ahead_bytes += len(entry.host)
            self._following += 1


class PassOffload:
    """Offloading of one captured pass, that is, of one bucket in one slot.

    The first forward, a warm-up, is a `Discovery` and makes the plan. Every later one, in a warm-up or a capture,
    follows it.
    """

    def __init__(
        self, module: nn.Module, choice: Choice, mover: Mover, buffers: HostBuffers, inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        """`buffers` is the slot's pinned memory; more is pinned when the plan is made. `inputs` are never moved."""
        self._module, self._choice, self._mover, self._buffers = module, choice, mover, buffers
        self._inputs = inputs
        self.plan: OffloadPlan | None = None
        """The plan that the passes follow; None until the first forward has run."""
        self._hosts: list[torch.Tensor] = []
        self._moves: PlannedMoves | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run every forward of the pass inside this context, at whose end its outputs must still be alive; OffloadError
        where a later pass saves other tensors than the first.
        """
        if self.plan is None:
            discovery = Discovery(self._module, self._mover, self._choice, self._inputs)
            with discovery.forward():
                yield
            self.plan = discovery.plan
            report(self.plan, self._choice)
            self._hosts = self._buffers.reserve(self._mover, self.plan.slabs)
            return
        self._moves = PlannedMoves(self.plan, self._hosts, self._mover, self._inputs, strict=True)
        with self._tidy(), self._moves.forward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run every backward of the pass inside this context."""
        with self._tidy():
            if self._moves is not None:
                self._moves.begin_backward()
            yield
            if self._moves is not None:
                self._moves.finish()
        self._moves = None

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """Leave no copy under way after an error, as far as a broken capture still allows waiting."""
        try:
            yield
        except BaseException:
            if self._moves is not None:
                with suppress(RuntimeError):
                    self._moves.finish()
            self._moves = None
            raise


class EagerOffload:
    """Offloading of eager passes, by the plan that a capture's warm-up made, as far as they save the same tensors.

    It owns the pinned memory of eager passes. A pass gives its memory back for the next one when a backward has read
    all its saved tensors, or when its autograd graph was dropped.
    """

    def __init__(self, outwards: torch.cuda.Stream, inwards: torch.cuda.Stream) -> None:
        """No pinned memory yet; copies run on the streams `outwards` (to the host) and `inwards` (back)."""
        self._streams = outwards, inwards
        self._free: list[HostBuffers] = []
        self._all: list[HostBuffers] = []

    def forward(self, plan: OffloadPlan, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A context for one eager forward of `inputs` on the current stream."""
        mover = Mover(torch.cuda.current_stream(self._streams[0].device), *self._streams)
        if not self._free:
            self._free.append(HostBuffers())
            self._all.append(self._free[0])
        self._free[-1].reserve(mover, plan.slabs)  # before the pop: if pinning fails, the buffers stay in the list
        buffers = self._free.pop()
        return EagerPass(plan, buffers, mover, inputs, self._free).forward()

    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(buffers.nbytes() for buffers in self._all)


class EagerPass(PlannedMoves):
    """One eager pass under a plan; it gives its pinned memory back when autograd has dropped the last saved tensor."""

    def __init__(
        self,
        plan: OffloadPlan,
        buffers: HostBuffers,
        mover: Mover,
        inputs: Sequence[torch.Tensor],
        free: list[HostBuffers],
    ) -> None:
        """A pass that has not begun; `buffers` is appended to `free` at its end."""
        super().__init__(plan, buffers.reserve(mover, plan.slabs), mover, inputs, strict=False)
        self._buffers, self._free = buffers, free

    def __del__(self) -> None:
        """The end of the pass: an eager backward has no event at its end, its saved tensors are dropped one by one."""
        self.finish()
        self._free.append(self._buffers)
