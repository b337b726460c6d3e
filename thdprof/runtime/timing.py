"""GPU milliseconds of one forward and its backward, read after both have ended, so that the host never waits for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def when_gradient_arrives(values: Sequence[object], passed: Callable[[], None]) -> bool:
    """Call `passed` once, when the first of `values` that takes a gradient gets it.

    Returns:
        False if none of the values takes a gradient; `passed` is then never called.
    """
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.requires_grad), None)
    if first is None:
        return False

    def arrived(grad: torch.Tensor) -> None:
        handle.remove()
        passed()

    handle = first.register_hook(arrived)
    return True


class PassTimer:
    """CUDA events at the begin and end of a forward, and of the backward that may follow."""

    def __init__(self, *, replayed: bool) -> None:
        self.replayed = replayed
        """Whether the pass is replayed; else it runs eagerly."""
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._ended = False

    def forward_begins(self) -> None:
        """Record the begin of the forward on the current stream."""
        self._events[0].record()

    def forward_ends(self) -> None:
        """Record the end of the forward."""
        self._events[1].record()

    def backward_begins(self) -> None:
        """Record the begin of the backward."""
        self._events[2].record()

    def backward_ends(self) -> None:
        """Record the end of the backward."""
        self._events[3].record()
        self._ended = True

    def ms(self) -> float | None:
        """Milliseconds of forward and backward together; None until the GPU has ended both."""
        if not self._ended or not self._events[3].query():
            return None
        begin, middle, back, end = self._events
        return float(begin.elapsed_time(middle) + back.elapsed_time(end))
