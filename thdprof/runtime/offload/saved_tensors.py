"""Activations on the host between forward and backward: copies on side streams, inside a capture or outside one.

Order makes it safe, not the allocator's record of streams, which a capture would keep until its end. A tensor is
dropped only after the stream that computes has waited for its copy, so that whatever reuses its memory runs later; the
memory for a reload is allocated on the stream that computes, which the copying stream waits for first. No copy is
under way at the end of a forward or a backward, so that each can be a graph of its own.

Host memory is pinned outside captures, and belongs to a slot, since a micro-batch in flight has its activations there.
Tensors that an autograd function keeps as attributes, without `save_for_backward`, are never moved.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from thdprof.offload.plan import NOT_MOVED, Choice, OffloadPlan, SavedStorage, plan_offload
from thdprof.runtime.offload.copies import CudaMover, HostBuffers, Mover

logger = logging.getLogger(__name__)


class OffloadError(RuntimeError):
    """A pass saved other tensors than the one that the plan was made from."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One storage of one pass that is moved."""

    host: torch.Tensor
    device: torch.Tensor | None = None
    """Its bytes on the device, uint8; None while they are on the host alone."""
    copied: Any = None
    """Says when it is on the host."""
    reloaded: Any = None
    """Says when it is back; None once it was waited for."""
    views: int = 0
    """Saved tensors of it that a backward has not asked for."""


