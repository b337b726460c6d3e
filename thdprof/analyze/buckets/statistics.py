"""A run that is analysed, and mergeable statistics of its micro-batches: histograms, percentiles, fallback rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.plan import FallbackRate, Percentiles
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.training import Model, TrainingSettings
from thdprof.training.pipeline_slots import slots

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
"""The percentiles that plans and reports show, in per cent, by name."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each non-negative integer occurs."""

    counts: NDArray[np.int64]
    """counts[v] is the number of times that v occurs; shape [largest value + 1]."""

    @classmethod
    def count(cls, values: NDArray[np.integer]) -> Histogram:
        """The histogram of `values`, shape [n]."""
        return cls(np.bincount(values))

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both samples together."""
        merged = np.zeros(max(len(self.counts), len(other.counts)), dtype=np.int64)
        merged[: len(self.counts)] += self.counts
        merged[: len(other.counts)] += other.counts
        return Histogram(merged)

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return float(self.counts @ np.arange(len(self.counts))) / self.total

    def percentile(self, percent: float) -> int:
        """Nearest-rank percentile, equal to `numpy.percentile(..., method="inverted_cdf")`."""
        index = self.total * (percent / 100) - 1
        rank = max(0, math.ceil(index))
        return int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))

    def percentiles(self) -> Percentiles:
        """The mean and the percentiles that plans and reports show."""
        return Percentiles(mean=self.mean, **{name: self.percentile(p) for name, p in PERCENTILES.items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Histograms of the micro-batches of a run; equal to itself alone."""

    n_seqs: Histogram
    """Documents of a micro-batch."""
    max_seqlen: Histogram
    """Tokens of a micro-batch's longest document."""

    @classmethod
    def count(cls, table: MicrobatchTable, chosen: NDArray[np.bool_] | slice = slice(None)) -> Profile:
        """The profile of all micro-batches of `table`, or of those `chosen`, shape [micro-batches]."""
        return cls(n_seqs=Histogram.count(table.n_seqs[chosen]), max_seqlen=Histogram.count(table.max_seqlen[chosen]))

    @classmethod
    def by_cp_size(cls, table: MicrobatchTable, groups: RankGroups) -> dict[int, Profile]:
        """The profile of the micro-batches of each context-parallel size that `groups` have, ascending."""
        return {int(size): cls.count(table, groups.cp_size == size) for size in np.unique(groups.cp_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedRun:
    """A run whose buckets are chosen, and whose times and memory are predicted."""

    settings: TrainingSettings
    """Its settings."""
    table: MicrobatchTable
    """Its micro-batches."""
    profile: Profile
    """Their histograms."""
    n_tokens: int
    """Tokens of a graph's micro-batches on one context-parallel rank, whatever the context-parallel size."""
    slots: Sequence[Sequence[int]]
    """Micro-batches in flight for every pipeline rank and model chunk."""
    longest_possible: Mapping[int, int]
    """Tokens of the longest document that a micro-batch of each context-parallel size can hold; the run's size alone
    without dynamic context parallelism."""
    model: Model | None = None
    """The model that it trains; None: not known."""
    layer_graphs: bool = False
    """Whether graphs hold single layers, which keep what the model recomputes."""
    ends_at_router: bool = False
    """Whether graphs hold layers with experts up to their router, so that dropless experts run eagerly behind them."""
    expert_room: float | None = None
    """Rows of shared experts for which graphs have room on each rank, as a multiple of the even share."""

    @property
    def num_slots(self) -> float:
        """Slots of the pipeline rank that needs most, in whole models: one of n model chunks counts 1 / n."""
        return max(sum(rank) / (len(self.slots) * len(rank)) for rank in self.slots)


def make_run(
    settings: TrainingSettings,
    table: MicrobatchTable,
    *,
    model: Model | None,
    layer_graphs: bool,
    ends_at_router: bool,
    expert_room: float | None = None,
) -> AnalyzedRun:
    """The run of `settings` and `model` whose micro-batches are `table`.

    Raises:
        UsageError: megatron-core refuses the number of micro-batches for its interleaved schedule.
    """
    n_tokens = settings.max_seqlen_per_dp_cp_rank
    n_tokens = n_tokens or max(1, int(table.n_tokens.max()) // settings.context_parallel_size)
    most, possible = int(table.num_microbatches.max()), {settings.context_parallel_size: settings.seq_length}
    if table.groups is not None:
        most = -(-most // settings.microbatch_group) * settings.microbatch_group  # as a virtual pipeline wants them
        longest = settings.seq_length if settings.tail_policy == "none" else int(table.n_tokens.max())
        possible = {int(size): min(longest, int(size) * n_tokens) for size in np.unique(table.groups.cp_size)}
    return AnalyzedRun(
        settings=settings,
        table=table,
        profile=table.hold("profile", lambda: Profile.count(table)),
        n_tokens=n_tokens,
        slots=slots(
            pipeline_size=settings.pipeline_parallel_size,
            num_chunks=settings.virtual_pipeline_size or 1,
            num_microbatches=most,
            group=settings.microbatch_group_size,
        ),
        longest_possible=possible,
        model=model,
        layer_graphs=layer_graphs,
        ends_at_router=ends_at_router,
        expert_room=expert_room,
    )


def fallback_rate(table: MicrobatchTable, falls_back: NDArray[np.bool_]) -> FallbackRate:
    """The shares of micro-batches, (rank, step) pairs and steps with a fallback.

    Args:
        falls_back: whether each micro-batch runs eagerly, shape [micro-batches].
    """
    per_rank_step = table.any_per_rank_step(falls_back)
    return FallbackRate(
        microbatch=float(falls_back.mean()),
        rank_step=float(per_rank_step.mean()),
        step=float((per_rank_step.any(axis=1) if table.data_parallel_size > 1 else per_rank_step).mean()),
    )


def upper_bound(num_failures: int, num_trials: int, *, confidence: float = 0.95) -> float:
    """One-sided upper Clopper-Pearson bound of the rate of failures, after `num_failures` in `num_trials` trials."""
    if num_failures >= num_trials:
        return 1.0
    if num_failures == 0:
        return -math.expm1(math.log1p(-confidence) / num_trials)
    from scipy.special import betaincinv

    return float(betaincinv(num_failures + 1, num_trials - num_failures, confidence))
