"""The host's time for one launch on this machine: eager training of small layers is bound by it.

`python -m thdprof.runtime.host_rate` prints it in microseconds, for `thdprof analyze`, which does not import torch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import nn

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
