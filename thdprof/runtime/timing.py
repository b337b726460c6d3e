"""GPU milliseconds of one forward and its backward, read once they have ended and without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Mark(torch.autograd.Function):
    """Identity whose backward calls `passed`."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
        ctx.passed = passed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.passed()
        return None, grad


def mark_first(tensors: Sequence[torch.Tensor], passed: Callable[[], None]) -> list[torch.Tensor] | None:
    """`tensors` with the first that takes a gradient replaced, so that `passed` is called when its gradient is there.

    None where no tensor takes a gradient.
    """
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            marked = list(tensors)
            marked[position] = _Mark.apply(passed, tensor)
            return marked
    return None


class PassTimer:
    """Events at the begin and end of a forward, and of the backward that may follow."""

    def __init__(self, *, replayed: bool) -> None:
        self.replayed = replayed
        """Whether it was replayed, or run eagerly."""
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._ended = False

    def forward_begins(self) -> None:
        """Record."""
        self._events[0].record()

    def forward_ends(self) -> None:
        """Record."""
        self._events[1].record()

    def backward_begins(self) -> None:
        """Record."""
        self._events[2].record()

    def backward_ends(self) -> None:
        """Record."""
        self._events[3].record()
        self._ended = True

    def ms(self) -> float | None:
        """Milliseconds of both passes; None until the GPU has ended them."""
        if not self._ended or not self._events[3].query():
            return None
        begin, middle, back, end = self._events
        return float(begin.elapsed_time(middle) + back.elapsed_time(end))
