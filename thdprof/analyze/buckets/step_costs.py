"""The expected synchronous step time, and what falls back, under any choice of buckets.

A step costs the slowest rank's sum over its micro-batches, times 1 + (pp - 1) / num_microbatches for a pipeline, and
one step of the optimizer. A micro-batch costs the replay of the smallest bucket that fits it, or its eager time; what
lies outside of the decoder; and what attention takes longer or shorter because the sum of its squared document lengths
is not that of the cost table, unless it runs eagerly and waits for the host all the same. Where nothing makes the host
wait between micro-batches, it launches eager ones ahead while the GPU still replays. Under dynamic context
parallelism a step costs the sum over its rounds of the slowest group's sum, a bucket fits micro-batches of its size
alone, and a group's ranks share the work of attention equally; a pipeline's factor is then by the number of rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.statistics import AnalyzedRun, fallback_rate
from thdprof.dispatch import Bucket, Shapes, holds
from thdprof.plan import FallbackRate
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups

_LARGEST_KEY = 2**62
"""Upper bound of an integer that holds the counts of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Distinct rows of counts, and the row of every rank and step.

    There are few distinct rows, because the order of a rank's micro-batches does not matter.
    """

    counts: NDArray[np.int32]
    """Micro-batches of each class, shape [rows, classes]."""
    row: NDArray[np.int32]
    """Index into `counts` of the row of each rank in each step, shape [steps, ranks]."""

    @classmethod
    def count(cls, table: MicrobatchTable, classes: NDArray[np.integer], num_classes: int) -> RankCounts:
        """The counts of `table`.

        To find equal rows quickly, the counts of a row are written as the digits of one integer, or of several in turn
        where one would be too large.

        Args:
            table: the micro-batches, without `groups`.
            classes: class of each micro-batch, from 0, shape [micro-batches].
        """
        base = int(table.num_microbatches.max()) + 1
        row: NDArray[np.integer] = np.zeros((table.num_steps, table.data_parallel_size), dtype=np.int32)
        counts: NDArray[np.int32] = np.zeros((1, 0), dtype=np.int32)
        first = 0
        while first < num_classes:
            stop = first + 1
            while stop < num_classes and len(counts) * base ** (stop + 1 - first) <= _LARGEST_KEY:
                stop += 1
            values = np.zeros(num_classes, dtype=np.int64)
            values[first:stop] = base ** np.arange(stop - first)
            keys = table.per_rank_step(values[classes], np.add) + row.astype(np.int64) * base ** (stop - first)
            distinct, index = np.unique(keys, return_inverse=True)
            before, digits = np.divmod(distinct, base ** (stop - first))
            columns = (digits[:, None] // values[first:stop] % base).astype(np.int32)
            counts = np.concatenate((counts[before], columns), axis=1)
            row = index.reshape(row.shape).astype(np.int32)
            first = stop
        return cls(counts=counts, row=row.astype(np.int32, copy=False))

    def any_in(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each rank runs a micro-batch of a marked class in each step, shape [steps, ranks]."""
        return np.asarray((self.counts[:, marked] > 0).any(axis=1)[self.row])


_MOST_ORDERED = 128
"""Micro-batches of a step whose orders are counted one by one; those of more are taken in proportion."""


def launched_ahead_ms(num_microbatches: int, replay_ms: float, waiting_ms: float) -> NDArray[np.float64]:
    """Mean milliseconds of a step in which the host launches eager micro-batches while the GPU still replays.

    A replay gives the host `replay_ms` to go ahead, and an eager micro-batch uses up to `waiting_ms` of what is left.
    The mean is over all orders of the micro-batches. It is the time of all replays without what is left at the end,
    whose mean is the sum over k of E[max(S_k, 0)] / k (Spitzer's identity), where S_k is the balance of any k of them.

    Args:
        num_microbatches: micro-batches of a rank in a step.
        waiting_ms: time by which an eager micro-batch takes longer than the GPU works.

    Returns:
        Milliseconds by the number of eager micro-batches, float64, shape [num_microbatches + 1].
    """
    n = min(num_microbatches, _MOST_ORDERED)
    log_factorial = np.cumsum(np.log(np.maximum(1, np.arange(n + 1))))
    drawn, eager, all_eager = np.ogrid[1 : n + 1, : n + 1, : n + 1]
    others = drawn - eager
    possible = (eager <= all_eager) & (others >= 0) & (others <= n - all_eager)

    def log_choices(of: NDArray[np.integer], taken: NDArray[np.integer]) -> NDArray[np.float64]:
        rest = np.clip(of - taken, 0, n)
        return np.asarray(log_factorial[of] - log_factorial[np.clip(taken, 0, n)] - log_factorial[rest])

    log_share = log_choices(all_eager, eager) + log_choices(n - all_eager, others)
    share = np.where(possible, np.exp(log_share - log_choices(np.array(n), drawn)), 0.0)
    left = (share * np.maximum(0.0, others * replay_ms - eager * waiting_ms) / drawn).sum(axis=(0, 1))
    ms = (n - np.arange(n + 1)) * replay_ms - left
    scale = num_microbatches / n
    return np.asarray(scale * np.interp(np.arange(num_microbatches + 1) / scale, np.arange(n + 1), ms))


