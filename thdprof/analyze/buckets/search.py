"""The search over choices of buckets: which choices there are, on how many steps, and which one is taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from operator import or_

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.dispatch import Bucket
from thdprof.errors import UsageError

_SEARCH_WORK = 4_000_000_000
"""Multiplications that the search over subsets may take; beyond it, it looks at evenly spaced steps."""
_SLOWNESS_BY_ROUND = 8
"""Multiplications that take as long as one micro-batch under one choice does with dynamic context parallelism."""
_MOST_CHOICES = 50_000
"""Most choices of buckets that are compared."""


def subsets(buckets: Sequence[Bucket], most: int) -> list[tuple[Bucket, ...]]:
    """Every choice of at most `most` of `buckets`, those of fewest buckets first; the empty choice runs all eagerly."""
    ordered = sorted(buckets)
    return [choice for size in range(min(most, len(ordered)) + 1) for choice in combinations(ordered, size)]


def choices_of(shapes: Sequence[Sequence[Bucket]], most: int, costs: StepCosts) -> Sequence[tuple[Bucket, ...]]:
    """Choices of at most `most` of `shapes` of each context-parallel size, fewest first.

    For a single size these are all choices. For several sizes they are the combinations of a few choices of each size:
    the quickest choice of every number of buckets, if it is quicker than those of fewer buckets, and the one bucket
    that fits all micro-batches.
    """
    by_size = [subsets(part, most) for part in shapes]
    if len(by_size) == 1:
        return by_size[0]
    short: list[list[tuple[Bucket, ...]]] = []
    for part, of_part in zip(shapes, by_size, strict=True):
        times = costs.total_ms(of_part).round(9)
        quickest: dict[int, int] = {}
        for index in np.argsort(times, kind="stable"):
            quickest.setdefault(len(of_part[index]), int(index))
        saves = [i for n, i in quickest.items() if all(times[i] < times[quickest[fewer]] for fewer in range(n))]
        fits_all = replace(part[0], max_seqs=max(b.max_seqs for b in part), max_seqlen=max(b.max_seqlen for b in part))
        short.append([*dict.fromkeys([*(of_part[i] for i in saves), (fits_all,)])])
    count = math.prod(len(part) for part in short)
    if count > _MOST_CHOICES:
        raise UsageError(
            f"--buckets {most}: {count:,} choices for {len(short)} context-parallel sizes are more than the "
            f"{_MOST_CHOICES:,} that are compared; give a smaller number"
        )
    return sorted((tuple(b for part in parts for b in part) for parts in product(*short)), key=len)


def refuse_long_search(num_shapes: int, num_buckets: int) -> None:
    """Refuse a search over more choices than are compared.

    Args:
        num_shapes: shapes of one context-parallel size.
        num_buckets: most buckets of a choice.

    Raises:
        UsageError: naming the number of choices.
    """
    choices = sum(math.comb(num_shapes, k) for k in range(min(num_shapes, num_buckets) + 1))
    if choices > _MOST_CHOICES:
        raise UsageError(
            f"--buckets {num_buckets}: {choices:,} choices of {num_shapes} shapes are more than the {_MOST_CHOICES:,} "
            "that are compared; give a smaller number"
        )


def search_stride(table: MicrobatchTable, costs: StepCosts, choices: int) -> int:
    """The stride of the steps on which so many `choices` are compared: 1, unless all steps would take too long."""
    if table.data_parallel_size == 1 and table.uniform:
        return 1
    if table.groups is not None:
        return min(table.num_steps, -(-len(table) * choices * _SLOWNESS_BY_ROUND // _SEARCH_WORK))
    work = table.num_steps * table.data_parallel_size * 2 * len(costs.class_counts) * choices
    return -(-work // _SEARCH_WORK)


def quickest_within(
    choices: Sequence[tuple[Bucket, ...]],
    times: NDArray[np.float64],
    costs: StepCosts,
    max_fallback_rate: float | None,
) -> tuple[Bucket, ...]:
    """The quickest choice within the limits; of equally quick choices, that of the fewest and then smallest buckets.

    Args:
        choices: the choices, those of fewest buckets first.
        times: mean step time under each choice, infinite where it exceeds the memory limit, shape [choices].
        costs: the step costs, for the fallback rates.
        max_fallback_rate: largest share of steps with an eager micro-batch; None: no limit.

    Raises:
        UsageError: no choice keeps to the limits.
    """
    for index in np.argsort(times.round(9), kind="stable"):  # choices come fewest first
        choice = choices[int(index)]
        if not np.isfinite(times[index]):
            break
        if max_fallback_rate is None:
            return choice
        if not choice and max_fallback_rate < 1:
            continue  # the empty choice: every step has an eager micro-batch
        if costs.fallback_rate(choice).step <= max_fallback_rate:
            return choice
    raise UsageError(
        f"--max-fallback-rate {max_fallback_rate:g}: no choice of buckets within the graph-memory budget keeps to "
        "it; raise --graph-memory-gib, or the rate"
    )


def quickest_covering(
    choices: Sequence[tuple[Bucket, ...]], times: NDArray[np.float64], costs: StepCosts, *, most_ms: float
) -> tuple[Bucket, ...]:
    """The quickest choice under which no micro-batch runs eagerly; empty where none takes at most `most_ms` a step.

    An eager micro-batch needs its activations beside all slots, where a further bucket needs about 1% of a slot.

    Args:
        choices: the choices, those of fewest buckets first.
        times: mean step time under each choice, infinite where it exceeds the memory limit, shape [choices].
        costs: the step costs.
        most_ms: longest mean step time that graphs may take.
    """
    everything = (1 << len(costs.class_counts)) - 1
    held = {b: costs.classes_held(b) for b in {bucket for choice in choices for bucket in choice}}
    covers = np.array([functools.reduce(or_, map(held.__getitem__, choice), 0) == everything for choice in choices])
    covering = np.where(covers, times, np.inf).round(9)
    best = int(covering.argmin())
    return choices[best] if covering[best] <= most_ms else ()
