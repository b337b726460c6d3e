"""Two queues of one GPU, one that computes and one that communicates, and how long both take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOWED = 0.37
"""Milliseconds by which kernels and NCCL's both take longer for each millisecond in which they run beside each other:
they share multiprocessors and memory. Measured on H200s (benchmarks/results/overlap-times.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing in a queue. It begins when what is before it in its queue has ended."""

    ms: float
    """Milliseconds that it takes alone."""
    after: int = 0
    """So many tasks of the other queue must have ended before it begins."""
    busy: bool = True
    """Whether the GPU works on it; else the queue only waits for the host."""


def together_ms(computing: Sequence[Task], communicating: Sequence[Task]) -> float:
    """Milliseconds until both queues are empty.

    Raises:
        ValueError: the queues wait for each other.
    """
    queues = (computing, communicating)
    ended, left, now = [0, 0], [_first(computing), _first(communicating)], 0.0
    while ended[0] < len(computing) or ended[1] < len(communicating):
        runs = [
            place
            for place, queue in enumerate(queues)
            if ended[place] < len(queue) and queue[ended[place]].after <= ended[1 - place]
        ]
        if not runs:
            raise ValueError("two queues wait for each other")
        shared = len(runs) == 2 and all(queues[place][ended[place]].busy for place in runs)
        pace = 1 / (1 + SLOWED) if shared else 1.0
        passed = min(left[place] for place in runs)
        now += passed / pace
        for place in runs:
            left[place] -= passed
            if left[place] <= 0:
                ended[place] += 1
                if ended[place] < len(queues[place]):
                    left[place] = queues[place][ended[place]].ms
    return now


def _first(queue: Sequence[Task]) -> float:
    return queue[0].ms if queue else 0.0
