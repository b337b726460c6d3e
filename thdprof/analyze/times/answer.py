"""The answer of an analysis: times, verdict and worth, from a cost table and the buckets that were chosen by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.times.modelled_costs import ModelledTimes
from thdprof.analyze.times.results import Range, Times, Verdict
from thdprof.analyze.times.verdict import measured_verdict, modelled_verdict
from thdprof.dispatch import Bucket
from thdprof.training import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run that is answered for."""

    table: MicrobatchTable
    """Its micro-batches."""
    settings: TrainingSettings
    """Its settings."""
    buckets: Sequence[Bucket]
    """The buckets that are captured, ascending."""
    n_tokens: int
    """Tokens of a graph's micro-batches on one context-parallel rank."""
    typical: int
    """Documents of the median micro-batch."""
    longest: int
    """Tokens of the longest document that a graph is captured for."""


def times_of(run: Run, costs: CostTable, *, basis: str) -> Times:
    """Times of the median micro-batch and of a step by `costs`, which are of the user's model.

    Args:
        run: the run.
        costs: the cost table, measured or modelled.
        basis: the model and the GPU that the times are of.
    """
    assert costs.origin != "none"
    ends = costs.ends()
    steps = [_step_ms(run, end) for end in ends]
    relative = [planned / eager for planned, eager in steps]
    fitting = [b for b in run.buckets if b.max_seqs >= run.typical]
    cap = fitting[0].max_seqs if fitting else costs.rounded_max_seqs(run.typical)
    eager = [float(end.eager_ms(np.array([run.typical]))[0]) for end in ends]
    return Times(
        origin=costs.origin,
        basis=basis,
        decoder_replay_ms=costs.replay_ms(cap, fitting[0].max_seqlen if fitting else run.longest),
        decoder_eager_ms=(eager[0], eager[-1]),
        outside_decoder_ms=_outside(run, costs),
        relative_step_time=(min(relative), max(relative)),
        step_ms=(steps[0][0], steps[-1][0]),
        eager_step_ms=(steps[0][1], steps[-1][1]),
    )


def verdict_of(times: Times, modelled: ModelledTimes | None) -> Verdict:
    """The verdict on `times`; without times, none."""
    if times.origin == "none":
        return Verdict(ruling=None, reason=times.basis)
    return measured_verdict(times) if modelled is None else modelled_verdict(modelled, times)


def _step_ms(run: Run, costs: CostTable) -> Range:
    """Mean time of a step with the buckets, and with none, in milliseconds."""
    caps = sorted({b.max_seqs for b in run.buckets}) or [1]
    lengths = sorted({b.max_seqlen for b in run.buckets}) or [run.longest]
    step_costs = StepCosts(
        run.table,
        costs,
        caps,
        lengths,
        run.settings.pipeline_parallel_size,
        n_tokens=run.n_tokens,
        cp_size=run.settings.context_parallel_size,
    )
    planned, eager = step_costs.step_ms([tuple(run.buckets), ()])
    return float(planned), float(eager)


def _outside(run: Run, costs: CostTable) -> float | None:
    """Milliseconds outside the decoder of a micro-batch, with its share of the optimizer's step."""
    if costs.outside_ms is None:
        return None
    return costs.outside_ms + (costs.optimizer_ms or 0.0) / max(1, float(run.table.num_microbatches.mean()))
