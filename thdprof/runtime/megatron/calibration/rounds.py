"""Rounds over all variants of a step within a budget of seconds; all ranks go on, and stop, together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch

LEAST_ROUNDS = 3
"""Rounds without which a median says little; fewer are taken only where the budget ends."""


def medians[K: Hashable](
    variants: Mapping[K, Callable[[], float]],
    *,
    rounds: int,
    deadline: float,
    progress: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[dict[K, float], int]:
    """The median of each variant's times, and the number of rounds; at least one round is made.

    A round is begun only if it is expected to end before the deadline, as the longest one so far did.

    Args:
        variants: functions that each measure once, and return milliseconds.
        rounds: most rounds.
        deadline: when measuring ends, by the clock `now`.
        progress: called with a line after every round.
        now: a clock in seconds.
        agreed: returns rank 0's answer on all ranks.
    """
    times: dict[K, list[float]] = {key: [] for key in variants}
    longest = 0.0
    done = 0
    while done < rounds and (done == 0 or agreed(now() + longest <= deadline)):
        began = now()
        for key, measure in variants.items():
            times[key].append(measure())
        longest = max(longest, now() - began)
        done += 1
        progress(f"round {done} of at most {rounds}: {longest:.1f} s")
    return {key: statistics.median(values) for key, values in times.items()}, done


def timed(run: Callable[[], None], *, repeat: int) -> float:
    """Milliseconds of one of the `repeat` pieces of work that `run` does, on the slowest rank."""
    several = torch.distributed.get_world_size() > 1
    torch.cuda.synchronize()
    if several:
        torch.distributed.barrier()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - began) * 1000 / repeat
    if several:
        slowest = torch.tensor(ms, dtype=torch.float64, device="cuda")
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        ms = float(slowest)
    return ms


def by_rank_zero(answer: bool) -> bool:
    """Rank 0's answer."""
    if torch.distributed.get_world_size() == 1:
        return answer
    shared = torch.tensor(int(answer), device="cuda")
    torch.distributed.broadcast(shared, src=0)
    return bool(shared)
