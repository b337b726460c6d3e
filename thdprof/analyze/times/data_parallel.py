"""Data-parallel communication of a model chunk beside its computing: the order in which Megatron starts it, bucket by
bucket, and what of it is left to wait for.

Megatron's DistributedDataParallel, as of megatron-core 0.19:

- After a backward (of the chunk, or of one graph of it) every bucket that is complete is checked for NaN where the run
  checks gradients, which the host waits for; it is scaled, both in the computing queue; then its reduction starts.
- Before a forward, the buckets that it needs are waited for one after the other. Where one was waited for, the next one
  is started: so one bucket is gathered while a graph computes, and no more. With a virtual pipeline all are started at
  the beginning.

With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU takes all work out of one connection, in the order in which the host gave it.
A collective that waits for the one before it then holds up the kernels behind it, so that only the last bucket of a
graph is reduced beside the next graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import trained_matrices
from thdprof.analyze.times.queues import Task, together_ms
from thdprof.training import Model

WAITED_MS = 0.1
"""Milliseconds in which nothing computes for each bucket that is checked, because the host waits for it: measured."""
_MEMORY_SHARE = 0.83
"""Share of the memory's bandwidth that kernels over whole buckets reach: measured."""
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
class Transfer:
    """The communication of one bucket in one direction of a pass."""

    ms: float
    """Milliseconds of the collective alone."""
    nbytes: float
    """Bytes of the bucket."""


def buckets_of(model: Model, layers: Sequence[Kind], *, ranks: int, expert_ranks: int) -> list[list[Bucket]]:
    """The buckets of a chunk, by the layer whose backward completes them, which is also the first that needs them.

    Megatron fills buckets from the last parameter to the first, dense parameters and experts apart, all up to the size
    that it derives from the data-parallel ranks of dense parameters. What is left over at the first layer is given to
    it.
    """
    found: list[list[Bucket]] = [[] for _ in layers]
    least = max(_BUCKET, _BUCKET_A_RANK * ranks)
    for experts, sharing in ((False, ranks), (True, expert_ranks)):
        if sharing == 1:
            continue
        elements = 0.0
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


def backward_ms(
    compute_ms: float, graphs: Sequence[Sequence[Transfer]], gpu: Gpu, *, checked: bool, one_connection: bool
) -> float:
    """Milliseconds of the last backward of a step, until its last gradient is reduced.

    Args:
        compute_ms: milliseconds of the backward alone, of which each graph has an equal share.
        graphs: the buckets that each graph completes, in the order of their replays.
        gpu: the GPU, for the bandwidth of its memory.
        checked: whether gradients are checked for NaN.
        one_connection: whether CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    computing, communicating = list[Task](), list[Task]()

    def compute(ms: float, *, busy: bool = True) -> None:
        before = max(0, len(communicating) - 1) if one_connection else 0
        computing.append(Task(ms=ms, after=before, busy=busy))

    for completed in graphs:
        compute(compute_ms / len(graphs))
        for bucket in completed:
            once = bucket.nbytes / (gpu.memory_tbps * _MEMORY_SHARE * 1e9)
            if checked:
                compute(once)
                compute(WAITED_MS, busy=False)
            compute(2 * once)  # it is scaled in place
            communicating.append(Task(ms=bucket.ms, after=len(computing)))
    return together_ms(computing, communicating)


def forward_ms(
    compute_ms: float, graphs: Sequence[Sequence[Transfer]], *, all_ahead: bool, one_connection: bool
) -> float:
    """Milliseconds of the first forward of a step, from the start of its first all-gather.

    Args:
        compute_ms: milliseconds of the forward alone, of which each graph has an equal share.
        graphs: the buckets that each graph needs, in the order of their replays.
        all_ahead: whether all buckets are started at the beginning; else each one when the one before was waited for.
        one_connection: whether CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    computing, communicating = list[Task](), list[Task]()
    last_start = sum(map(len, graphs)) - 1
    can_start = 0
    for needed in graphs:
        for bucket in needed:
            communicating.append(Task(ms=bucket.ms, after=0 if all_ahead else can_start))
            held_up = last_start if all_ahead and one_connection else 0
            computing.append(Task(ms=0.0, after=max(held_up, len(communicating))))
            can_start = len(computing)
        computing.append(Task(ms=compute_ms / len(graphs)))
    return together_ms(computing, communicating)
