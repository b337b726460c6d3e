"""Checks whether a dataset still fits a plan: dispatches every micro-batch to the plan's buckets, as training would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.analysis import Progress, read_showing
from thdprof.analyze.buckets.statistics import Profile, fallback_rate
from thdprof.analyze.replay import replay, summarize_dataset
from thdprof.analyze.sources import format_of
from thdprof.analyze.sources.in_memory import TABLE, URI
from thdprof.dispatch import Decisions, FallbackReason, Level, Shapes, decide_all
from thdprof.errors import DataError, UsageError
from thdprof.plan import DatasetPart, FallbackRate, Plan
from thdprof.read.dataset import Dataset
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training.pipeline_slots import slots

_READ_SHARE = 0.15
"""Progress-bar estimate: reading ends at 15% of the total time."""
_ROUNDING = 1e-12
"""Largest excess of a rate over its limit that is put down to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One bucket, with the shares of micro-batches that replay it: by the plan's prediction, and now."""

    max_seqs: int
    max_seqlen: int
    cp_size: int
    planned_share: float
    share: float


@dataclass(frozen=True, slots=True)
class Overshoot:
    """The eager micro-batch that is over the largest bucket by the largest factor; the first of equals.

    Its step, its data-parallel rank and its position among the micro-batches of that rank and step count from 0. Its
    tokens are those of all `cp_size` context-parallel ranks that share it.
    """

    step: int
    dp_rank: int
    microbatch: int
    n_seqs: int
    max_seqlen: int
    n_tokens: int
    cp_size: int
    reason: FallbackReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The rates that a plan predicts beside those of a dataset now."""

    plan: Plan
    """The plan that is checked."""
    dataset: DatasetPart
    """The dataset that was read."""
    table: MicrobatchTable
    """The micro-batches now, over all ranks and steps."""
    profile: Profile
    """Documents of a micro-batch, and tokens of its longest document, now."""
    fallback_rate: FallbackRate
    """Shares that run eagerly now; of padded micro-batches where the plan assumes padding."""
    fallback_rate_unpadded: FallbackRate | None
    """Shares that run eagerly now without padding; None where all of the plan's micro-batches have one token count."""
    reasons: dict[FallbackReason, int]
    """Micro-batches that run eagerly, by reason."""
    buckets: tuple[BucketUse, ...]
    """The plan's buckets, ascending."""
    worst: Overshoot | None
    """The micro-batch that is furthest from fitting; None where nothing falls back, or the plan captures nothing."""
    level: Level
    """The units whose rate is limited: micro-batches, (rank, step) pairs or steps."""
    max_fallback_rate: float
    """Largest rate at `level` with which the plan holds."""
    notes: tuple[str, ...]
    """Sentences that the user should know before trusting the rates."""

    @property
    def same_data(self) -> bool:
        """Whether the dataset has the fingerprint that the plan was made from."""
        return self.dataset.fingerprint == self.plan.dataset.fingerprint

    @property
    def planned_rate(self) -> float:
        """The plan's rate at `level`."""
        return float(getattr(self.plan.predictions.fallback_rate, self.level))

    @property
    def rate(self) -> float:
        """The rate now at `level`."""
        return float(getattr(self.fallback_rate, self.level))

    @property
    def contradicted(self) -> list[str]:
        """Fields of the plan that its own data and settings do not give: they were edited, or another version wrote
        them. A predicted rate counts where it is too high and buckets are used as predicted. Empty for other data, and
        for a plan that is not exact, such as one of the micro-batches that a run has seen.
        """
        before = self.plan.microbatches
        pairs = {
            "count": (before.count, len(self.table)),
            "steps": (before.steps, self.table.num_steps),
            "n_seqs": (before.n_seqs, self.profile.n_seqs.percentiles()),
            "max_seqlen": (before.max_seqlen, self.profile.max_seqlen.percentiles()),
            "n_tokens_max": (before.n_tokens_max, int(self.table.n_tokens.max())),
        }
        fields = [f"microbatches.{name}" for name, (planned, now) in pairs.items() if planned != now]
        if self.planned_rate > self.rate + _ROUNDING and all(b.share == b.planned_share for b in self.buckets):
            fields.append(f"predictions.fallback_rate.{self.level}")
        return fields if self.same_data and before.exact else []

    @property
    def holds(self) -> bool:
        """Whether the rate is within the limit, and the plan is that of its data. A plan that captures nothing cannot
        be outgrown.
        """
        fits = not self.buckets or self.rate <= self.max_fallback_rate + _ROUNDING
        return fits and not self.contradicted


