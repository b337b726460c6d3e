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

BACKWARD_FLOPS = 2.5
"""Matrix work of the backward beside the forward's."""


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
    documents = rounded_documents(max_seqs)
    work = 2.0 * shape.heads * ((shape.query_dim + shape.value_dim) / 2) * squared * 2 / 2
    us = device.scaled(work / _FORWARD_FLOPS_A_US + _FORWARD_A_HEAD * shape.heads * tokens * _wide(shape))
    us += documents * (_FORWARD_A_DOCUMENT + _FORWARD_A_DOCUMENT_HEAD * shape.heads) * tokens_factor(tokens)
    zeroed = tokens * shape.heads * shape.value_dim * 2e-6
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
    documents, factor = rounded_documents(max_seqs), tokens_factor(tokens)
    elements = tokens * shape.heads * shape.query_dim
    work = 2.0 * BACKWARD_FLOPS * shape.heads * ((shape.query_dim + shape.value_dim) / 2) * squared
    us = device.scaled(work / _BACKWARD_FLOPS_A_US + _BACKWARD_A_HEAD * shape.heads * tokens * _wide(shape))
    us += documents * (_BACKWARD_A_DOCUMENT + _BACKWARD_A_DOCUMENT_HEAD * shape.heads) * factor
    if shape.query_dim == shape.value_dim:
        us += device.scaled(_DOT_AN_ELEMENT * elements)
    else:  # a kernel whose grid covers every document of the cap at the length of the whole micro-batch
        us += device.scaled(_DOT_A_ROW * documents * shape.heads * _power_of_two(tokens))
    us += _CONVERT_AN_ELEMENT * elements + documents * (_CONVERT_A_DOCUMENT + 0.0022 * shape.heads) * factor
    launches = 4.0
    if shape.groups < shape.heads:
        us += _REDUCE_AN_ELEMENT * elements + documents * (_REDUCE_A_DOCUMENT + 0.004 * shape.heads) * factor
        launches += 2
    zeroed = tokens * (shape.heads + 2 * shape.groups) * shape.query_dim * 2e-6
    return [
        device.moves(zeroed, 3.3, kind="attention", launches=3.0),
        device.tiny(4, 1.6, kind="attention"),
        Kernels(kind="attention", us=us + launches * GAP_US, launches=2.0, light_launches=launches - 2),
    ]


def tokens_factor(tokens: int) -> float:
    """How much an empty document of a cap costs, beside micro-batches of 4096 tokens."""
    return _power_of_two(tokens) / 4096


def _power_of_two(tokens: int) -> int:
    if tokens > 32768:
        return math.ceil(tokens / 32768) * 32768
    return max(1024, 1 << math.ceil(math.log2(tokens)))


def _wide(shape: Attention) -> float:
    """Work per token of a head beside one of width 128."""
    return 0.55 + 0.45 * shape.query_dim / 128


_FORWARD_FLOPS_A_US = 480e6
_FORWARD_A_HEAD = 0.29e-3
_FORWARD_A_DOCUMENT = 0.16
_FORWARD_A_DOCUMENT_HEAD = 0.0015
_BACKWARD_FLOPS_A_US = 430e6
_BACKWARD_A_HEAD = 0.6e-3
_BACKWARD_A_DOCUMENT = 0.19
_BACKWARD_A_DOCUMENT_HEAD = 0.0035
_DOT_AN_ELEMENT = 5.6e-6
_DOT_A_ROW = 0.151e-3
_CONVERT_AN_ELEMENT = 1.6e-6
_CONVERT_A_DOCUMENT = 0.065
_REDUCE_AN_ELEMENT = 2.6e-6
_REDUCE_A_DOCUMENT = 0.12
