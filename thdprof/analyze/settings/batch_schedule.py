"""Batch sizes that grow while a run trains: Megatron's `--step-batch-size-schedule`, by megatron-core 0.19's rules.

The sampler deals micro-batches one after the other, whatever the batch size, so that a run's micro-batches are the
same with and without a schedule; only the steps that they make up differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """Global batch sizes by the number of samples from which on they hold."""

    stages: tuple[tuple[int, int], ...]
    """Samples that were consumed before the stage, and its rows of a step; ascending, the first at 0."""

    def batch_size(self, consumed: int) -> int:
        """Rows of the step that begins after `consumed` samples."""
        return next(size for threshold, size in reversed(self.stages) if consumed >= threshold)

    def samples_of(self, steps: int) -> int:
        """Samples that the first `steps` steps consume."""
        consumed, left = 0, steps
        for (_, size), following in zip(self.stages, [*self.stages[1:], None], strict=True):
            if following is None or left == 0:
                return consumed + left * size
            taken = min(left, max(0, -(-(following[0] - consumed) // size)))
            consumed, left = consumed + taken * size, left - taken
        return consumed

    def largest(self, samples: int | None) -> int:
        """Most rows of a step in a run of `samples` samples; None: of a run that goes through all stages."""
        return max(size for threshold, size in self.stages if samples is None or threshold < samples)


def read_schedule(text: str, *, seq_length: int) -> BatchSchedule:
    """The schedule that `text` writes, such as `0:768 250B:1536`: tokens, and rows of a step from there on.

    Raises:
        ValueError: Megatron would refuse the text.
    """
    stages = sorted(_stage(entry, seq_length) for entry in text.replace(",", " ").split())
    if not stages or stages[0][0] != 0:
        raise ValueError("the first stage must begin at 0")
    if any(first[0] >= second[0] for first, second in pairwise(stages)):
        raise ValueError("two stages begin at the same sample")
    if any(size < 1 for _, size in stages):
        raise ValueError("a batch size must be at least 1")
    return BatchSchedule(stages=tuple(stages))


def told(schedule: BatchSchedule) -> str:
    """The schedule in words, for a note."""
    return ", ".join(f"{size} from sample {threshold:,}" for threshold, size in schedule.stages)


def _stage(entry: str, seq_length: int) -> tuple[int, int]:
    threshold, colon, size = entry.partition(":")
    if not colon:
        raise ValueError(f"{entry}: must be THRESHOLD:BATCH_SIZE, such as 250B:1536")
    return _number(threshold) // seq_length, _number(size)


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise ValueError(f"{text or 'nothing'}: not a number") from None


def refused_sizes(schedule: BatchSchedule, at_once: int) -> Sequence[int]:
    """The batch sizes that are not a multiple of the rows that all ranks take at once."""
    return [size for _, size in schedule.stages if size % at_once]
