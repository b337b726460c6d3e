"""GPU milliseconds of one forward and its backward, read once they have ended and without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def when_gradient_arrives(values: Sequence[object], passed: Callable[[], None]) -> bool:
    """Call `passed` once, when the gradient of the first of `values` that takes one is there; False if none does."""
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.requires_grad), None)
    if first is None:
        return False

    def arrived(grad: torch.Tensor) -> None:
        handle.remove()
        passed()

    handle = first.register_hook(arrived)
    return True


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
