"""A pass that follows an offload plan: copies out during the forward, copies back ahead of the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thdprof.offload.plan import NOT_MOVED, OffloadPlan, SavedStorage
from thdprof.runtime.offload.copies import Mover
from thdprof.runtime.offload.saved_tensors import (
    COUNTED_TYPES,
    MovedStorage,
    OffloadError,
    StorageNumbers,
    bytes_of,
    handle_of,
    kept_on_device,
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
        """A pass that has not begun.

        Args:
            plan: which storages are moved, and where to.
            hosts: pinned memory of each of the plan's slabs: uint8, shape [bytes].
            mover: copies between the device and the host.
            inputs: the pass's input tensors, which are never moved.
            strict: whether a pass that saves other tensors is an error.
        """
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
        """Run the forward inside this context, on the computing stream.

        Raises:
            OffloadError: the pass is strict, and saved other tensors than the plan expects.
        """
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._arrive(0)
        if self._strict and self._position != len(self._plan.storage_at):
            raise OffloadError(
                f"{self._position} tensors were saved for backward, {len(self._plan.storage_at)} in the pass before: a "
                "module must save the same tensors in every pass"
            )

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
        self._compare(position, number)
        if number == NOT_MOVED or not self._agrees:
            return kept_on_device(tensor)
        planned, place = self._plan.storages[number], self._plan.places[number]
        storage = tensor.untyped_storage()
        if place is None or not self._fits(storage, planned):
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

    def _compare(self, position: int, number: int) -> None:
        expected = self._plan.storage_at[position] if position < len(self._plan.storage_at) else None
        if number != expected:
            self._agrees = False
            if self._strict:
                raise OffloadError(
                    f"saved tensor {position} is of storage {number}, in the pass before of {expected}: a module must "
                    "save the same tensors in every pass"
                )

    def _fits(self, storage: torch.UntypedStorage, planned: SavedStorage) -> bool:
        if storage.nbytes() == planned.nbytes:
            return True
        if self._strict:
            raise OffloadError(
                f"a storage of {storage.nbytes()} bytes was saved, {planned.nbytes} bytes in the pass before: a "
                "module must save the same tensors in every pass"
            )
        return False

    def _arrive(self, allowed_bytes: int) -> None:
        """Wait until at most `allowed_bytes` are on their way to the host, and drop the arrived storages from the
        device.
        """
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
            if not saved.asked:
                saved.asked = True
                entry.views -= 1
            if entry.views == 0:
                entry.device = None  # the tensors that the backward asked for keep the memory
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
