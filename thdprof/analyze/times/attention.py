"""Times of cuDNN's packed attention, forward and backward, as Transformer Engine calls it.

Transformer Engine rounds the number of documents that a kernel is made for up to 32, 64, 128, 256 or 512, and takes
the next power of two of all tokens as the longest document. So times depend on the cap by these steps, and `max_seqlen`
does not matter. Beyond work in proportion to the sum of squared lengths, every document of the cap costs time, empty or
not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thdprof.analyze.times.device import GAP_US, Device, Kernels

_QUICK_WIDTHS = (64, 128)
"""Widths of heads for which the product of output and gradient is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of one layer's attention on one rank."""

    heads: int
    """Query heads of the rank."""
    groups: int
    """Heads of keys and values of the rank."""
    query_dim: int
    """Width of a head's query and key."""
    value_dim: int
    """Width of a head's value."""


def rounded_documents(max_seqs: int) -> int:
    """Documents that cuDNN's kernels are made for, given `max_seqs`, by the rule of Transformer Engine."""
    if max_seqs <= 32:
        return 32
    return 1 << math.ceil(math.log2(max_seqs)) if max_seqs <= 512 else max_seqs


def forward(device: Device, shape: Attention, *, tokens: int, squared: float, max_seqs: int) -> list[Kernels]:
    """The kernels of a forward: its set-up, zeroing of the output, and the fused kernel.

    Args:
        device: kernel times of the GPU.
        shape: the attention's shape.
        tokens: tokens of the micro-batch.
        squared: sum of its documents' squared lengths.
        max_seqs: documents that the kernel is called for: the cap of a graph, or the micro-batch's own number.
    """
    documents, rows = rounded_documents(max_seqs), shape.heads * tokens
    width = (shape.query_dim + shape.value_dim) / 2
    us = device.scaled(2.0 * shape.heads * width * squared * 1.79e-9 + rows * (0.24e-3 + 0.00109e-3 * width))
    us += documents * (0.093 + 0.00505 * shape.heads)
    zeroed = rows * shape.value_dim * 2e-6
    return [
        device.moves(zeroed, 3.9, kind="attention", launches=0.0),
        device.tiny(5, 1.6, kind="attention"),
        Kernels(kind="attention", us=us + GAP_US, launches=2.0),
    ]


def backward(device: Device, shape: Attention, *, tokens: int, squared: float, max_seqs: int) -> list[Kernels]:
    """The kernels of a backward: set-up, zeroed gradients, the product of output and its gradient, the fused kernel,
    the conversion of the queries' gradient and, where heads share keys, the sums over them.

    Args: as for `forward`.
    """
    documents, rows = rounded_documents(max_seqs), shape.heads * tokens
    width = (shape.query_dim + shape.value_dim) / 2
    us = device.scaled(5.0 * shape.heads * width * squared * 2.05e-9 + rows * (0.38e-3 + 0.0027e-3 * width))
    us += documents * (0.109 + 0.0080 * shape.heads)
    us += device.scaled(_dot_us(shape, documents, tokens))
    elements = rows * shape.query_dim
    us += device.scaled(1.51e-6 * elements) + documents * (0.068 + 0.00215 * shape.heads)
    launches = 4.0
    if shape.groups < shape.heads:
        us += 10 + device.scaled(1.53e-6 * elements) + documents * (0.147 + 0.0030 * shape.heads)
        launches += 2
    zeroed = tokens * (shape.heads + 2 * shape.groups) * shape.query_dim * 2e-6
    return [
        device.moves(zeroed, 3.3, kind="attention", launches=3.0),
        device.tiny(4, 1.6, kind="attention"),
        Kernels(kind="attention", us=us + launches * GAP_US, launches=2.0, light_launches=launches - 2),
    ]


def _dot_us(shape: Attention, documents: int, tokens: int) -> float:
    """Microseconds of the product of the output and its gradient.

    cuDNN has a quick kernel for heads of 64 and 128. The other one's grid covers every document of the cap at the
    length of the whole micro-batch, so that a large cap is dear.
    """
    if shape.query_dim == shape.value_dim and shape.query_dim in _QUICK_WIDTHS:
        return 5.5e-6 * shape.heads * tokens * shape.query_dim + 0.001 * documents * shape.heads
    rows = documents * shape.heads * _longest(tokens)
    return rows * (0.151e-3 if shape.query_dim > 128 else 0.0756e-3)


def _longest(tokens: int) -> int:
    """Tokens that a document may have in cuDNN's kernels, given those of the micro-batch."""
    if tokens > 32768:
        return math.ceil(tokens / 32768) * 32768
    return max(1024, 1 << math.ceil(math.log2(tokens)))
