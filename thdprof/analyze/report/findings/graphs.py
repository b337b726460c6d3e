"""Slots, memory, and what really happened."""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, memory_size, percent
from thdprof.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Copies of the graphs, and what they take."""

    title: str
    slots: tuple[tuple[int, ...], ...]
    """For every pipeline rank, and within it model chunk."""
    gib_by_buckets: tuple[float, ...]
    """Graph memory of the busiest rank with 1, 2, ... buckets; empty where the cost table does not tell."""
    num_buckets: int
    """Buckets of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Shares of micro-batches, predicted and seen."""

    title: str
    names: tuple[str, ...]
    """The plan's graphs, then those that fell back by shape."""
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    note: str
    """What else there is to know."""


def memory(report: Report, cap: int) -> Memory:
    """Slots of every pipeline rank, and the memory of so many buckets."""
    plan, costs = report.plan, report.profile.costs
    slots = plan.graphs.slots
    num_buckets = len(plan.graphs.buckets)
    most = max(sum(rank) for rank in slots)
    models = len(slots) * len(slots[0])
    gib = []
    for buckets in range(1, max(3, num_buckets) + 1):
        size = costs.graph_memory_bytes(num_slots=most / models, num_buckets=buckets, n_tokens=_tokens_per_rank(plan))
        if size is not None:
            gib.append(size / 2**30)
    who = "The only pipeline rank" if len(slots) == 1 else f"The busiest of {len(slots):,} pipeline ranks"
    title = f"{who} needs {counted(most, 'slot')}"
    if not gib:
        title += "; the cost table does not tell what a slot takes."
    elif num_buckets == 0:
        title += f", with one cap of {cap:,} about {memory_size(gib[0])}; the plan captures nothing."
    elif num_buckets == 1:
        title += f" and about {memory_size(gib[0])} of graph memory."
    else:
        ratio = gib[num_buckets - 1] / gib[0] if gib[0] else 1.0
        title += (
            f" and about {memory_size(gib[num_buckets - 1])} for {num_buckets} graphs a slot, {ratio:.2f} times "
            "that of one, because all graphs of a slot share its memory."
        )
    return Memory(
        title=title,
        slots=tuple(tuple(rank) for rank in slots),
        gib_by_buckets=tuple(gib),
        num_buckets=num_buckets,
    )


def _tokens_per_rank(plan: Plan) -> int:
    """Tokens of a micro-batch on one context-parallel rank."""
    fixed = plan.training.max_seqlen_per_dp_cp_rank
    return fixed or max(1, plan.microbatches.n_tokens_max // plan.training.context_parallel_size)


def observed(report: Report, cap: int) -> Observed | None:
    """The plan beside the run's statistics; None without them."""
    found = report.comparison
    if found is None:
        return None
    several = len({b.cp_size for b in found.buckets}) > 1
    names = [
        f"{b.max_seqs:,} documents\nof {b.max_seqlen:,} tokens" + (f", {counted(b.cp_size, 'rank')}" if several else "")
        for b in found.buckets
    ]
    verdict = "as predicted" if found.holds else "not as predicted"
    title = (
        f"{percent(found.observed_fallback_rate)} of {found.dispatched:,} dispatched micro-batches fell back by their "
        f"shape, {percent(found.predicted_fallback_rate)} were predicted: {verdict}, no share is further off than "
        f"{found.largest_difference * 100:.2f} points."
    )
    notes = []
    if found.basis == "decided":
        notes.append("Nothing was replayed; what the shapes decide is shown.")
    if found.other_fallbacks:
        named = ", ".join(f"{reason} {n:,}" for reason, n in found.other_fallbacks.items())
        notes.append(f"Eager for reasons that no plan predicts: {named}.")
    for what, ms in (("replayed", found.replay_ms), ("eager", found.eager_ms)):
        if ms is not None:
            notes.append(f"A{'n' if what == 'eager' else ''} {what} micro-batch took {ms:.2f} ms.")
    return Observed(
        title=title,
        names=(*names, "eager by shape"),
        predicted=(*(b.predicted_share for b in found.buckets), found.predicted_fallback_rate),
        observed=(*(b.observed_share for b in found.buckets), found.observed_fallback_rate),
        note=" ".join(notes),
    )