def check(
    plan: Plan,
    locations: Sequence[str] = (),
    *,
    max_fallback_rate: float | None = None,
    level: Level = "step",
    where: str = "plan",
    cache: Path | None = None,
    engine: str = "local",
    progress: Progress = lambda stage, done, documents: None,
) -> Check:
    """Replay a dataset with the plan's own training settings and dispatch its micro-batches to the plan's buckets.

    Args:
        locations: files, globs, directories or Megatron prefixes; empty: the files that the plan names.
        max_fallback_rate: largest rate at `level` with which the plan holds; None: the rate that the plan predicts.
        cache: directory that keeps what was read; None: beside the data. Files that did not change are not read again.

    Raises:
        DataError: the dataset cannot be read, or cannot be trained on with the plan's settings.
    """
    dataset, progress = _read(plan, locations, where, cache, engine, progress)
    documents = dataset.num_documents()
    try:
        replayed = replay(
            dataset,
            asdict(plan.training),
            lambda done: progress("replaying the schedule", _READ_SHARE + (1 - _READ_SHARE) * done, documents),
            planned_guess=plan.microbatches.pack_size_guessed,
        )
        needed = slots(
            pipeline_size=plan.training.pipeline_parallel_size,
            num_chunks=plan.training.virtual_pipeline_size or 1,
            num_microbatches=int(replayed.schedule.table.num_microbatches.max()),
            group=plan.training.microbatch_group_size,
        )
    except (DataError, UsageError) as error:
        raise DataError(f"{where}: its training settings do not fit the dataset: {error}") from error
    table = replayed.schedule.table
    padded = not plan.microbatches.n_tokens_constant
    decisions = dispatch(table, plan, padded=padded)
    unpadded = fallback_rate(table, dispatch(table, plan).choice < 0) if padded else None
    allowed = getattr(plan.predictions.fallback_rate, level) if max_fallback_rate is None else max_fallback_rate
    return Check(
        plan=plan,
        dataset=summarize_dataset(dataset),
        table=table,
        profile=Profile.count(table),
        fallback_rate=fallback_rate(table, decisions.choice < 0),
        fallback_rate_unpadded=unpadded,
        reasons=decisions.reasons(),
        buckets=tuple(
            BucketUse(
                **{name: getattr(bucket, name) for name in ("max_seqs", "max_seqlen", "cp_size")},
                planned_share=plan.shares[bucket],
                share=float((decisions.choice == index).mean()),
            )
            for index, bucket in enumerate(decisions.buckets)
        ),
        worst=_worst(table, plan, decisions),
        level=level,
        max_fallback_rate=allowed,
        notes=(
            *dataset.notes,
            *replayed.notes,
            *replayed.schedule.notes,
            *replayed.schedule.warnings,
            *_notes(plan, table, unpadded, needed),
        ),
    )


def _read(
    plan: Plan, locations: Sequence[str], where: str, cache: Path | None, engine: str, progress: Progress
) -> tuple[Dataset, Progress]:
    """The dataset at `locations`, or the plan's dataset without any, read in the plan's format, as `read_showing`."""
    planned, settings = plan.dataset.format, asdict(plan.training)
    uris = list(locations) or plan.dataset.uris
    try:
        return read_showing(uris, progress, format=planned, settings=settings, cache=cache, engine=engine)
    except DataError as error:
        if uris[0] in (URI, TABLE):
            raise DataError(f"{where}: was made from data in a program; name files of them") from error
        if locations and (other := format_of(locations)) not in (None, planned):
            raise DataError(
                f"{locations[0]}: is of format {other}, and {where} was made from {planned}: analyse it for a plan of "
                "its own"
            ) from error
        raise


