"""Fields of a plan that must fit each other. Only what no run could follow is wrong: `graphs` may be edited by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from thdprof.plan.parts import GraphsPart, MicrobatchesPart, PredictionsPart
from thdprof.training import TrainingSettings

_ROUNDING = 1e-6
"""How much shares may exceed 1, summed up."""
_TIMES = ("decoder_replay_ms", "decoder_eager_ms", "outside_decoder_ms", "relative_step_time", "step_ms")
"""Times of `predictions.times`, of which at least one stands where they have an origin."""

Contradiction = tuple[tuple[str | int, ...], Any, str]
"""A field as the names and numbers on the way to it, its value, and what is wrong with it and to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a plan whose fields are compared."""

    training: TrainingSettings
    """The run's settings."""
    microbatches: MicrobatchesPart
    """The run's micro-batches."""
    graphs: GraphsPart
    """What is captured."""
    predictions: PredictionsPart
    """What was predicted."""


def contradictions(plan: Parts) -> Iterator[Contradiction]:
    """Every field that cannot be beside the others, in the file's order."""
    yield from _buckets(plan)
    yield from _slots(plan)
    times = plan.predictions.times
    if times is not None and times.origin != "none" and all(getattr(times, name) is None for name in _TIMES):
        where = ("predictions", "times", "origin")
        yield where, times.origin, "no time stands beside it: must be none, or give the times"


def _buckets(plan: Parts) -> Iterator[Contradiction]:
    buckets = plan.graphs.buckets
    seen: dict[tuple[int, int, int], int] = {}
    for index, bucket in enumerate(buckets):
        where = ("graphs", "buckets", index)
        shape = (bucket.max_seqs, bucket.max_seqlen, bucket.cp_size)
        if shape in seen:
            text = f"{bucket.max_seqs} documents of at most {bucket.max_seqlen} tokens"
            yield where, text, f"is the same as bucket {seen[shape]}: leave one out"
        seen.setdefault(shape, index)
        most = _longest(plan, bucket.cp_size)
        if bucket.max_seqlen > most:
            yield (*where, "max_seqlen"), bucket.max_seqlen, f"must be at most {most}, the tokens of a micro-batch"
    if (total := sum(bucket.share for bucket in buckets)) > 1 + _ROUNDING:
        yield ("graphs", "buckets"), total, "shares must add up to 1 at most: a micro-batch replays one bucket"


def _longest(plan: Parts, cp_size: int) -> int:
    """Tokens of the longest document that a graph of this context-parallel size may see."""
    run = plan.training
    if run.max_seqlen_per_dp_cp_rank is not None:
        return run.max_seqlen_per_dp_cp_rank * cp_size
    return max(plan.microbatches.n_tokens_max, run.micro_batch_size * run.seq_length)


def _slots(plan: Parts) -> Iterator[Contradiction]:
    run, slots = plan.training, plan.graphs.slots
    ranks, chunks = run.pipeline_parallel_size, run.virtual_pipeline_size or 1
    if len(slots) != ranks:
        yield ("graphs", "slots"), slots, f"must be {ranks} lists, one for each of training.pipeline_parallel_size"
        return
    for rank, counts in enumerate(slots):
        if len(counts) != chunks:
            what = "a number for each chunk of training.virtual_pipeline_size" if chunks > 1 else "one number"
            yield ("graphs", "slots", rank), counts, f"must hold {what}: {chunks}"