_CHUNK = 1 << 22
"""Most elements of an array that is computed at once."""
_HELD = 1 << 24
"""Most elements of an array that is kept for further choices."""
_MOST_STEPS = 16
"""Most numbers of documents at which eager times may step for micro-batches to be told apart by them."""


class _Classes:
    """Micro-batches in classes: those with equal context-parallel sizes that are fitted by equal smallest values of
    max_seqs and max_seqlen.

    All of a class replay one bucket. Where ranks decide together, the class of a micro-batch is that of the largest
    values among those that are decided on with it.
    """

    def __init__(
        self, table: MicrobatchTable, caps: Sequence[int], lengths: Sequence[int], n_tokens: int, cp_size: int
    ) -> None:
        self._table = table
        width, height = len(lengths) + 1, len(caps) + 1
        numbers = np.arange(int(table.n_seqs.max()) + 1)
        dtype: np.dtype[np.signedinteger] = np.dtype(np.int16 if table.groups is None else np.int32)
        pair = (np.searchsorted(caps, numbers) * width).astype(dtype)[table.joint(table.n_seqs)]
        if int(table.max_seqlen.max()) > lengths[0]:
            sizes = np.arange(int(table.max_seqlen.max()) + 1)
            pair += np.searchsorted(lengths, sizes).astype(dtype)[table.joint(table.max_seqlen)]
        cp_sizes = np.array([cp_size])
        if table.groups is not None:
            cp_sizes, index = np.unique(table.groups.cp_size, return_inverse=True)
            pair += (index * (height * width)).astype(dtype)
        used = np.flatnonzero(np.bincount(pair))
        seqs, length = np.divmod(used % (height * width), width)
        self.largest = Shapes(
            n_seqs=np.append(caps, caps[-1] + 1)[seqs],
            max_seqlen=np.append(lengths, lengths[-1] + 1)[length],
            n_tokens=np.array([n_tokens]),
            cp_size=cp_sizes[used // (height * width)],
        )
        """The largest micro-batch of each class, arrays of shape [classes]; above the last cap, that cap plus 1."""
        renumber = np.zeros(int(used[-1]) + 1, dtype=np.int16)
        renumber[used] = np.arange(len(used))
        self.index = renumber[pair]
        """Class of each micro-batch."""
        self.counts = np.bincount(self.index, minlength=len(used))
        """Micro-batches of each class."""

    @functools.cached_property
    def by_rank(self) -> RankCounts:
        """Counts of every rank and step."""
        return RankCounts.count(self._table, self.index, len(self.counts))

    def sum_by_rank(self, values: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """The sum of `values`, one a micro-batch, over each class, rank and step: shape [steps, ranks, classes].

        None where it would take too much memory.
        """
        table, classes = self._table, len(self.counts)
        shape = (table.num_steps, table.data_parallel_size, classes)
        if math.prod(shape) > _HELD:
            return None
        cells = np.repeat(np.arange(shape[0] * shape[1]) * classes, np.repeat(table.num_microbatches, shape[1]))
        return np.bincount(cells + self.index, values, minlength=math.prod(shape)).reshape(shape)


class StepCosts:
    """Expected step times of any buckets made of given caps, from counts of micro-batches in classes.

    Every micro-batch is counted as padded to the tokens of the graphs. Where eager times step at a few numbers of
    documents, as modelled ones do, those of a class are equal.
    """

    def __init__(
        self,
        table: MicrobatchTable,
        costs: CostTable,
        caps: Sequence[int],
        lengths: Sequence[int],
        pipeline: int,
        *,
        n_tokens: int,
        cp_size: int = 1,
        goes_ahead: bool = False,
    ) -> None:
        """Step costs of `table`.

        Args:
            caps: values of max_seqs that buckets are made of, ascending.
            lengths: values of max_seqlen that buckets are made of, ascending.
            n_tokens: tokens of a graph's micro-batches on one context-parallel rank.
            cp_size: the run's context-parallel size, which `costs` are of; `table.groups` has the micro-batches' own
                sizes, if any.
            goes_ahead: whether nothing makes the host wait for the GPU between micro-batches of a step.
        """
        self._table, self._costs, self._pipeline, self._run_cp_size = table, costs, pipeline, cp_size
        self._eager_ms = costs.eager_ms(np.arange(int(table.n_seqs.max()) + 1))
        steps = np.flatnonzero(np.diff(self._eager_ms)).tolist()
        told_apart = len(steps) <= _MOST_STEPS and table.shared_capture_ranks == 1
        bounds = tuple(sorted({*caps, *(steps if told_apart else ())}))
        self._key = ("classes", bounds, tuple(lengths), n_tokens, cp_size)
        self._classes = table.hold(self._key, lambda: _Classes(table, bounds, lengths, n_tokens, cp_size))
        self._class, self.class_counts = self._classes.index, self._classes.counts
        self._eager_of_class: NDArray[np.float64] | None = None
        """Eager milliseconds of all micro-batches of each class; None where they differ within classes."""
        if told_apart or not steps:
            largest = np.minimum(self._classes.largest.n_seqs, len(self._eager_ms) - 1)
            self._eager_of_class = np.broadcast_to(self._eager_ms[largest], self.class_counts.shape)
        self._num_steps, self._optimizer_ms = table.num_steps, costs.optimizer_ms or 0.0
        self._goes_ahead = goes_ahead and costs.host_bound and table.groups is None
        self._has_one_rank = table.data_parallel_size == 1 and table.uniform
        self._fitted: dict[Bucket, tuple[NDArray[np.bool_], float]] = {}

    def _fit(self, buckets: Iterable[Bucket]) -> Mapping[Bucket, tuple[NDArray[np.bool_], float]]:
        """Whether each of `buckets` fits each class, shape [classes], and milliseconds of its replay, by bucket."""
        new = [bucket for bucket in {*buckets} if bucket not in self._fitted]
        fits = [np.broadcast_to(holds(bucket, self._classes.largest), self.class_counts.shape) for bucket in new]
        replay = [self._costs.replay_ms(bucket.max_seqs, bucket.max_seqlen) for bucket in new]
        self._fitted.update(zip(new, zip(fits, replay, strict=True), strict=True))
        return self._fitted

    def bucket_of_class(self, buckets: Sequence[Bucket]) -> NDArray[np.int64]:
        """Index of the first of `buckets` that fits each class, or -1 where none does, shape [classes]."""
        index_of_class, fitted = np.full(len(self.class_counts), -1), self._fit(buckets)
        for index in reversed(range(len(buckets))):  # the first that fits is written last
            index_of_class[fitted[buckets[index]][0]] = index
        return index_of_class

    def classes_held(self, bucket: Bucket) -> int:
        """The classes that `bucket` fits, as the set bits of an integer."""
        return sum(1 << int(place) for place in np.flatnonzero(self._fit([bucket])[bucket][0]))

    def fallback_rate(self, buckets: Sequence[Bucket]) -> FallbackRate:
        """The shares of micro-batches, (rank, step) pairs and steps with a fallback under `buckets`."""
        table, uncovered = self._table, self.bucket_of_class(buckets) < 0
        if table.groups is not None:
            return fallback_rate(table, uncovered[self._class])
        eager = int(self.class_counts[uncovered].sum()) / len(self._class)
        if self._num_steps == len(self._class):  # one micro-batch a step: all three rates are equal
            return FallbackRate(microbatch=eager, rank_step=eager, step=eager)
        ranks = self._classes.by_rank.any_in(uncovered)
        return FallbackRate(microbatch=eager, rank_step=float(ranks.mean()), step=float(ranks.any(axis=1).mean()))

    def shares(self, buckets: Sequence[Bucket]) -> tuple[float, ...]:
        """Share of micro-batches that replay each bucket."""
        chosen = self.bucket_of_class(buckets)
        return tuple(int(self.class_counts[chosen == i].sum()) / len(self._class) for i in range(len(buckets)))

    def step_ms(self, choices: Sequence[Sequence[Bucket]], stride: int = 1) -> NDArray[np.float64]:
        """Mean step time under each choice of buckets over every `stride`-th step, in milliseconds, shape [choices]."""
        weights = self._weights(choices)
        falls_back = weights[len(self.class_counts) :] > 0
        if self._least_longer is None or not self._costs.host_bound:
            return self._mean_step_ms(weights, np.zeros(len(falls_back), dtype=np.bool_), stride)
        times = np.empty(len(choices))
        for pattern in np.unique(falls_back, axis=1).T:  # what the host launches hides longer attention
            here = (falls_back == pattern[:, None]).all(axis=0)
            times[here] = self._mean_step_ms(weights[:, here], pattern, stride)
        return times

    def choice_ms(self, choice: Sequence[Bucket]) -> float:
        """Mean step time under one choice of buckets over all steps, in milliseconds."""
        return float(self.step_ms([choice])[0])

    def _mean_step_ms(self, weights: NDArray[np.float64], waits: NDArray[np.bool_], stride: int) -> NDArray[np.float64]:
        """Mean step time, [choices], where micro-batches of the classes that `waits` marks wait for the host, and not
        for longer attention."""
        table = self._table
        if table.groups is not None:
            return self._step_ms_by_round(weights, table.groups, self._longer_ms(waits), stride)
        if self._has_one_rank:
            # one rank: the mean of sums is the sum of means, so the classes' totals suffice
            factor = 1 + (self._pipeline - 1) / int(table.num_microbatches[0])
            totals: NDArray[np.float64] = self._total_ms(weights, waits) * (factor / self._num_steps)
            return totals - self._mean_ahead_ms(weights) + self._optimizer_ms
        sums = np.zeros(weights.shape[1])
        at_once = max(1, _CHUNK // (table.data_parallel_size * max(weights.shape)))
        steps = np.arange(0, self._num_steps, stride)
        ms_of_rows = self._ms_of_rows(weights)
        extra: NDArray[Any] | None = None
        if (by_rank := self._longer_by_rank) is not None:  # as a matrix, which BLAS multiplies
            extra = (by_rank.reshape(-1, len(waits)) @ (~waits).astype(np.float64)).reshape(by_rank.shape[:2])
        elif (longer := self._longer_ms(waits)) is not None:
            extra = table.per_rank_step(longer, np.add)
        for first in range(0, len(steps), at_once):
            part = steps[first : first + at_once]
            more = None if extra is None else extra[part].astype(np.float64, copy=False)
            if ms_of_rows is not None:
                slowest = _slowest(ms_of_rows, self._classes.by_rank.row[part], more)
            else:
                counts = self._rank_step_counts(part)
                by_rank = counts @ weights - self._ahead_ms(counts, weights)
                slowest = (by_rank if more is None else by_rank + more[:, :, None]).max(axis=1)  # [steps, choices]
            factor_by_step = 1 + (self._pipeline - 1) / table.num_microbatches[part]
            sums += factor_by_step @ slowest
        return sums / len(steps) + self._optimizer_ms

    def total_ms(self, choices: Sequence[Sequence[Bucket]]) -> NDArray[np.float64]:
        """Sum of the times of all micro-batches under each choice, without waits, in milliseconds, shape [choices]."""
        return self._total_ms(self._weights(choices), np.zeros(len(self.class_counts), dtype=np.bool_))

    def _total_ms(self, weights: NDArray[np.float64], waits: NDArray[np.bool_]) -> NDArray[np.float64]:
        totals = np.asarray((self._counts(self._class, 1, self._table.n_seqs) @ weights)[0])
        return totals if self._longer_of_class is None else totals + self._longer_of_class[~waits].sum()

    def _longer_ms(self, waits: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Milliseconds of each micro-batch beyond those of its class; 0 in the classes that `waits` marks."""
        longer = self._squared_ms
        return longer if longer is None or not waits.any() else np.where(waits[self._class], 0.0, longer)

    @functools.cached_property
    def _longer_of_class(self) -> NDArray[np.float64] | None:
        """Their sum over each class."""
        longer = self._squared_ms
        return None if longer is None else np.asarray(np.bincount(self._class, longer, len(self.class_counts)))

    @functools.cached_property
    def _longer_by_rank(self) -> NDArray[np.float64] | None:
        """Their sum over each class, rank and step, [steps, ranks, classes]; None where it is too large, or none."""
        if self._least_longer is None:
            return None
        key = ("longer", self._key, self._costs.ms_per_squared_token, self._costs.squared_tokens, self._least_longer)
        return self._table.hold(key, lambda: self._classes.sum_by_rank(np.asarray(self._squared_ms)))

    @functools.cached_property
    def _least_longer(self) -> float | None:
        """The least of `_squared_ms`; None without."""
        squared = self._table.squared
        if squared is None:
            return None
        least = self._table.hold("least squared", lambda: np.array([squared.min()]))
        ms = self._costs.squared_ms(least)
        return None if ms is None else float(ms[0])

    @functools.cached_property
    def _squared_ms(self) -> NDArray[np.float64] | None:
        """Milliseconds that each micro-batch takes beyond the cost table's; None: times do not depend on it."""
        table = self._table
        if table.squared is None:
            return None
        if table.groups is None:
            return self._costs.squared_ms(table.squared)
        return self._costs.squared_ms(table.squared * (self._run_cp_size / table.groups.cp_size))

    def _step_ms_by_round(
        self, weights: NDArray[np.float64], groups: RankGroups, squared: NDArray[np.float64] | None, stride: int
    ) -> NDArray[np.float64]:
        """Mean step time where all ranks wait for the slowest group at the end of every round."""
        order = np.lexsort((groups.first_rank, groups.round))
        order = order[groups.step[order] % stride == 0]
        lane = groups.round[order] * self._table.data_parallel_size + groups.first_rank[order]
        lanes = np.flatnonzero(np.diff(lane, prepend=-1))
        rounds = np.flatnonzero(np.diff(groups.round[order][lanes], prepend=-1))
        _, of_step, of_steps = np.unique(groups.step[order][lanes][rounds], return_inverse=True, return_counts=True)
        bubble = (1 + (self._pipeline - 1) / of_steps)[of_step]
        class_of, classes = self._class[order], len(self.class_counts)
        eager = self._eager_ms[self._table.n_seqs[order]][:, None]
        sums = np.empty(weights.shape[1])
        at_once = max(1, _CHUNK // len(order))
        for first in range(0, len(sums), at_once):
            part = weights[:, first : first + at_once]
            ms = part[:classes][class_of] + part[classes:][class_of] * eager
            if squared is not None:
                ms += squared[order][:, None]
            by_lane = np.add.reduceat(ms, lanes, axis=0)
            sums[first : first + at_once] = bubble @ np.maximum.reduceat(by_lane, rounds, axis=0)
        return sums / -(-self._num_steps // stride) + self._optimizer_ms

    def _weights(self, choices: Sequence[Sequence[Bucket]]) -> NDArray[np.float64]:
        """Factors of the classes' counts (first half) and eager times (second half), shape [2 * classes, choices]."""
        classes = len(self.class_counts)
        weights = np.zeros((2 * classes, len(choices)))
        fitted = self._fit([bucket for choice in choices for bucket in choice])
        for column, choice in enumerate(choices):
            falls_back = np.ones(classes, dtype=np.bool_)
            for bucket in reversed(choice):  # the first that fits is written last
                fits, ms = fitted[bucket]
                weights[:classes, column][fits] = ms
                falls_back &= ~fits
            weights[classes:, column] = falls_back
        weights[:classes] += self._costs.outside_ms or 0.0
        return weights

    def _counts(self, cells: NDArray[np.integer], groups: int, n_seqs: NDArray[np.int32]) -> NDArray[np.float64]:
        """Micro-batches and eager milliseconds, [groups, 2 * classes]; `cells` are group * classes + class of each."""
        shape = (groups, len(self.class_counts))
        counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        if self._eager_of_class is not None:
            return self._with_eager(counts)
        eager = np.bincount(cells, self._eager_ms[n_seqs], minlength=counts.size).reshape(shape)
        return np.concatenate((counts, eager), axis=1)

    def _ms_of_rows(self, weights: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Milliseconds of each distinct row of counts under each choice, shape [rows, choices].

        None where times must be summed for every rank instead: eager times differ, the number of ranks does not suit
        BLAS, or there are too many rows.

        Rows are multiplied in groups as large as a step has ranks. BLAS adds up in another order at the end of a group
        than within, so other sizes than these could change the last bits of a sum with a row's place in its group.
        """
        ranks = self._table.data_parallel_size
        if self._eager_of_class is None or not (ranks <= 2 or ranks % 4 == 0):
            return None
        counts = self._classes.by_rank.counts
        if len(counts) * max(weights.shape) > _CHUNK:
            return None
        groups = -(-len(counts) // ranks)
        rows = np.zeros((groups * ranks, weights.shape[0]))
        rows[: len(counts)] = self._with_eager(counts)
        ms = np.asarray(rows.reshape(groups, ranks, -1) @ weights).reshape(groups * ranks, -1)
        return ms - self._ahead_ms(rows, weights)

    @functools.cached_property
    def _ahead_by_number(self) -> NDArray[np.float64]:
        """What `launched_ahead_ms` says, by the number of micro-batches and of eager ones among them, both from 0."""
        numbers = np.flatnonzero(np.bincount(self._table.num_microbatches))
        replay = min(point.ms for point in self._costs.replay)
        documents = self._table.hold("by documents", lambda: np.bincount(self._table.n_seqs))
        waiting = max(0.0, float(self._eager_ms @ documents) / len(self._table) - replay)
        ms = np.zeros((int(numbers[-1]) + 1, int(numbers[-1]) + 1))
        for number in numbers:
            ms[number, : number + 1] = launched_ahead_ms(int(number), replay, waiting)
        return ms

    def _ahead_ms(self, counts: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64] | float:
        """Milliseconds that each choice saves by launching ahead, by `counts`, whose first ones are of the classes:
        [..., choices]."""
        if not self._goes_ahead:
            return 0.0
        of_class = counts[..., : len(self.class_counts)]
        eager = of_class @ (weights[len(self.class_counts) :] > 0)
        return np.asarray(
            self._ahead_by_number[of_class.sum(axis=-1).astype(np.intp)[..., None], eager.astype(np.intp)]
        )

    def _mean_ahead_ms(self, weights: NDArray[np.float64]) -> NDArray[np.float64] | float:
        """The mean over the steps of one rank of what each choice saves by launching ahead, shape [choices]."""
        if not self._goes_ahead:
            return 0.0
        by_rank = self._classes.by_rank
        counts, share = by_rank.counts, np.bincount(by_rank.row[:, 0]) / self._num_steps
        at_once = max(1, _CHUNK // len(counts))
        parts = [weights[:, first : first + at_once] for first in range(0, weights.shape[1], at_once)]
        return np.concatenate([share @ self._ahead_ms(counts, part) for part in parts])

    def _with_eager(self, counts: NDArray[np.integer]) -> NDArray[np.float64]:
        """`counts`, shape [..., classes], followed by eager milliseconds, if those of each class are equal."""
        return np.concatenate((counts, counts * np.asarray(self._eager_of_class)), axis=-1)

    def _rank_step_counts(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Micro-batches and eager milliseconds of every class on each rank, shape [steps, ranks, 2 * classes]."""
        if self._eager_of_class is not None:
            by_rank = self._classes.by_rank
            return self._with_eager(by_rank.counts[by_rank.row[steps]])
        table, classes = self._table, len(self.class_counts)
        ranks = table.data_parallel_size
        per_step = table.num_microbatches.astype(np.int64) * ranks
        starts = (np.cumsum(per_step) - per_step)[steps]
        sizes = per_step[steps]
        group = np.repeat(np.arange(len(steps)), sizes)
        position = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        kept = np.repeat(starts, sizes) + position
        rank = position // np.repeat(table.num_microbatches[steps], sizes)
        cells = (group * ranks + rank) * classes + self._class[kept]
        return self._counts(cells, len(steps) * ranks, table.n_seqs[kept]).reshape(len(steps), ranks, -1)


def _slowest(ms: NDArray[np.float64], row: NDArray[np.int32], more: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """The slowest rank's time in every step, [steps, choices]: `ms` [rows, choices] of its `row`, plus `more`."""
    slowest = ms[row[:, 0]]
    if more is not None:
        slowest += more[:, :1]
    for rank in range(1, row.shape[1]):
        of_rank = ms[row[:, rank]]
        if more is not None:
            of_rank += more[:, rank, None]
        np.maximum(slowest, of_rank, out=slowest)
    return slowest


def costs_of_run(run: AnalyzedRun, costs: CostTable, caps: Sequence[int], lengths: Sequence[int]) -> StepCosts:
    """The step costs of `run` for buckets made of `caps` and `lengths`, both ascending."""
    pipeline, cp_size = run.settings.pipeline_parallel_size, run.settings.context_parallel_size
    ahead = run.settings.host_goes_ahead
    return StepCosts(
        run.table, costs, caps, lengths, pipeline, n_tokens=run.n_tokens, cp_size=cp_size, goes_ahead=ahead
    )
