"""Counts slots: the micro-batches in flight, between forward and backward, in each model chunk of a pipeline rank.

The orders are those of megatron-core 0.19, `pipeline_parallel/schedules.py`: 1F1B without interleaving, and the
interleaved schedule with groups of contiguous micro-batches (pipeline_parallel_size of them by default).
"""

from __future__ import annotations

from collections.abc import Iterator

from thdprof.errors import UsageError


def forward_chunks(num_microbatches: int, num_chunks: int, group: int) -> list[int]:
    """Model chunk of every forward pass of a pipeline rank in one step, in execution order."""
    order = []
    for first in range(0, num_microbatches, group):
        size = min(group, num_microbatches - first)
        order += [chunk for chunk in range(num_chunks) for _ in range(size)]
    return order


def passes(
    *, rank: int, pipeline_size: int, num_chunks: int, num_microbatches: int, group: int
) -> Iterator[tuple[str, int]]:
    """All passes of one pipeline rank in one step as ("forward" | "backward", model chunk), in execution order."""
    forwards = forward_chunks(num_microbatches, num_chunks, group if num_chunks > 1 else num_microbatches)
    backwards = [num_chunks - 1 - chunk for chunk in forwards]
    behind = pipeline_size - rank - 1
    warmup = min(len(forwards), behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * group)
    for chunk in forwards[:warmup]:
        yield "forward", chunk
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield "forward", forward
        yield "backward", backward
    for chunk in backwards[len(forwards) - warmup :]:
        yield "backward", chunk


def slots(*, pipeline_size: int, num_chunks: int, num_microbatches: int, group: int | None = None) -> list[list[int]]:
    """The largest number of micro-batches in flight, indexed by pipeline rank and then by model chunk.

    Args:
        pipeline_size: pipeline ranks.
        num_chunks: model chunks on a pipeline rank; over 1 the schedule is the interleaved one.
        num_microbatches: micro-batches of one rank in a step.
        group: contiguous micro-batches of one chunk in the interleaved schedule; None: `pipeline_size`.

    Raises:
        UsageError: megatron-core refuses this number of micro-batches for the interleaved schedule.
    """
    group = group or pipeline_size
    if num_chunks > 1:
        rest = num_microbatches % group
        if not pipeline_size <= group <= num_microbatches or 0 < rest < pipeline_size:
            nearest = max(group, num_microbatches - rest)
            raise UsageError(
                f"{num_microbatches} micro-batches a step: the interleaved schedule needs at least one group of "
                f"{group} (at least --pipeline-parallel-size {pipeline_size}), and no rest smaller than that; "
                f"a --global-batch-size that gives {nearest} would do"
            )
    needed = []
    for rank in range(pipeline_size):
        in_flight, most = [0] * num_chunks, [0] * num_chunks
        sizes = {"pipeline_size": pipeline_size, "num_chunks": num_chunks, "num_microbatches": num_microbatches}
        for kind, chunk in passes(rank=rank, group=group, **sizes):
            in_flight[chunk] += 1 if kind == "forward" else -1
            most[chunk] = max(most[chunk], in_flight[chunk])
        needed.append(most)
    return needed
