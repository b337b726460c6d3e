"""Findings on the plan's graphs: their slots, their memory, and their use in a real run."""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.words import counted, memory_size, percent
from thdprof.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The slots of the plan's graphs, and the memory that the graphs take."""

    title: str
    """The finding in a sentence."""
    slots: tuple[tuple[int, ...], ...]
    """Slots of each model chunk, for every pipeline rank."""
    gib_by_buckets: tuple[float, ...]
    """Graph memory of the busiest rank in GiB with 1, 2, ... buckets, less the memory that the plan's offloading frees;
    empty where the cost table does not give graph memory."""
    host_gib: float | None
    """Pinned host memory of the busiest rank's slots in GiB; None without offloading."""
    num_buckets: int
    """Buckets of the plan; 0 where it captures nothing."""

    @property
    def drawn(self) -> bool:
        """Whether a figure shows more than the sentence: several ranks or chunks, or graph memory."""
        return bool(self.gib_by_buckets) or len(self.slots) * len(self.slots[0]) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Predicted shares of micro-batches beside those that a run observed."""

    title: str
    """The finding in a sentence."""
    names: tuple[str, ...]
    """The names of the plan's graphs, then that of the micro-batches whose shape made them run eagerly."""
    predicted: tuple[float, ...]
    """The share of micro-batches that the plan predicts for each name."""
    observed: tuple[float, ...]
    """The share of dispatched micro-batches that the run observed for each name."""
    note: str
    """Sentences on other fallbacks and on measured times; empty where there are none."""


def memory(report: Report, cap: int) -> Memory:
    """Slots of every pipeline rank, and graph memory for 1, 2, ... buckets.

    The title of a plan that captures nothing tells the slots and the memory that one `cap` would need.
    """
    plan, costs = report.plan, report.profile.costs
    slots = plan.graphs.slots
    num_buckets = 0 if plan.graphs.impl == "none" else len(plan.graphs.buckets)
    most = max(sum(rank) for rank in slots)
    freed, host = _offloaded(plan) if num_buckets and report.times.origin != "none" else (0, None)
    models = len(slots) * len(slots[0])
    gib = []
    for buckets in range(1, max(3, num_buckets) + 1) if report.times.origin != "none" else ():
        size = costs.graph_memory_bytes(num_slots=most / models, num_buckets=buckets, n_tokens=_tokens_per_rank(plan))
        if size is not None:
            gib.append(max(0, size - freed) / 2**30)
    known = report.times.origin != "none"
    return Memory(
        title=_captured(plan, most, gib, num_buckets, host, known=known)
        if num_buckets
        else _nothing_captured(plan, most, gib, cap, known=known),
        slots=tuple(tuple(rank) for rank in slots),
        gib_by_buckets=tuple(gib),
        host_gib=host,
        num_buckets=num_buckets,
    )


def _offloaded(plan: Plan) -> tuple[int, float | None]:
    """Bytes of graph memory that offloading frees, and GiB of host memory that it takes; 0 and None without it."""
    predicted = plan.predictions
    host = None if predicted.offload_host_bytes is None else predicted.offload_host_bytes / 2**30
    return predicted.offload_freed_bytes or 0, host


def _busiest_rank(plan: Plan) -> str:
    ranks = len(plan.graphs.slots)
    return "the only pipeline rank" if ranks == 1 else f"the busiest of {ranks:,} pipeline ranks"


def _nothing_captured(plan: Plan, most: int, gib: list[float], cap: int, *, known: bool) -> str:
    would = f"with one cap of {counted(cap, 'document')} {_busiest_rank(plan)} would need {counted(most, 'slot')}"
    size = f" and about {memory_size(gib[0])} of graph memory" if gib else f"; {_unknown('one', known=known)}"
    return f"The plan captures nothing, so no slot and no graph memory are needed; {would}{size}."


def _unknown(what: str, *, known: bool) -> str:
    """Why it is not told how much memory `what` takes."""
    return f"the cost table does not tell what {what} takes" if known else f"what {what} takes depends on the model"


def _captured(plan: Plan, most: int, gib: list[float], num_buckets: int, host: float | None, *, known: bool) -> str:
    rank = _busiest_rank(plan)
    title = f"{rank[0].upper()}{rank[1:]} needs {counted(most, 'slot')}"
    pinned = "" if host is None else f" and {memory_size(host)} of pinned host memory"
    after = "" if host is None else " after offloading"
    if not gib:
        return f"{title}{pinned if known else ''}; {_unknown('a slot', known=known)}."
    title += f"{',' if pinned else ' and'} about {memory_size(gib[num_buckets - 1])}"
    if num_buckets == 1:
        return f"{title} of graph memory{after}{pinned}."
    ratio = gib[num_buckets - 1] / gib[0] if gib[0] else 1.0
    shared = f"{num_buckets} graphs a slot"
    if host is not None:
        return (
            f"{title} of graph memory for {shared}{after}{pinned}: {ratio:.2f} times the graph memory of one graph, "
            "because all graphs of a slot share its memory."
        )
    return f"{title} for {shared}, {ratio:.2f} times that of one, because all graphs of a slot share its memory."


def _tokens_per_rank(plan: Plan) -> int:
    """Tokens of a micro-batch on one context-parallel rank."""
    fixed = plan.training.max_seqlen_per_dp_cp_rank
    return fixed or max(1, plan.microbatches.n_tokens_max // plan.training.context_parallel_size)


def observed(report: Report, cap: int) -> Observed | None:
    """The plan's shares beside the run's statistics; None without statistics."""
    comparison = report.comparison
    if comparison is None:
        return None
    several = len({b.cp_size for b in comparison.buckets}) > 1
    names = [
        f"{counted(b.max_seqs, 'document')}\nof {counted(b.max_seqlen, 'token')}"
        + (f", {counted(b.cp_size, 'rank')}" if several else "")
        for b in comparison.buckets
    ]
    verdict = "as predicted" if comparison.is_as_predicted else "not as predicted"
    dispatched = counted(comparison.dispatched, "dispatched micro-batch", "dispatched micro-batches")
    title = f"{comparison.wrong_numbers}. " if comparison.wrong_numbers else ""
    title += (
        f"{percent(comparison.observed_fallback_rate)} of {dispatched} fell back by their "
        f"shape, {percent(comparison.predicted_fallback_rate)} were predicted: {verdict}, no share is further off than "
        f"{comparison.largest_difference * 100:.2f} points."
    )
    notes = []
    if comparison.basis == "decided":
        notes.append("Nothing was replayed; what the shapes decide is shown.")
    if comparison.other_fallbacks:
        named = ", ".join(f"{reason} {n:,}" for reason, n in comparison.other_fallbacks.items())
        notes.append(f"Eager for reasons that no plan predicts: {named}.")
    for way, ms in (("replayed", comparison.replay_ms), ("eager", comparison.eager_ms)):
        if ms is not None:
            notes.append(f"A{'n' if way == 'eager' else ''} {way} micro-batch took {ms:.2f} ms.")
    return Observed(
        title=title,
        names=(*names, "eager by shape"),
        predicted=(*(b.predicted_share for b in comparison.buckets), comparison.predicted_fallback_rate),
        observed=(*(b.observed_share for b in comparison.buckets), comparison.observed_fallback_rate),
        note=" ".join(notes),
    )
