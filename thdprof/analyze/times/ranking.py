"""Ranks plans by how fast they train: by tokens per second, or per second and GPU where their GPUs differ in number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.predictions import Times, Worth
from thdprof.training import model_definitions

_LIKE_TOKENS = 0.05
"""Share by which micro-batches may have more or fewer tokens than those that a cost table was measured on."""
_OF_A_STAGE = ("model", "pipeline_parallel_size", "virtual_pipeline_size", "context_parallel_size")
"""Settings, beside those of the model, by which a rank's share of the layers and tokens changes."""

Measure = Literal["tokens_per_second", "tokens_per_second_per_gpu"]
"""What plans are ranked by: the rate of the whole run, or that rate divided by the run's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens of documents that a run trains on per second, over all its GPUs. All plans of a comparison run on the same
    hosts, so that the same ends of their ranges are compared."""

    gpus: int
    """GPUs of the run."""
    low: float
    """The rate on the slowest host that is expected."""
    middle: float
    """The rate on a host in the middle of the range."""
    high: float
    """The rate on the quickest host that is expected."""

    @classmethod
    def from_worth(cls, worth: Worth | None, times: Times, *, step_ms: float) -> Rate | None:
        """The rate of a plan; None without times.

        Args:
            step_ms: mean step time on a host in the middle of the range, in milliseconds.
        """
        if worth is None or times.step_ms is None:
            return None
        low, high = worth.tokens_per_second
        return cls(gpus=worth.gpus, low=low, middle=high * times.step_ms[0] / step_ms, high=high)

    def per_gpu(self) -> Rate:
        """The rate of one of the GPUs."""
        return Rate(gpus=1, low=self.low / self.gpus, middle=self.middle / self.gpus, high=self.high / self.gpus)


def why_unranked(times: Times, costs: CostTable, *, n_tokens: int, varied: Sequence[str]) -> str | None:
    """Why a plan cannot be compared with others by its tokens per second; None where it can.

    A measured table is of one model, one stage and one number of tokens: its milliseconds say nothing of others.

    Args:
        n_tokens: tokens of a graph's micro-batches on one context-parallel rank.
        varied: settings that differ between the plans, by name.
    """
    if times.origin == "none":
        return times.basis
    if times.origin == "modelled":
        return None
    other = [name.replace("_", "-") for name in varied if name in model_definitions() or name in _OF_A_STAGE]
    if other:
        return (
            f"a cost table has the times of one model on one rank, and {' and '.join(other)} "
            f"{'varies' if len(other) == 1 else 'vary'}: without --cost-table times are modelled"
        )
    if abs(n_tokens - costs.n_tokens) > _LIKE_TOKENS * costs.n_tokens:
        return (
            f"the cost table has the times of {costs.n_tokens:,} tokens on a rank, and micro-batches have "
            f"{n_tokens:,}: measure a table of as many, or leave --cost-table out for modelled times"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The order of plans, the quickest first. Plans are named by their places in what was ranked."""

    measure: Measure | None
    """What they are ranked by; None where none has times, and their given order stays."""
    order: tuple[int, ...]
    """All plans: those with times by rank, those without in their given order, and at last those that failed."""
    ranks: tuple[int | None, ...]
    """The rank of every plan, from 1, in their given order; None without times."""
    first_on_slow_host: int | None
    """The plan that is quickest on the slowest host that is expected; None where none has times."""
    first_on_quick_host: int | None
    """The plan that is quickest on the quickest host."""


def rank(rates: Sequence[Rate | None], works: Sequence[bool]) -> Ranking:
    """Rank plans by their rates on a host in the middle of the range; of equal ones the first given comes first.

    Args:
        rates: the rate of every plan; None without times.
        works: whether each plan is one, and not a combination that cannot be.
    """
    timed = [place for place, rate in enumerate(rates) if rate is not None]
    if not timed:
        return Ranking(
            measure=None,
            order=tuple(range(len(rates))),
            ranks=(None,) * len(rates),
            first_on_slow_host=None,
            first_on_quick_host=None,
        )
    alike = len({rate.gpus for rate in rates if rate is not None}) == 1
    compared = {place: rate if alike else rate.per_gpu() for place, rate in enumerate(rates) if rate is not None}
    ranked = _quickest_first(compared, lambda rate: rate.middle)
    untimed = [place for place in range(len(rates)) if place not in compared]
    ranks = {place: number for number, place in enumerate(ranked, start=1)}
    return Ranking(
        measure="tokens_per_second" if alike else "tokens_per_second_per_gpu",
        order=(*ranked, *(p for p in untimed if works[p]), *(p for p in untimed if not works[p])),
        ranks=tuple(ranks.get(place) for place in range(len(rates))),
        first_on_slow_host=_quickest_first(compared, lambda rate: rate.low)[0],
        first_on_quick_host=_quickest_first(compared, lambda rate: rate.high)[0],
    )


def _quickest_first(rates: dict[int, Rate], value: Callable[[Rate], float]) -> list[int]:
    return sorted(rates, key=lambda place: -value(rates[place]))