def dispatch(table: MicrobatchTable, plan: Plan, *, padded: bool = False) -> Decisions:
    """The decisions of `thdprof.dispatch.Dispatcher` about every micro-batch of `table` with the plan's buckets.

    `padded` counts micro-batches with fewer tokens than the graphs as padded, as a plan assumes whose micro-batches
    differ in their number of tokens.
    """
    cp_size = _cp_size(table, plan)
    rank_tokens = (table.n_tokens[:1] if table.n_tokens.strides == (0,) else table.n_tokens) // cp_size
    if table.shared_capture_ranks > 1:
        fewest, most = -table.joint(-rank_tokens), table.joint(rank_tokens)
        rank_tokens = np.where(fewest == plan.graph_tokens, most, fewest)
    shapes = Shapes(
        n_seqs=table.joint(table.n_seqs),
        max_seqlen=table.joint(table.max_seqlen),
        n_tokens=np.maximum(rank_tokens, plan.graph_tokens) if padded else rank_tokens,
        cp_size=cp_size,
    )
    return decide_all(plan.captured, shapes)


def _cp_size(table: MicrobatchTable, plan: Plan) -> NDArray[np.int32]:
    """Context-parallel size of every micro-batch, shape [micro-batches], or [1] where all have the run's size."""
    if table.groups is not None:
        return table.groups.cp_size
    return np.array([plan.training.context_parallel_size], dtype=np.int32)


def _worst(table: MicrobatchTable, plan: Plan, decisions: Decisions) -> Overshoot | None:
    """The eager micro-batch that exceeds the buckets' documents, length or tokens by the largest factor."""
    eager, buckets = decisions.eager, decisions.buckets
    if not len(eager) or not buckets:
        return None
    cp_size = np.broadcast_to(_cp_size(table, plan), len(table))
    excess = np.zeros(len(eager))
    for size in {b.cp_size for b in buckets}:
        of_size = np.flatnonzero(cp_size[eager] == size)
        at = eager[of_size]
        fitting = [b for b in buckets if b.cp_size == size]
        most = fitting[-1].max_seqs
        # The longest document of each bucket and of those above it, then the first bucket with room for the documents.
        lengths = np.maximum.accumulate([b.max_seqlen for b in reversed(fitting)])[::-1]
        first = np.searchsorted([b.max_seqs for b in fitting], table.n_seqs[at])
        longest = lengths[np.minimum(first, len(fitting) - 1)]
        factors = (
            table.n_seqs[at] / most,
            table.max_seqlen[at] / longest,
            table.n_tokens[at] / (plan.graph_tokens * size),
        )
        excess[of_size] = np.maximum.reduce(factors)
    index = int(eager[excess.argmax()])
    sizes = {name: int(getattr(table, name)[index]) for name in ("n_seqs", "max_seqlen", "n_tokens")}
    return Overshoot(*table.position(index), **sizes, cp_size=int(cp_size[index]), reason=decisions.reason_of(index))


def _notes(plan: Plan, table: MicrobatchTable, unpadded: FallbackRate | None, needed: list[list[int]]) -> Iterator[str]:
    """Sentences that the user should know before trusting the rates.

    `unpadded` is what runs eagerly without padding, None where the plan assumes none; `needed` are the micro-batches
    in flight now for every pipeline rank and model chunk.
    """
    if not plan.captured:
        yield "the plan captures no graphs: all micro-batches run eagerly by its own advice, whatever the data"
    elif unpadded is not None:
        yield (
            "the plan's rates hold once every micro-batch is padded to one token count, which its training settings do "
            "not do, and so those here count every smaller one as padded: without padding "
            f"{100 * unpadded.microbatch:.3g}% of micro-batches run eagerly, and {100 * unpadded.step:.3g}% of steps "
            "have one"
        )
    if plan.graphs.tail_policy != plan.training.tail_policy:
        yield (
            f"graphs.tail_policy {plan.graphs.tail_policy} is not the training settings' "
            f"{plan.training.tail_policy}, with which micro-batches were replayed: analyse again"
        )
    if plan.captured and plan.graphs.slots != needed:
        planned = {(r, c): n for r, rank in enumerate(plan.graphs.slots) for c, n in enumerate(rank)}
        lacking = sum(n > planned.get((r, c), 0) for r, rank in enumerate(needed) for c, n in enumerate(rank))
        if lacking:
            yield (
                f"{lacking} model chunks now have more micro-batches in flight than slots: some will run eagerly "
                "(no_free_slot), which the rates here do not count; analyse again"
            )
    if table.size_guessed:
        yield "micro-batches were counted with a pack size that is a guess: rates are estimates"
    elif not table.exact:
        why = "were drawn" if table.drawn else "are a guess where Megatron would stop"
        yield f"micro-batches {why}: rates are estimates, and positions examples"
