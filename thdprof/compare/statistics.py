"""Did training do what the plan predicted? The comparison of a plan with the statistics of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from thdprof.dispatch import BY_SHAPE, SHAPE_NOT_ASKED, Bucket, FallbackReason
from thdprof.errors import DataError
from thdprof.plan import Plan, validate
from thdprof.training.stamp import Stamp

_ROUNDING = 1e-12

Count = Annotated[int, Field(ge=0, strict=True)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of a line of statistics. Fields that the run has added, such as step and loss, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Replays(_Part):
    """One bucket, and the number of micro-batches that replayed it, or whose shape alone would have."""

    max_seqs: Count
    max_seqlen: Count
    cp_size: Count = 1
    count: Count


class _Decisions(_Part):
    """Micro-batches by bucket and by fallback reason."""

    replays: list[_Replays]
    """Replayed micro-batches, one entry a bucket."""
    fallbacks: dict[FallbackReason, Count]
    """Number of eager micro-batches, by reason."""

    def num_dispatched(self) -> int:
        """Number of micro-batches whose shape was looked at."""
        fallbacks = sum(n for reason, n in self.fallbacks.items() if reason not in SHAPE_NOT_ASKED)
        return fallbacks + sum(r.count for r in self.replays)


class MeanPass(_Part):
    """The timed micro-batches of one bucket, or those that ran eagerly."""

    max_seqs: Count | None
    """The bucket's number of documents; null: they ran eagerly."""
    count: Annotated[int, Field(ge=1)]
    """Number of timed micro-batches."""
    n_seqs: Annotated[float, Field(ge=0)]
    """Mean number of documents."""
    squared_tokens: Annotated[float, Field(ge=0)]
    """Mean sum of squared document lengths."""
    ms: Milliseconds
    """Mean milliseconds of forward and backward."""


class _ReplaysOfStep(_Part):
    """One bucket, and how many micro-batches of a step replayed it."""

    max_seqs: Count
    max_seqlen: Count
    cp_size: Count
    count: Annotated[float, Field(gt=0)]


class MeanStep(_Part):
    """The steps of training in which nothing else was done."""

    count: Count
    """Number of steps."""
    ms: Milliseconds
    """Mean milliseconds of a step."""
    replays: list[_ReplaysOfStep]
    """Mean number of replayed micro-batches on a rank, one entry a bucket."""
    eager: Annotated[float, Field(ge=0)]
    """Mean number of eager micro-batches on a rank."""

    @property
    def microbatches(self) -> float:
        """Mean number of micro-batches on a rank."""
        return self.eager + sum(entry.count for entry in self.replays)

    def ms_of_microbatches(self, pipeline: int) -> float:
        """Milliseconds in which a stage of a pipeline of so many ranks has work."""
        return self.ms / (1 + (pipeline - 1) / self.microbatches)


