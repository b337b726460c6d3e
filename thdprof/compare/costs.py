"""A cost table from the statistics of a run by a plan, and the time of an eager step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thdprof.compare.statistics import MeanPass, MeanStep, Observed, TimedRun, read_stats
from thdprof.errors import UsageError

_BUCKET_OVERHEAD = 0.0106
"""Share of a slot's graph memory that each further bucket adds, as it was measured on an H200."""
_LEAST_STEPS = 5
"""Steps without which the mean of a run says little."""


def costs_of_runs(files: Sequence[Path], *, eager_step_ms: float | None = None) -> dict[str, Any]:
    """The cost table (schema `thdprof.costs/1`) of a model, from the statistics of a run that trained it by a plan.

    A step is taken to last as long as its micro-batches one after the other: their decoders, and what is around each,
    the optimizer's part included. Replayed decoders were timed by bucket. The run by the plan tells what is around
    them, and the time of an eager step then tells how long eager decoders take.

    Args:
        files: statistics files, whose last lines count: one of a run with `--replay on`, and where `eager_step_ms` is
            None one of a run of the same settings with `--replay off`.
        eager_step_ms: milliseconds of an eager step of as many micro-batches, as the unchanged script logs them.

    Raises:
        DataError: a file cannot be read or is no statistics.
        UsageError: the files are not of such runs, or lack the times of enough steps or of a bucket.
    """
    found = [(path, observed, *_timed(path, observed)) for path, observed in ((f, read_stats(f)) for f in files)]
    runs = {run.replay: (path, observed, run, step) for path, observed, run, step in found}
    wanted = {True} if eager_step_ms is not None else {True, False}
    if len(files) != len(wanted) or runs.keys() != wanted:
        raise UsageError(
            "--stats: give the statistics of a run by a plan, and --eager-step-ms, the milliseconds of a step without "
            "one; or the statistics of a run with --replay off besides"
        )
    path, observed, run, step = runs[True]
    eager_step = step if eager_step_ms is None else step.model_copy(update={"ms": eager_step_ms})
    if False in runs:
        _, _, eager_run, eager_step = runs[False]
        for name in ("n_tokens", "pipeline_parallel_size", "stamp"):
            if getattr(run, name) != getattr(eager_run, name):
                raise UsageError(f"--stats: {name} differs between the two runs: train both on one kind of machine")
    passes = {one.max_seqs: one for one in observed.passes if one.max_seqs is not None}
    untimed = [entry.max_seqs for entry in step.replays if entry.max_seqs not in passes]
    if untimed or not passes:
        caps = f" at {untimed[0]} documents" if untimed else ""
        raise UsageError(f"--stats {path}: no replay{caps} was timed: train more steps")
    if step.microbatches <= step.eager:
        raise UsageError(f"--stats {path}: no step replayed anything: train more steps")
    outside, eager_ms = _solve(step, eager_step, passes, pipeline=run.pipeline_parallel_size)
    count = sum(one.count for one in passes.values())
    n_seqs, squared = (
        sum(one.count * getattr(one, name) for one in passes.values()) / count for name in ("n_seqs", "squared_tokens")
    )
    slope = observed.ms_per_squared_token or 0.0
    slots = run.num_slots * (1 + _BUCKET_OVERHEAD * (len(passes) - 1))
    return {
        "schema": "thdprof.costs/1",
        "name": run.model,
        "calibrated": True,
        "hardware": run.stamp.gpu,
        "attention": run.attention,
        "n_tokens": run.n_tokens,
        "eager": [{"n_seqs": max(1, round(n_seqs)), "ms": round(eager_ms, 4)}],
        "replay": [
            {"max_seqs": cap, "ms": round(one.ms - slope * (one.squared_tokens - squared), 4)}
            for cap, one in sorted(passes.items())
        ],
        "slot_bytes": round(observed.pool_bytes / slots) if observed.pool_bytes else None,
        "bucket_overhead": _BUCKET_OVERHEAD,
        "ms_per_squared_token": slope,
        "squared_tokens": squared,
        "outside_ms": round(outside, 4),
        "stamp": run.stamp.model_dump(),
    }


def _timed(path: Path, observed: Observed) -> tuple[TimedRun, MeanStep]:
    """What the times of a statistics file are of, and its mean step."""
    run, step = observed.run, observed.steps
    if run is None or step is None or step.count < _LEAST_STEPS:
        steps = 0 if step is None else step.count
        raise UsageError(
            f"--stats {path}: holds the times of {steps} steps, and {_LEAST_STEPS} are needed: train about 30 steps "
            "of Megatron-LM or Megatron Bridge by a plan"
        )
    if run.model_chunks > 1 or len({(entry.max_seqlen, entry.cp_size) for entry in step.replays}) > 1:
        raise UsageError(
            f"--stats {path}: is of several model chunks a rank, document lengths or context-parallel sizes, whose "
            "times are not told apart"
        )
    return run, step


def _solve(
    step: MeanStep, eager_step: MeanStep, passes: Mapping[int, MeanPass], *, pipeline: int
) -> tuple[float, float]:
    """Milliseconds around the decoder of a micro-batch, and of its decoder where it runs eagerly."""
    eager_whole = eager_step.ms_of_microbatches(pipeline) / eager_step.microbatches
    replayed = sum(entry.count * passes[entry.max_seqs].ms for entry in step.replays)
    num_replays = step.microbatches - step.eager
    outside = (step.ms_of_microbatches(pipeline) - replayed - step.eager * eager_whole) / num_replays
    outside = min(max(0.0, outside), 0.999 * eager_whole)
    return outside, eager_whole - outside
