"""Copies between the stream that computes and pinned host memory, on side streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mover(Protocol):
    """Where tensors are computed, and how they get to the host and back."""

    device: torch.device

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, shape [nbytes]."""
        ...

    def out(self, host: torch.Tensor, device: torch.Tensor) -> Any:
        """Queue a copy to the host behind what is queued; gives what `wait` takes."""
        ...

    def back(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        """Queue a copy from the host into fresh memory; gives what `wait` takes."""
        ...

    def wait(self, copied: Any) -> None:
        """Let what is queued from now on run after that copy."""
        ...

    def computing(self) -> AbstractContextManager[Any]:
        """Makes the stream that computes the current one."""
        ...

    def is_computing(self) -> bool:
        """Whether the current stream is the one that computes."""
        ...


class CudaMover:
    """Copies on two side streams beside `compute`."""

    def __init__(self, compute: torch.cuda.Stream, outwards: torch.cuda.Stream, inwards: torch.cuda.Stream) -> None:
        self.device = compute.device
        self._compute, self._outwards, self._inwards = compute, outwards, inwards

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, shape [nbytes]; not during a capture."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def out(self, host: torch.Tensor, device: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy to the host behind what is queued."""
        return self._copy(self._outwards, host, device)

    def back(self, device: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy from the host into memory that was allocated on the computing stream."""
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
        """Let what is queued from now on run after that copy."""
        self._compute.wait_event(copied)

    def computing(self) -> AbstractContextManager[Any]:
        """Makes the stream that computes the current one, on whatever thread."""
        return torch.cuda.stream(self._compute)

    def is_computing(self) -> bool:
        """Whether the current stream is the one that computes."""
        return bool(torch.cuda.current_stream(self.device) == self._compute)


class HostBuffers:
    """Pinned host memory of one slot, shared by its buckets, of which only one is alive at a time."""

    def __init__(self) -> None:
        self.slabs: list[torch.Tensor] = []

    def reserve(self, mover: Mover, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Slabs of at least `sizes` bytes; those that are there are taken before new ones are made."""
        free, found = sorted(self.slabs, key=len), []
        for size in sizes:
            slab = next((s for s in free if len(s) >= size), None)
            if slab is None:
                slab = mover.pinned(size)
                self.slabs.append(slab)
            else:
                free = [s for s in free if s is not slab]
            found.append(slab)
        return found

    def nbytes(self) -> int:
        """Bytes pinned."""
        return sum(len(slab) for slab in self.slabs)