class TimedRun(_Part):
    """What the times of a line of statistics are of."""

    replay: bool
    """False: micro-batches were padded as the plan says, and ran eagerly (`--replay off`)."""
    model: str
    """The model in one line."""
    attention: str
    """Name and version of the attention backend."""
    n_tokens: Annotated[int, Field(ge=1)]
    """Tokens of a micro-batch on one rank."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)]
    """Pipeline ranks."""
    model_chunks: Annotated[int, Field(ge=1)]
    """Model chunks of a pipeline rank."""
    num_slots: Annotated[int, Field(ge=1)]
    """Slots of the pipeline rank that has most."""
    stamp: Stamp
    """Versions, GPU and processor."""


class Observed(_Decisions):
    """A line of a statistics file, schema `thdprof.stats/1`."""

    schema_: Literal["thdprof.stats/1"] = Field(alias="schema")
    """The schema's name."""
    microbatches: Count
    """Number of micro-batches that the run has counted."""
    decided: _Decisions | None = None
    """Decisions by shape alone, if the run counted them."""
    verified: list[_Replays] = []
    """Replayed micro-batches that were compared with an eager run, one entry a bucket."""
    mismatches: list[_Replays] = []
    """Those that gave other numbers, one entry a bucket, counted on every rank that found one."""
    suspicions: list[_Replays] = []
    """Those that differed at first and were not confirmed, one entry a bucket."""
    replay_ms: Milliseconds | None = None
    """Mean milliseconds of a replayed micro-batch's forward and backward."""
    eager_ms: Milliseconds | None = None
    """Mean milliseconds of an eager micro-batch's forward and backward."""
    passes: list[MeanPass] = []
    """Timed micro-batches, one entry a bucket."""
    ms_per_squared_token: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """What a replay takes longer for each unit of its sum of squared document lengths; null where it is not known."""
    steps: MeanStep | None = None
    """Timed steps; null without any."""
    run: TimedRun | None = None
    """What the times are of, where the run says it."""
    pool_bytes: Count | None = None
    """Most bytes of graph memory of any rank."""

    @field_validator("passes", "steps", "run", mode="before")
    @classmethod
    def _leave_out_others(cls, value: Any, info: ValidationInfo) -> Any:
        """A field that a run has added by one of these names is no part of the statistics."""
        wanted = list if info.field_name == "passes" else dict
        return value if isinstance(value, wanted) else wanted() if wanted is list else None

    plan: str | None = None
    """`Plan.identity` of the plan that the run followed, if it wrote it."""
    all_ranks: bool = True
    """Whether these are the counters of all ranks; False: the run ended with an error, and they are rank 0's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShares:
    """One bucket, with its predicted and its observed share of all micro-batches whose shape was looked at.

    The predicted share is 0 if the plan has no such bucket.
    """

    max_seqs: int
    max_seqlen: int
    cp_size: int
    predicted_share: float
    observed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's prediction beside a run's statistics."""

    basis: Literal["replayed", "decided"]
    """Whether micro-batches were replayed, or only their shapes were decided on, as on a machine without CUDA."""
    microbatches: int
    """Number of micro-batches that the run counted."""
    evaluated: int
    """Number of these that were not trained on (`not_training`): evaluation, of which a plan says nothing."""
    dispatched: int
    """Number of micro-batches whose shape was looked at; observed shares are shares of this number."""
    plan_microbatches: int
    """Number of micro-batches from which the plan was made."""
    predicted_fallback_rate: float
    """The plan's share of micro-batches whose shape fits no bucket."""
    observed_fallback_rate: float
    """The run's share of micro-batches that fell back because of their shape."""
    fallbacks: dict[FallbackReason, int]
    """Number of fallbacks that the data alone explains, by reason."""
    other_fallbacks: dict[FallbackReason, int]
    """Number of fallbacks that no plan predicts, by reason."""
    verified: int
    """Number of replayed micro-batches that were compared with an eager run."""
    mismatches: int
    """Number of those that gave other numbers, counted on every rank that found one."""
    suspicions: int
    """Number of those that differed at first and were not confirmed by more runs; they fail no comparison."""
    buckets: tuple[BucketShares, ...]
    """The shares of every bucket of the plan or the run, in ascending order."""
    replay_ms: float | None
    """Mean milliseconds of a replayed micro-batch's forward and backward; None if none was timed."""
    eager_ms: float | None
    """Mean milliseconds of an eager micro-batch's forward and backward; None if none was timed."""
    plan_step_ms: float | None
    """The plan's milliseconds of a step, that is, of all micro-batches of a rank, for the model of its cost table."""
    plan_eager_step_ms: float | None
    """The plan's milliseconds of a step in which all micro-batches run eagerly."""
    plan_costs: str
    """Name and hardware of the plan's cost table."""
    tolerance: float
    """Largest absolute difference of a share that passes."""
    of_this_plan: bool | None
    """Whether the run followed this plan; None where its statistics do not tell."""
    all_ranks: bool
    """Whether all ranks were counted; False: rank 0 alone, because the run ended with an error."""

    @property
    def largest_difference(self) -> float:
        """Largest absolute difference between an observed share and its prediction."""
        shares = [abs(b.observed_share - b.predicted_share) for b in self.buckets]
        return max([abs(self.observed_fallback_rate - self.predicted_fallback_rate), *shares])

    @property
    def nothing_replayed(self) -> bool:
        """Whether the plan has buckets, and the run replayed none: shares of what was decided alone prove no replay."""
        return self.basis == "decided"

    @property
    def wrong_numbers(self) -> str | None:
        """What the run's verified micro-batches say against its replays; None where no mismatch was confirmed."""
        if not self.mismatches:
            return None
        mismatches = "1 mismatch" if self.mismatches == 1 else f"{self.mismatches:,} mismatches"
        return f"{mismatches} in {self.verified:,} verified micro-batches: replays gave other numbers than eager runs"

    @property
    def is_as_predicted(self) -> bool:
        """Whether no difference is larger than the tolerance, in a run that replayed and is not of another plan."""
        within = self.largest_difference <= self.tolerance + _ROUNDING
        return within and self.of_this_plan is not False and not self.nothing_replayed

    @property
    def holds(self) -> bool:
        """Whether the run did as predicted and without a mismatch; unconfirmed suspicions fail nothing."""
        return self.is_as_predicted and not self.mismatches


