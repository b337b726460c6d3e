"""Data-parallel communication of a model chunk beside its computing: the order in which Megatron starts it, bucket by
bucket, and what of it is left to wait for.

A GPU has two queues here, one that computes and one that communicates. Work waits for what was put before it in its own
queue, and for what Megatron makes it wait for in the other one. Megatron's DistributedDataParallel, as of megatron-core
0.19:

- After a backward (of the chunk, or of one graph of it) every bucket that is complete is checked for NaN where the run
  checks gradients, which the host waits for; it is scaled, both in the computing queue; then its reduction starts.
- Before a forward, the buckets that it needs are waited for one after the other. Where one was waited for, the next one
  is started: so one bucket is gathered while a graph computes, and no more. With a virtual pipeline all are started at
  the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import trained_matrices
from thdprof.training import Model

SLOWED = 0.25
"""Milliseconds by which kernels take longer for each millisecond in which NCCL runs beside them."""
WAITED_MS = 0.05
"""Milliseconds in which the GPU computes nothing after a check of one bucket, because the host waited for it."""
_MEMORY_SHARE = 0.8
"""Share of the memory's bandwidth that kernels over whole buckets reach."""
_BUCKET, _BUCKET_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket of Megatron's DistributedDataParallel, at least and for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together, and which are gathered together."""

    elements: float
    """Number of parameters."""
    ranks: int
    """Ranks over which they are reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one bucket takes in one direction of a pass."""

    prepare_ms: float
    """Milliseconds in the computing queue before its communication can start."""
    communicate_ms: float
    """Milliseconds in the queue that communicates."""


def buckets_of(model: Model, layers: Sequence[Kind], *, ranks: int, expert_ranks: int) -> list[list[Bucket]]:
    """The buckets of a chunk, by the layer whose backward completes them, which is also the first that needs them.

    Megatron fills buckets from the last parameter to the first, dense parameters and experts apart. What is left over
    at the first layer is given to it.
    """
    found: list[list[Bucket]] = [[] for _ in layers]
    for experts, sharing in ((False, ranks), (True, expert_ranks)):
        if sharing == 1:
            continue
        least, elements = max(_BUCKET, _BUCKET_A_RANK * sharing), 0.0
        for place in reversed(range(len(layers))):
            of_layer = trained_matrices(model, layers[place])
            for matrix in reversed(of_layer.experts if experts else of_layer.dense):
                elements += matrix
                if elements >= least:
                    found[place].append(Bucket(elements=elements, ranks=sharing))
                    elements = 0.0
        if elements:
            found[0].append(Bucket(elements=elements, ranks=sharing))
    return found


def backward_ms(compute_ms: float, graphs: Sequence[Sequence[Step]]) -> float:
    """Milliseconds of the last backward of a step, until its last gradient is reduced.

    Args:
        compute_ms: milliseconds of the backward alone, of which each graph has an equal share.
        graphs: the buckets that each graph completes, in the order of their replays.
    """
    computed = communicated = 0.0
    for completed in graphs:
        computed += _beside(compute_ms / len(graphs), communicated - computed)
        for bucket in completed:
            computed += bucket.prepare_ms
            communicated = max(computed, communicated) + bucket.communicate_ms
    return max(computed, communicated)


def forward_ms(compute_ms: float, graphs: Sequence[Sequence[Step]], *, all_ahead: bool) -> float:
    """Milliseconds of the first forward of a step, from the start of its first all-gather.

    Args:
        compute_ms: milliseconds of the forward alone, of which each graph has an equal share.
        graphs: the buckets that each graph needs, in the order of their replays.
        all_ahead: whether all buckets are started at the beginning; else each one when the one before was waited for.
    """
    waiting = [bucket.communicate_ms for needed in graphs for bucket in needed]
    ended: list[float] = []

    def start_until(number: int, now: float) -> None:
        while len(ended) <= min(number, len(waiting) - 1):
            ended.append(max(now, ended[-1] if ended else 0.0) + waiting[len(ended)])

    computed, number = 0.0, 0
    if all_ahead:
        start_until(len(waiting), 0.0)
    for needed in graphs:
        for _ in needed:
            start_until(number, computed)
            computed = max(computed, ended[number])
            number += 1
            start_until(number, computed)
        computed += _beside(compute_ms / len(graphs), (ended[-1] if ended else 0.0) - computed)
    return computed


def _beside(compute_ms: float, communicating_ms: float) -> float:
    """Milliseconds of computing where communication goes on beside it for so long."""
    return compute_ms + SLOWED * min(compute_ms, max(0.0, communicating_ms))


def prepare_ms(nbytes: float, gpu: Gpu, *, checked: bool) -> float:
    """Milliseconds before the reduction of a bucket of `nbytes` can start: it is scaled in place, and where gradients
    are `checked`, read once more for their norm, which the host waits for."""
    passes = 3 if checked else 2
    return passes * nbytes / (gpu.memory_tbps * _MEMORY_SHARE * 1e9) + (WAITED_MS if checked else 0.0)
