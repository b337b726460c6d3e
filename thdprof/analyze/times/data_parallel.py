"""Data-parallel communication of a model chunk beside its computing: the order in which Megatron starts it, bucket by
bucket, and what of it is left to wait for.

Megatron's DistributedDataParallel, as of megatron-core 0.19:

- After a backward (of the chunk, or of one graph of it) every bucket that is complete is checked for NaN where the run
  checks gradients, which the host waits for; it is scaled where the reduction does not average, both in the computing
  queue; then its reduction starts. With a virtual pipeline whose stages are aligned that begins after the whole chunk.
- Before a forward, the buckets that it needs are waited for one after the other. Where one was waited for, the next one
  is started: so one bucket is gathered while a graph computes, and no more. With a virtual pipeline whose stages are
  aligned all are started at the beginning.

With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU takes all work out of one connection, in the order in which the host gave it.
A collective that waits for the one before it then holds up the kernels behind it, so that only the last bucket of a
graph is reduced beside the next graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.queues import Task, together_ms

WAITED_MS = 0.1
"""Milliseconds in which nothing computes for each bucket that is checked, because the host waits for it: measured."""
_MEMORY_SHARE = 0.83
"""Share of the memory's bandwidth that kernels over whole buckets reach: measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The communication of one bucket in one direction of a pass."""

    ms: float
    """Milliseconds of the collective alone."""
    nbytes: float
    """Bytes of the bucket."""
    scaled: bool = True
    """Whether the bucket is scaled before it is reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The communication of buckets that parts of the model outside of all graphs complete, or need first."""

    before: Sequence[Transfer] = ()
    """Of what runs before the graphs: the output layer's backward, or the embedding's forward."""
    after: Sequence[Transfer] = ()
    """Of what runs after the graphs: the embedding's backward, or the output layer's forward."""


_NOTHING = Outside()


def backward_ms(
    compute_ms: float,
    graphs: Sequence[Sequence[Transfer]],
    gpu: Gpu,
    *,
    checked: bool,
    one_connection: bool,
    outside: Outside = _NOTHING,
    all_at_end: bool = False,
) -> float:
    """Milliseconds of the last backward of a step, until its last gradient is reduced.

    Args:
        compute_ms: milliseconds of the backward alone, of which each graph has an equal share.
        graphs: the buckets that each graph completes, in the order of their replays.
        gpu: the GPU, for the bandwidth of its memory.
        checked: whether gradients are checked for NaN.
        one_connection: whether CUDA_DEVICE_MAX_CONNECTIONS is 1.
        outside: the buckets that no graph completes.
        all_at_end: whether no reduction starts before the backward of the whole chunk has ended.
    """
    computing, communicating = list[Task](), list[Task]()

    def compute(ms: float, *, busy: bool = True) -> None:
        before = max(0, len(communicating) - 1) if one_connection else 0
        computing.append(Task(ms=ms, after=before, busy=busy))

    def reduce(completed: Sequence[Transfer]) -> None:
        for bucket in completed:
            once = bucket.nbytes / (gpu.memory_tbps * _MEMORY_SHARE * 1e9)
            if checked:
                compute(once)
                compute(WAITED_MS, busy=False)
            if bucket.scaled:
                compute(2 * once)  # in place
            communicating.append(Task(ms=bucket.ms, after=len(computing)))

    if all_at_end:
        compute(compute_ms)
    reduce(outside.before)
    for completed in graphs:
        if not all_at_end:
            compute(compute_ms / len(graphs))
        reduce(completed)
    reduce(outside.after)
    return together_ms(computing, communicating)


def forward_ms(
    compute_ms: float,
    graphs: Sequence[Sequence[Transfer]],
    *,
    all_ahead: bool,
    one_connection: bool,
    outside: Outside = _NOTHING,
) -> float:
    """Milliseconds of the first forward of a step, from the start of its first all-gather.

    Args:
        compute_ms: milliseconds of the forward alone, of which each graph has an equal share.
        graphs: the buckets that each graph needs, in the order of their replays.
        all_ahead: whether all buckets are started at the beginning; else each one when the one before was waited for.
        one_connection: whether CUDA_DEVICE_MAX_CONNECTIONS is 1.
        outside: the buckets that no graph needs first.
    """
    computing, communicating = list[Task](), list[Task]()
    last_start = sum(map(len, (outside.before, *graphs, outside.after))) - 1
    can_start = 0

    def wait(needed: Sequence[Transfer]) -> None:
        nonlocal can_start
        for bucket in needed:
            communicating.append(Task(ms=bucket.ms, after=0 if all_ahead else can_start))
            held_up = last_start if all_ahead and one_connection else 0
            computing.append(Task(ms=0.0, after=max(held_up, len(communicating))))
            can_start = len(computing)

    wait(outside.before)
    for needed in graphs:
        wait(needed)
        computing.append(Task(ms=compute_ms / len(graphs)))
    wait(outside.after)
    return together_ms(computing, communicating)
