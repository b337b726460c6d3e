"""Puts packs into an order of training in which the ranks of a step cost alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 1.01
"""Slowest rank over mean from which the default window needs to be no longer."""
_CORRELATION = 0.1
"""Bound on the correlations of neighbouring steps' costs and mean lengths, by magnitude."""
_SHUFFLES = 64
"""Number of shuffles of the steps that are tried to keep that bound."""


class StepFigures(NamedTuple):
    """What the steps of an order are like."""

    slowest_over_mean: float
    """Cost of the dearest rank of a step over the mean of its ranks, in the mean of the full steps, 1 or more."""
    correlation: float
    """Correlation of the mean lengths of neighbouring full steps' documents, of their costs where no lengths are known,
    -1 to 1; 0 for fewer than three steps or for equal ones."""
    source_distance: float | None
    """Share of a step's tokens that other sources would have in an even mix, in the mean of the full steps, 0 to 1."""


class OrderFigures(NamedTuple):
    """The steps of an order beside those of a random one."""

    ordered: StepFigures
    random: StepFigures


def order_packs(
    costs: NDArray[np.float64],
    *,
    num_ranks: int,
    num_microbatches: int,
    micro_batch_size: int = 1,
    window: int | None = None,
    seed: int = 0,
    sizes: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """Return the packs in an order of training in which the ranks of a step cost alike.

    A rank takes `num_microbatches` x `micro_batch_size` packs a step. Dear and cheap ones are put together, so that the
    sums are alike. Steps then take sums that are still closer to each other, out of those of a window of steps. With
    one pack for a rank and step, these are packs of like cost. The n-th micro-batches of the ranks are all dear or all
    cheap. Which packs form a window is random, and so is the order of all steps. Of several random orders of them the
    first is taken whose neighbouring steps correlate by less than 0.1, in costs and in mean lengths of documents.

    Packs are read as sequential samplers hand out rows: step after step, in it micro-batch after micro-batch, in that
    rank after rank. Those that fill no step come last, in random order.

    Args:
        costs: relative time of every pack, over 0, float64, shape [packs].
        num_ranks: data-parallel ranks.
        num_microbatches: micro-batches of a rank and step.
        micro_batch_size: packs of a micro-batch.
        window: steps of a window; 0: a random order; None: as few as make the slowest rank cost 1.01 of the mean.
        seed: of the random order.
        sizes: tokens and documents of every pack, float64, shape [2, packs]; None: not known.

    Returns:
        Numbers of packs, a permutation, int64, shape [packs].

    Raises:
        ValueError: a cost is not over 0 and finite, or a number is out of bounds.
    """
    shape = _check_arguments(costs, num_ranks, num_microbatches, micro_batch_size)
    if window is not None and window < 0:
        raise ValueError(f"window {window}: use 0 or more steps")
    random = np.random.default_rng(seed)
    permutation = random.permutation(len(costs))
    num_steps = len(costs) // int(np.prod(shape))
    if num_steps == 0 or window == 0:
        return permutation
    full, rest = np.split(permutation, [num_steps * int(np.prod(shape))])
    size = min(window or 1, num_steps)
    steps = _deal_windows(costs, full, shape, size)
    while window is None and size < num_steps and _measure_slowest(costs[steps]) > _ENOUGH:
        size = min(2 * size, num_steps)
        steps = _deal_windows(costs, full, shape, size)
    ranks = random.permuted(np.tile(np.arange(num_ranks), (num_steps, 1)), axis=1)[:, None, :, None]
    microbatches = random.permuted(np.tile(np.arange(num_microbatches), (num_steps, 1)), axis=1)[:, :, None, None]
    steps = np.take_along_axis(np.take_along_axis(steps, ranks, axis=2), microbatches, axis=1)
    values = [costs[steps].sum(axis=(1, 2, 3))]
    if sizes is not None:
        values.append(_mean_lengths(sizes, steps))
    shuffles = (random.permutation(num_steps) for _ in range(_SHUFFLES))
    shuffle, least = np.arange(num_steps), np.inf
    for other in shuffles:
        correlation = max(abs(_correlate_neighbours(each[other])) for each in values)
        if correlation < least:
            shuffle, least = other, correlation
        if least < _CORRELATION:
            break
    return np.concatenate((steps[shuffle].ravel(), rest))


def measure_order(
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    *,
    num_ranks: int,
    num_microbatches: int,
    micro_batch_size: int = 1,
    seed: int = 0,
    sizes: NDArray[np.float64] | None = None,
    sources: NDArray[np.float64] | None = None,
) -> OrderFigures:
    """Measure the full steps of an order, and those of the random order of `order_packs` with `window=0` and the seed.

    Arguments that are not named here are those of `order_packs`.

    Args:
        order: numbers of the packs in the order of training, int64, shape [packs].
        sources: tokens of each source in every pack, float64, shape [sources, packs]; None: not known.

    Raises:
        ValueError: a cost is not over 0 and finite, a number is out of bounds, or the packs fill no step.
    """
    shape = _check_arguments(costs, num_ranks, num_microbatches, micro_batch_size)
    size = int(np.prod(shape))
    if len(costs) < size:
        raise ValueError(f"costs: {len(costs)} packs fill no step of {size}")
    both = []
    for packs in (order, np.random.default_rng(seed).permutation(len(costs))):
        steps = packs[: len(packs) // size * size].reshape(-1, *shape)
        by_step = costs[steps]
        values = by_step.sum(axis=(1, 2, 3)) if sizes is None else _mean_lengths(sizes, steps)
        distance = None if sources is None else _measure_sources(sources, steps)
        both.append(StepFigures(_measure_slowest(by_step), _correlate_neighbours(values), distance))
    return OrderFigures(*both)


def _check_arguments(
    costs: NDArray[np.float64], num_ranks: int, num_microbatches: int, micro_batch_size: int
) -> tuple[int, int, int]:
    """Return the shape of a step's packs: micro-batches, ranks, packs of a micro-batch."""
    wrong = np.flatnonzero(~((costs > 0) & np.isfinite(costs)))
    if len(wrong):
        raise ValueError(f"costs: pack {wrong[0]} costs {costs[wrong[0]]}; use finite numbers over 0")
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "micro_batch_size": micro_batch_size}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} {number}: use 1 or more")
    return num_microbatches, num_ranks, micro_batch_size


