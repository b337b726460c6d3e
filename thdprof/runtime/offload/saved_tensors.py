"""Saved tensors: how those that can be offloaded are recognised, numbered by storage, and rebuilt for the backward.

A tensor that autograd keeps for a backward is a saved tensor; several may be views of one storage. Offloading moves
whole storages to host memory after the forward and back before the backward needs them. Order makes this safe, without
the allocator's record of streams, which a capture would keep until its end:

- A storage is dropped from the device only after the computing stream has waited for its copy to the host, so that
  whatever reuses the memory runs later.
- Memory for a reload is allocated on the computing stream, and the copying stream waits for that stream before it
  writes.
- No copy is under way at the end of a forward or a backward, so that each of them can be a graph of its own.

Host memory is pinned outside captures. It belongs to a slot, because it holds the activations of the micro-batch that
holds the slot. Tensors that an autograd function keeps as plain attributes, without `save_for_backward`, are never
moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from thdprof.offload.plan import NOT_MOVED
from thdprof.runtime.offload.copies import Mover


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
    """Number of the storage's saved tensors that no backward has asked for yet."""


@dataclass(slots=True, eq=False)
class Handle:
    """The object that autograd keeps in place of a saved tensor that is moved: its storage, and its view of it."""

    entry: MovedStorage
    """The storage that holds the tensor's values."""
    dtype: torch.dtype
    """The tensor's dtype."""
    offset: int
    """Elements between the storage's begin and the tensor's."""
    size: torch.Size
    """The tensor's shape."""
    stride: tuple[int, ...]
    """The tensor's strides, in elements."""
    asked: bool = False
    """Whether a backward has asked for the tensor."""

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor, as a view of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


COUNTED_TYPES = (torch.Tensor, nn.Parameter)
"""Types of the saved tensors that have a position in the plan. Tensors of other types stay on the device and are not
counted: a compiler's stand-ins, for example, appear in the first pass only.
"""


class StorageNumbers:
    """Chooses which saved tensors may be offloaded, and numbers their storages.

    Skipped: parameters and inputs (resident anyway); tensors whose storage has fewer than `min_bytes` bytes, such as
    boundaries, which may share one storage inside a graph and have several outside it; tensors saved on another CUDA
    stream than the computing one, as by shared experts that run beside the other experts of their layer, because our
    copies are ordered with the computing stream only.
    """

    def __init__(self, mover: Mover, min_bytes: int, inputs: Sequence[torch.Tensor]) -> None:
        self._mover, self._min_bytes = mover, max(1, min_bytes)
        self._inputs = {t.untyped_storage()._cdata for t in inputs}
        self._seen: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []
        """Weak references to the storages, by number. Each also keeps the storage's address from being given to another
        one.
        """

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, in the order in which storages were first saved; NOT_MOVED if it is
        skipped.
        """
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
        # a view that a function's forward made of its input looks like a leaf; its base tells whether it is one
        source = tensor._base if tensor._base is not None else tensor
        leaf = source.is_leaf and source.requires_grad
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or leaf or tensor.device != self._mover.device or tensor.is_conj() or tensor.is_neg():
            return False
        return self._mover.is_computing()


def kept_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor to give autograd for a saved tensor that stays on the device.

    It is detached, unless it is a leaf: an output that the function which made it saves would otherwise keep itself
    alive.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def handle_of(entry: MovedStorage, tensor: torch.Tensor) -> Handle:
    """The handle of `tensor`, a view of the storage `entry`; counts it among the views that a backward has yet to ask
    for.
    """
    entry.views += 1
    return Handle(entry, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as one tensor over the same memory: uint8, shape [bytes], on the storage's device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
