"""Shapes of buckets that are worth considering, from the micro-batches and the cost table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.statistics import PERCENTILES, Profile

_MAX_SEQLEN_PERCENTILES = (50.0, 90.0, 99.0, 100.0)
"""Percentiles of max_seqlen that are considered as lengths of a bucket."""
_MAX_CANDIDATES = 16
"""Caps that are considered at most, unless the percentiles alone are more."""


def candidate_caps(profile: Profile, costs: CostTable) -> list[int]:
    """Caps worth considering: quantiles of `n_seqs` and measured caps, rounded up to the cost table's steps."""
    histogram = profile.n_seqs
    quantiles = {histogram.percentile(p) for p in (75.0, *PERCENTILES.values())}
    top = max(quantiles)
    measured = [n for n in costs.measured_max_seqs() if min(quantiles) <= n]
    longest = profile.max_seqlen.percentile(100.0)
    at_top = costs.replay_ms(top, longest)
    beyond = {n for n in measured if n > top and costs.replay_ms(n, longest) < at_top}  # a larger shape can be cheaper
    optional = sorted({n for n in measured if n < top and n not in quantiles} | beyond)
    room = max(1, _MAX_CANDIDATES - len(quantiles))
    spread = optional[:: -(-len(optional) // room)] if optional else []
    cheapest = min(optional, key=lambda n: costs.replay_ms(n, longest), default=top)
    return sorted({costs.rounded_max_seqs(n) for n in (*quantiles, *spread, cheapest)})


def curve_caps(profile: Profile, costs: CostTable) -> list[int]:
    """Caps of the curve: the candidates, and the percentiles of `n_seqs` that they were rounded up from."""
    percentiles = {max(1, profile.n_seqs.percentile(p)) for p in PERCENTILES.values()}
    return sorted({*candidate_caps(profile, costs), *(percentiles if costs.max_seqs_steps else ())})


def candidate_lengths(profile: Profile, costs: CostTable, longest_possible: int) -> list[int]:
    """Values of max_seqlen worth considering, in tokens; where costs do not depend on it, only the largest possible."""
    top = max(longest_possible, profile.max_seqlen.percentile(100.0))
    if not costs.needs_max_seqlen:
        return [top]
    step = costs.max_seqlen_granularity
    quantiles = {profile.max_seqlen.percentile(p) for p in _MAX_SEQLEN_PERCENTILES}
    return sorted({min(top, max(1, math.ceil(n / step) * step)) for n in quantiles} | {top})


def longest_captured(profiles: Mapping[int, Profile], longest_possible: Mapping[int, int]) -> dict[int, int]:
    """The longest document, in tokens, that one cap's graph of each context-parallel size is captured for.

    Args:
        profiles: micro-batches of each context-parallel size.
        longest_possible: tokens of the longest document that a micro-batch of each size can hold.
    """
    return {
        cp_size: max(longest_possible[cp_size], part.max_seqlen.percentile(100.0)) for cp_size, part in profiles.items()
    }