def _deal_windows(
    costs: NDArray[np.float64], packs: NDArray[np.int64], shape: tuple[int, int, int], size: int
) -> NDArray[np.int64]:
    """Deal packs, `size` steps at a time, to steps of `shape`, the last window with the rest. int64 [steps, *shape]."""
    per_step = int(np.prod(shape))
    num_windows = max(1, len(packs) // (size * per_step))
    equal, last = np.split(packs, [(num_windows - 1) * size * per_step])
    steps = [_deal_packs(costs, part, shape) for part in (equal.reshape(-1, size * per_step), last[None]) if part.size]
    return np.concatenate(steps)


def _deal_packs(
    costs: NDArray[np.float64], windows: NDArray[np.int64], shape: tuple[int, int, int]
) -> NDArray[np.int64]:
    """Deal the packs of every window [windows, packs] to steps, whose ranks' sums are alike; int64 [steps, *shape]."""
    num_microbatches, num_ranks, micro_batch_size = shape
    packs, sums = _fold_values(costs[windows], micro_batch_size)
    microbatches, sums = _fold_values(sums, num_microbatches)
    by_sum = np.argsort(sums, axis=1, kind="stable")[:, :, None]
    microbatches = np.take_along_axis(microbatches, by_sum, axis=1).reshape(len(windows), -1, 1)
    packs = np.take_along_axis(packs, microbatches, axis=1).reshape(len(windows), -1)
    dealt = np.take_along_axis(windows, packs, axis=1)
    return dealt.reshape(-1, num_ranks, num_microbatches, micro_batch_size).swapaxes(1, 2)


def _fold_values(values: NDArray[np.float64], size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Put `size` values together, so that sums are alike, in each row of [rows, values].

    The largest values come first, a part of them for each place. The largest of a part goes to the least sum.

    Returns:
        The places of the values of each sum in their row, the largest first, int64 [rows, sums, size]; and the sums.
    """
    order = np.argsort(-values, axis=1, kind="stable").reshape(len(values), size, -1)
    members = order.swapaxes(1, 2).copy()
    sums = np.take_along_axis(values, order[:, 0], axis=1)
    for place in range(1, size):
        ascending = np.argsort(sums, axis=1, kind="stable")
        np.put_along_axis(members[:, :, place], ascending, order[:, place], axis=1)
        sums += np.take_along_axis(values, members[:, :, place], axis=1)
    return members, sums


def _measure_slowest(by_step: NDArray[np.float64]) -> float:
    """Mean over steps of the dearest rank's cost over the ranks' mean; costs [steps, micro-batches, ranks, packs]."""
    ranks = by_step.sum(axis=(1, 3))
    return float((ranks.max(axis=1) / ranks.mean(axis=1)).mean())


def _correlate_neighbours(step_costs: NDArray[np.float64]) -> float:
    """Correlation of each value with the next one; 0 where there is none."""
    if len(step_costs) < 3 or np.ptp(step_costs[1:]) == 0 or np.ptp(step_costs[:-1]) == 0:
        return 0.0
    return float(np.corrcoef(step_costs[:-1], step_costs[1:])[0, 1])


def _mean_lengths(sizes: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean length of the documents of every step; packs [steps, micro-batches, ranks, packs of one]."""
    tokens, documents = (each[steps].sum(axis=(1, 2, 3)) for each in sizes)
    means: NDArray[np.float64] = tokens / documents
    return means


def _measure_sources(sources: NDArray[np.float64], steps: NDArray[np.int64]) -> float:
    """Mean over steps of half the differences of shares in a step and in all; arguments as for `_mean_lengths`."""
    tokens = np.stack([each[steps].sum(axis=(1, 2, 3)) for each in sources])
    shares = tokens / tokens.sum(axis=0)
    even = tokens.sum(axis=1, keepdims=True) / tokens.sum()
    return float(np.abs(shares - even).sum(axis=0).mean() / 2)
