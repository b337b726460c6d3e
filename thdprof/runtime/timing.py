"""The GPU's time for a pass, read without making the host wait, and the host's time for one launch.

`python -m thdprof.runtime.timing` prints the latter in microseconds, for `thdprof analyze`, which does not import
torch: eager training of small layers is bound by it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn


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


BLOCKS = 12
"""Blocks of the reference stack."""
LAUNCHES_OF_A_BLOCK = 18
"""Kernels of a block's forward and backward, with gradients that are written and not accumulated."""


class _Block(nn.Module):
    """A pre-norm MLP with biases, whose kernels are far shorter than their launches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


def measure_launch_us(*, rounds: int = 15) -> float:
    """Microseconds of host time for one launch, over the forward and backward passes of a small stack.

    Args:
        rounds: passes; the median counts.

    Raises:
        RuntimeError: there is no GPU.
    """
    stack = nn.Sequential(*(_Block(64) for _ in range(BLOCKS))).cuda().bfloat16()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times = []
    for done in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        stack(x).sum().backward()
        torch.cuda.synchronize()
        if done >= 3:
            times.append(time.perf_counter() - began)
        for parameter in stack.parameters():
            parameter.grad = None
    return statistics.median(times) * 1e6 / (BLOCKS * LAUNCHES_OF_A_BLOCK)


if __name__ == "__main__":
    json.dump({"launch_us": measure_launch_us(), "gpu": torch.cuda.get_device_name()}, sys.stdout)
