"""Adds the gradients of experts' weights to sums of another dtype on a GPU, as fast as its memory allows.

torch's own sum of a tensor in fp32 and one in bf16 took 1.4 times as long as a compiled one on an H200
(benchmarks/results/experts.md).
A kernel that a pass before the capture has compiled fits every number of experts, as those of torch.compile do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(totals, gradients, number, step, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Add each expert's `number` gradients to sums that lie `step` apart."""
    expert = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < number
    at = totals + expert * step + places
    total = tl.load(at, mask=inside).to(tl.float32)
    gradient = tl.load(gradients + expert * number + places, mask=inside).to(tl.float32)
    tl.store(at, total + gradient, mask=inside)


def add_gradients(totals: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add `gradients`, of shape [experts, ...] and contiguous, to `totals` of that shape, where each expert's are
    contiguous. Sums are formed in fp32.
    """
    number = gradients[0].numel()
    grid = (triton.cdiv(number, _BLOCK), len(gradients))
    add_kernel[grid](totals, gradients, number, totals.stride(0), block=_BLOCK, num_warps=8)