def read_stats(path: Path) -> Observed:
    """The last line of a statistics file: the counters at the end of the run.

    Raises:
        DataError: the file cannot be read or is empty, or its last line is not statistics.
    """
    last, number = "", 0
    try:
        with path.open(encoding="utf-8") as file:
            for at, line in enumerate(file, start=1):
                if not line.isspace():
                    last, number = line, at
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not text: {error}") from error
    if not number:
        raise DataError(f"{path}: is empty: the run wrote no statistics (Stats.append_jsonl)")
    where = f"{path}: line {number}"
    try:
        loaded = json.loads(last)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}; if the run was killed there, delete the line") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{where}: not statistics: holds a {type(loaded).__name__}, not an object")
    if "schema" not in loaded:
        raise DataError(f"{where}: not statistics: it has no schema; give what a run wrote (--stats FILE, or stats=)")
    found = validate(Observed, loaded, where=where)
    counted = sum(found.fallbacks.values()) + sum(r.count for r in found.replays)
    if counted != found.microbatches:
        raise DataError(f"{where}: microbatches: {found.microbatches}, but replays and fallbacks add up to {counted}")
    return found


def compare(plan: Plan, observed: Observed, *, tolerance: float, where: str = "statistics") -> Comparison:
    """The plan's prediction beside a run's statistics, which errors call `where`.

    `tolerance` is the largest absolute difference of a share that passes.

    Raises:
        DataError: no micro-batch's shape was looked at, so that there is nothing to compare.
    """
    captures = bool(plan.graphs.buckets)
    decisions: _Decisions = observed
    if captures and not observed.num_dispatched() and observed.decided is not None:
        decisions = observed.decided
    evaluated = observed.fallbacks.get(FallbackReason.not_training, 0)
    # a plan without buckets predicts that all run eagerly, for whatever reason
    by_shape = BY_SHAPE if captures else frozenset(FallbackReason) - {FallbackReason.not_training}
    dispatched = decisions.num_dispatched() if captures else observed.microbatches - evaluated
    if not dispatched:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(observed.fallbacks.items())) or "none ran"
        raise DataError(f"{where}: no micro-batch was dispatched by its shape ({reasons}): nothing to compare")
    fallbacks = {reason: n for reason, n in sorted(decisions.fallbacks.items()) if reason in by_shape and n}
    counts = {Bucket(r.max_seqs, r.max_seqlen, plan.graph_tokens, r.cp_size): r.count for r in decisions.replays}
    return Comparison(
        basis="replayed" if decisions is observed else "decided",
        microbatches=observed.microbatches,
        evaluated=evaluated,
        dispatched=dispatched,
        plan_microbatches=plan.microbatches.count,
        predicted_fallback_rate=plan.predictions.fallback_rate.microbatch,
        observed_fallback_rate=sum(fallbacks.values()) / dispatched,
        fallbacks=fallbacks,
        other_fallbacks={
            reason: n
            for reason, n in sorted(observed.fallbacks.items())
            if n and reason not in by_shape and reason is not FallbackReason.not_training
        },
        verified=sum(entry.count for entry in observed.verified),
        mismatches=sum(entry.count for entry in observed.mismatches),
        suspicions=sum(entry.count for entry in observed.suspicions),
        buckets=tuple(
            BucketShares(
                **{name: getattr(bucket, name) for name in ("max_seqs", "max_seqlen", "cp_size")},
                predicted_share=plan.shares.get(bucket, 0.0),
                observed_share=counts.get(bucket, 0) / dispatched,
            )
            for bucket in sorted({*plan.shares, *counts})
        ),
        replay_ms=observed.replay_ms,
        eager_ms=observed.eager_ms,
        plan_step_ms=plan.predictions.step_ms,
        plan_eager_step_ms=plan.predictions.eager_step_ms,
        plan_costs=f"{plan.costs.name} on {plan.costs.hardware}",
        tolerance=tolerance,
        of_this_plan=None if observed.plan is None else observed.plan == plan.identity,
        all_ranks=observed.all_ranks,
    )
