"""Slots: how many micro-batches are between forward and backward in each model chunk of each pipeline rank.

The orders are those of megatron-core 0.19, `pipeline_parallel/schedules.py`: 1F1B without interleaving, and the
interleaved schedule with groups of pipeline_parallel_size micro-batches (its default).
"""

from __future__ import annotations

from collections.abc import Iterator

from thdprof.errors import UsageError


def forward_chunks(num_microbatches: int, num_chunks: int, group: int) -> list[int]:
    """Model chunk of every forward pass of a pipeline rank, in order."""
    order = []
    for first in range(0, num_microbatches, group):
        size = min(group, num_microbatches - first)
        order += [chunk for chunk in range(num_chunks) for _ in range(size)]
    return order


def passes(*, rank: int, pipeline_size: int, num_chunks: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
    """("forward" | "backward", chunk) of one pipeline rank and step, in execution order."""
    forwards = forward_chunks(num_microbatches, num_chunks, pipeline_size if num_chunks > 1 else num_microbatches)
    backwards = [num_chunks - 1 - chunk for chunk in forwards]
    if num_chunks == 1:
        warmup = pipeline_size - rank - 1
    else:
        warmup = (pipeline_size - rank - 1) * 2 + (num_chunks - 1) * pipeline_size
    warmup = min(warmup, len(forwards))
    for chunk in forwards[:warmup]:
        yield "forward", chunk
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield "forward", forward
        yield "backward", backward
    for chunk in backwards[len(forwards) - warmup :]:
        yield "backward", chunk


def slots(*, pipeline_size: int, num_chunks: int, num_microbatches: int) -> list[list[int]]:
    """Largest number of micro-batches in flight, for every pipeline rank and, within it, model chunk.

    Raises:
        UsageError: megatron-core refuses this number of micro-batches for the interleaved schedule.
    """
    if num_chunks > 1:
        rest = num_microbatches % pipeline_size
        if num_microbatches < pipeline_size or rest:
            nearest = max(pipeline_size, num_microbatches - rest)
            raise UsageError(
                f"{num_microbatches} micro-batches a step: the interleaved schedule needs a multiple of "
                f"--pipeline-parallel-size {pipeline_size}; a --global-batch-size that gives {nearest} would do"
            )
    needed = []
    for rank in range(pipeline_size):
        in_flight, most = [0] * num_chunks, [0] * num_chunks
        for kind, chunk in passes(
            rank=rank, pipeline_size=pipeline_size, num_chunks=num_chunks, num_microbatches=num_microbatches
        ):
            in_flight[chunk] += 1 if kind == "forward" else -1
            most[chunk] = max(most[chunk], in_flight[chunk])
        needed.append(most)
    return needed