@dataclass(slots=True, eq=False)
class _Handle:
    """What autograd keeps in place of a saved tensor."""

    entry: _Entry
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    asked: bool = False

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor, over `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


_COUNTED = (torch.Tensor, nn.Parameter)
"""Others are passed on and not counted: a compiler's stand-ins come in the first pass alone."""


class _Sight:
    """Which saved tensors a pass looks at, and which storages they are of.

    Not parameters and inputs, which are there anyway; not small ones, as boundaries, which may be views of one storage
    in a graph and of several outside it; and not what is saved on another stream than the one that computes, as by
    shared experts beside their layer's others: copies would be ordered with the wrong stream, in the backward too.
    """

    def __init__(self, mover: Mover, min_bytes: int, inputs: Sequence[torch.Tensor]) -> None:
        self._mover, self._min_bytes = mover, max(1, min_bytes)
        self._inputs = {t.untyped_storage()._cdata for t in inputs}
        self._seen: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []  # each also keeps its address from being given to another storage

    def number(self, tensor: torch.Tensor) -> int:
        """Number of the tensor's storage, in the order of their first saved tensors; NOT_MOVED: not looked at."""
        if not self._movable(tensor):
            return NOT_MOVED
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._inputs or storage.nbytes() < self._min_bytes:
            return NOT_MOVED
        if key not in self._seen:
            self._seen[key] = len(self.references)
            self.references.append(StorageWeakRef(storage))
        return self._seen[key]

    def _movable(self, tensor: torch.Tensor) -> bool:
        # a view that a function's forward made of its input passes for a leaf: what it is a view of tells
        source = tensor._base if tensor._base is not None else tensor
        leaf = source.is_leaf and source.requires_grad
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or leaf or tensor.device != self._mover.device or tensor.is_conj() or tensor.is_neg():
            return False
        return self._mover.is_computing()


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """What to give autograd for a tensor that stays: an output of the function that saves it must not keep itself."""
    return tensor if tensor.is_leaf else tensor.detach()


class Discovery:
    """A pass in which all that could be moved is, at once and without haste: shows what is saved, and what that keeps.

    Not during a capture.
    """

    def __init__(self, module: nn.Module, mover: Mover, choice: Choice, inputs: Sequence[torch.Tensor]) -> None:
        self._module, self._mover, self._choice = module, mover, choice
        self._sight = _Sight(mover, choice.min_bytes, inputs)
        self._at: list[int] = []
        self._hosts: dict[int, torch.Tensor] = {}
        self._modules: dict[int, list[str]] = {}
        self._sizes: list[int] = []
        self._running: list[str] = [""]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward; its outputs must be alive at the end."""
        with self._names(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        gc.collect()  # what only a cycle keeps is not kept
        self.plan = plan_offload(self._at, self._storages(), self._choice)

    def begin_backward(self) -> None:
        """Nothing is reloaded before it is asked for."""

    def finish(self) -> None:
        """Nothing is left to wait for."""

    def _storages(self) -> list[SavedStorage]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, number in enumerate(self._at):
            first.setdefault(number, position)
            last[number] = position
        return [
            SavedStorage(
                nbytes=nbytes,
                modules=tuple(dict.fromkeys(self._modules[number])),
                first=first[number],
                last=last[number],
                released=reference.expired(),
            )
            for number, (nbytes, reference) in enumerate(zip(self._sizes, self._sight.references, strict=True))
        ]

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Keep track of which module runs."""
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
        if type(tensor) not in _COUNTED:
            return tensor
        number = self._sight.number(tensor)
        self._at.append(number)
        if number == NOT_MOVED:
            return _kept(tensor)
        storage = tensor.untyped_storage()
        self._modules.setdefault(number, []).append(self._running[-1])
        if number == len(self._sizes):
            self._sizes.append(storage.nbytes())
        whole = _bytes_of(storage)
        if number not in self._hosts:
            self._hosts[number] = torch.empty(len(whole), dtype=torch.uint8)
        self._hosts[number].copy_(whole)  # again for every tensor of it: others may have been written since
        entry = _Entry(host=self._hosts[number])
        return _handle(entry, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with self._mover.computing():
            return saved.view_of(saved.entry.host.to(self._mover.device).untyped_storage())  # type: ignore[no-any-return]


class Offload:
    """One pass that moves what its plan says, through its own host memory.

    With `strict`, the pass must save what the plan was made from; else what does not agree stays on the device, and so
    does everything after a tensor of another storage than expected.
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
        self._plan, self._hosts, self._mover, self._strict = plan, hosts, mover, strict
        self._sight = _Sight(mover, plan.min_bytes, inputs)
        self._position = 0
        self._entries: dict[int, _Entry] = {}
        self._outward: deque[_Entry] = deque()
        self._outward_bytes = self._ahead_bytes = 0
        self._order = plan.reload_order()
        self._following = 0
        self._agrees = True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward, on the stream that computes."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._arrive(0)
        if self._strict and self._position != len(self._plan.storage_at):
            raise OffloadError(
                f"{self._position} tensors were saved for backward, {len(self._plan.storage_at)} in the pass before"
            )

    def begin_backward(self) -> None:
        """Begin to reload what the backward wants first."""
        with self._mover.computing():
            self._look_ahead()

    def finish(self) -> None:
        """At the end of the backward: wait for copies that nothing has waited for, and let go of everything."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            for copied in (entry.copied, entry.reloaded):
                if copied is not None:
                    self._mover.wait(copied)
            entry.device = entry.copied = entry.reloaded = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in _COUNTED:
            return tensor
        position, self._position = self._position, self._position + 1
        number = self._sight.number(tensor)
        self._compare(position, number)
        if number == NOT_MOVED or not self._agrees:
            return _kept(tensor)
        planned, place = self._plan.storages[number], self._plan.places[number]
        storage = tensor.untyped_storage()
        if place is None or not self._fits(storage, planned):
            return _kept(tensor)
        entry = self._entries.get(number)
        if entry is None:
            host = self._hosts[place.slab][place.offset :][: planned.nbytes]
            entry = self._entries[number] = _Entry(host=host, device=_bytes_of(storage))
        if position == planned.last:
            assert entry.device is not None  # held since its first tensor
            entry.copied = self._mover.out(entry.host, entry.device)
            self._outward.append(entry)
            self._outward_bytes += planned.nbytes
            self._arrive(self._plan.window_bytes)
        return _handle(entry, tensor)

    def _compare(self, position: int, number: int) -> None:
        expected = self._plan.storage_at[position] if position < len(self._plan.storage_at) else None
        if number != expected:
            self._agrees = False
            if self._strict:
                raise OffloadError(
                    f"saved tensor {position} is of storage {number}, of {expected} in the pass before: what a pass "
                    "saves must not change"
                )

    def _fits(self, storage: torch.UntypedStorage, planned: SavedStorage) -> bool:
        if storage.nbytes() == planned.nbytes:
            return True
        if self._strict:
            raise OffloadError(f"{storage.nbytes()} bytes were saved, {planned.nbytes} in the pass before")
        return False

    def _arrive(self, allowed_bytes: int) -> None:
        """Wait until at most so many bytes are on their way to the host, and drop what has arrived."""
        while self._outward_bytes > allowed_bytes:
            entry = self._outward.popleft()
            self._outward_bytes -= len(entry.host)
            self._mover.wait(entry.copied)
            entry.device = entry.copied = None

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        entry: _Entry = saved.entry
        with self._mover.computing():
            if entry.device is None:
                self._reload(entry)
            elif entry.reloaded is not None:
                self._ahead_bytes -= len(entry.host)
            if entry.reloaded is not None:
                self._mover.wait(entry.reloaded)
                entry.reloaded = None
            assert entry.device is not None
            found: torch.Tensor = saved.view_of(entry.device.untyped_storage())
            if not saved.asked:
                saved.asked = True
                entry.views -= 1
            if entry.views == 0:
                entry.device = None  # what was asked for keeps it
            self._look_ahead()
        return found

    def _reload(self, entry: _Entry) -> None:
        entry.device = torch.empty(len(entry.host), dtype=torch.uint8, device=self._mover.device)
        entry.reloaded = self._mover.back(entry.device, entry.host)

    def _look_ahead(self) -> None:
        """Begin to reload what a backward wants next."""
        while self._following < len(self._order):
            entry = self._entries.get(self._order[self._following])
            if entry is not None and entry.device is None and entry.views > 0:
                if self._ahead_bytes + len(entry.host) > self._plan.window_bytes:
                    return
                self._reload(entry)
                self._ahead_bytes += len(entry.host)
            self._following += 1


def _handle(entry: _Entry, tensor: torch.Tensor) -> _Handle:
    entry.views += 1
    return _Handle(entry, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as uint8, shape [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def report(plan: OffloadPlan, choice: Choice) -> None:
    """Say what is moved, and warn where a choice moves nothing."""
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


class PassOffload:
    """What one pass (a bucket in a slot) moves: its first warm-up shows what, and those after it follow the plan."""

    def __init__(
        self, module: nn.Module, choice: Choice, mover: Mover, buffers: HostBuffers, inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        self._module, self._choice, self._mover, self._buffers = module, choice, mover, buffers
        self._inputs = inputs
        self.plan: OffloadPlan | None = None
        """None until a forward has run."""
        self._hosts: list[torch.Tensor] = []
        self._now: Discovery | Offload | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward of the pass; its outputs must be alive at the end.

        Raises:
            OffloadError: it saves other tensors than the first one did.
        """
        discovery = None
        if self.plan is None:
            self._now = discovery = Discovery(self._module, self._mover, self._choice, self._inputs)
        else:
            self._now = Offload(self.plan, self._hosts, self._mover, self._inputs, strict=True)
        with self._tidy(), self._now.forward():
            yield
        if discovery is not None:
            self.plan = discovery.plan
            report(self.plan, self._choice)
            self._hosts = self._buffers.reserve(self._mover, self.plan.slabs)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward of the pass."""
        assert self._now is not None  # after a forward
        with self._tidy():
            self._now.begin_backward()
            yield
            self._now.finish()
        self._now = None

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """Let nothing be under way after an error, whatever a broken capture still allows."""
        try:
            yield
        except BaseException:
            if self._now is not None:
                with suppress(RuntimeError):
                    self._now.finish()
            self._now = None
            raise


class NoOffload:
    """Moves nothing."""

    plan: OffloadPlan | None = None

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward."""
        return nullcontext()


class EagerOffload:
    """Moves what eager passes save by a plan that a capture's warm-up made, as far as they save the same.

    Their host memory is taken again once a backward has asked for all of it, or its graph was dropped.
    """

    def __init__(self, outwards: torch.cuda.Stream, inwards: torch.cuda.Stream) -> None:
        self._streams = outwards, inwards
        self._free: list[HostBuffers] = []
        self._all: list[HostBuffers] = []

    def forward(self, plan: OffloadPlan, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Around an eager forward of `inputs` on the current stream."""
        mover = CudaMover(torch.cuda.current_stream(self._streams[0].device), *self._streams)
        if not self._free:
            self._free.append(HostBuffers())
            self._all.append(self._free[0])
        self._free[-1].reserve(mover, plan.slabs)  # where there is no memory, they are not lost
        buffers = self._free.pop()
        return _Returning(plan, buffers, mover, inputs, self._free).forward()

    def nbytes(self) -> int:
        """Bytes pinned."""
        return sum(buffers.nbytes() for buffers in self._all)


class _Returning(Offload):
    """Gives its host memory back when autograd has dropped the last saved tensor."""

    def __init__(
        self,
        plan: OffloadPlan,
        buffers: HostBuffers,
        mover: Mover,
        inputs: Sequence[torch.Tensor],
        free: list[HostBuffers],
    ) -> None:
        super().__init__(plan, buffers.reserve(mover, plan.slabs), mover, inputs, strict=False)
        self._buffers, self._free = buffers, free

    def __del__(self) -> None:
        """An eager backward has no end that could be told: its saved tensors are given up one by one."""
        self.finish()
        self._free.append(self._buffers)
