"""Copies between GPU memory and pinned host memory, on two side streams beside the stream that computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mover(Protocol):
    """The device that computes, and the copies between it and the host; `CudaMover` is the real one."""

    device: torch.device
    """The device on which the tensors are computed."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory: uint8, shape [nbytes]."""
        ...

    def out(self, host: torch.Tensor, device: torch.Tensor) -> Any:
        """Queue a copy from `device` to `host`, after all work queued so far; returns the token that `wait` takes."""
        ...

    def back(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        """Queue a copy from `host` to `device`, which is freshly allocated; returns the token that `wait` takes."""
        ...

    def wait(self, copied: Any) -> None:
        """Make all work that is queued from now on run after the copy that `copied` stands for."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which the stream that computes is the current one."""
        ...

    def is_computing(self) -> bool:
        """Whether the current stream is the one that computes."""
        ...


class CudaMover:
    """Copies over two side streams: one to the host (`outwards`), one back (`inwards`), both ordered with `compute`."""

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
        """A context in which the computing stream is the current one, on whatever thread: a backward has its own."""
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
        """One slab of at least as many bytes for each of `sizes`; slabs that exist are used before new ones are
        pinned.
        """
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
