"""How much room graphs need for the rows of dropless experts that several ranks share.

A graph has room for a fixed number of rows on each expert-parallel rank (`graphs.expert_room` of the plan). It is
chosen by loads that are expected, or that the statistics of a run hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from thdprof.errors import DataError, UsageError
from thdprof.files import read_text

if TYPE_CHECKING:
    from thdprof.training.model import Model

_STEPS_EAGER = 0.01
"""Largest predicted share of steps in which rows have no room, where the user sets no limit."""
_OPTION = "--expert-loads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """The rows of the rank whose experts get most, as a multiple of the even share."""

    basis: str
    """The loads that were given: uniform, a factor, or a file."""
    expected: float = 1.0
    """Its mean over micro-batches, around which tokens choose their experts by chance."""
    observed: Mapping[float, int] | None = None
    """Number of micro-batches of a model chunk by what it was in the layer where it was most; None: see `expected`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoom:
    """Room for rows in graphs, and what it is predicted to be too little for."""

    factor: float
    """Rows for which graphs have room on each rank, as a multiple of the even share."""
    microbatch: float
    """Predicted share of micro-batches whose rows have no room, so that they run eagerly."""
    step: float
    """Predicted share of steps with such a micro-batch on any rank."""
    basis: str
    """The loads that were given: uniform, a factor, or a file."""


def read_expert_loads(given: str) -> ExpertLoads:
    """The loads that `--expert-loads` names: uniform, a factor of at least 1, or a file of a run's statistics.

    Raises:
        UsageError: a number below 1 or none.
        DataError: the file cannot be read, or its run counted no loads.
    """
    if given == "uniform":
        return ExpertLoads(basis=given)
    try:
        expected = float(given)
    except ValueError:
        return ExpertLoads(basis=given, observed=_read_observed(Path(given)))
    if not 1 <= expected < math.inf:
        raise UsageError(f"{_OPTION} {given}: must be uniform, a number of at least 1, or a file of --stats")
    return ExpertLoads(basis=given, expected=expected)


def _read_observed(path: Path) -> Mapping[float, int]:
    lines = read_text(path, where=f"{_OPTION} {path}", kind="statistics").splitlines()
    for line in reversed(lines):
        try:
            found = json.loads(line).get("expert_loads")
            loads = {float(load): int(count) for load, count in found or ()}
            if loads and (lacking := int(json.loads(line)["fallbacks"].get("expert_overflow", 0))):
                loads[math.inf] = lacking  # behind the first layer without room, loads are those of no micro-batch
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{_OPTION} {path}: no statistics of a run (thdprof.run --stats): {error}") from error
        if loads:
            return loads
    raise DataError(
        f"{_OPTION} {path}: the run counted no loads of experts: train some steps by a plan with graphs.expert_room, "
        "such as one of --expert-loads uniform, and give its --stats"
    )


def choose_room(
    loads: ExpertLoads, model: Model, *, n_tokens: int, microbatches: int, max_step_rate: float | None, chunks: int = 1
) -> ExpertRoom:
    """The least room, in hundredths, with which few steps have a micro-batch without room.

    Args:
        loads: the loads by which it is chosen.
        model: the model, with experts that several ranks share.
        n_tokens: tokens of a micro-batch on one rank.
        microbatches: micro-batches of a step, over all ranks.
        max_step_rate: largest share of such steps; None: 1%.
        chunks: model chunks that each micro-batch passes. Their loads are taken as those that were observed, by chance.
    """
    ranks, top_k, experts = model.expert_model_parallel_size, model.moe_router_topk, model.num_experts or 1
    together = math.ceil(microbatches / ranks)  # an expert-parallel group's micro-batches have room together, or none
    limit = _STEPS_EAGER if max_step_rate is None else max_step_rate
    most = ranks * min(top_k, experts // ranks) / top_k  # all rows that there can be
    for hundredths in range(101, math.ceil(100 * most) + 1):
        factor = min(hundredths / 100, most)
        rate = 0.0 if factor >= most else _lack_room(loads, factor, model, n_tokens, chunks)
        step = -math.expm1(together * math.log1p(-rate)) if rate < 1 else 1.0
        if step <= limit:
            return ExpertRoom(factor=factor, microbatch=rate, step=step, basis=loads.basis)
    return ExpertRoom(factor=most, microbatch=0.0, step=0.0, basis=loads.basis)


def _lack_room(loads: ExpertLoads, factor: float, model: Model, n_tokens: int, chunks: int) -> float:
    """Share of micro-batches in which some rank has more rows in some layer."""
    if loads.observed is not None:
        total = sum(loads.observed.values())
        one = sum(count for load, count in loads.observed.items() if load > factor) / total
        return -math.expm1(chunks * math.log1p(-one)) if one < 1 else 1.0
    ranks, top_k, experts = model.expert_model_parallel_size, model.moe_router_topk, model.num_experts or 1
    own = 1 / ranks
    # each token of the group draws top-k of the experts without putting any back
    variance = own * (1 - own) * top_k * (experts - top_k) / max(1, experts - 1)
    spread = math.sqrt(ranks * n_tokens * variance) / (n_tokens * top_k)
    means = [loads.expected, *[max(0.0, (ranks - loads.expected) / (ranks - 1))] * (ranks - 1)]
    beyond = sum(1 - NormalDist(mean, spread).cdf(factor) if spread else float(mean > factor) for mean in means)
    return -math.expm1((model.moe_layers + model.mtp_num_layers) * math.log1p(-min(beyond, 1 - 1e-12)))
