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
from typing import Literal, get_args

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


Mark = Literal["forward_begins", "forward_ends", "backward_begins", "backward_ends"]
_MARKS: tuple[Mark, ...] = get_args(Mark)


class PassTimer:
    """CUDA events at the begin and end of a forward, and of the backward that may follow."""

    def __init__(self) -> None:
        self._events = {mark: torch.cuda.Event(enable_timing=True) for mark in _MARKS}
        self._ended = False

    def record(self, mark: Mark) -> None:
        """Record on the current stream that the forward or the backward begins or ends now."""
        self._events[mark].record()
        self._ended |= mark == "backward_ends"

    def ms(self) -> float | None:
        """Milliseconds of forward and backward together; None until the GPU has ended both."""
        begin, middle, back, end = (self._events[mark] for mark in _MARKS)
        if not self._ended or not end.query():
            return None
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
    """Microseconds of host time for one launch: the median over `rounds` forward and backward passes of a small stack.

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
