"""What a report answers first: verdict, three numbers, caveat, and the amounts known of the user's own model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from thdprof.analyze.predictions import Memory, Times, Worth
from thdprof.analyze.report.contents import HOW_TO_GET_TIMES, Report
from thdprof.analyze.report.figures.graphs import bucket_names, has_short_names
from thdprof.analyze.report.shared import beside_slots
from thdprof.words import counted, percent, ratio, shortened, spanned

_NUMBERS = 3
"""Numbers at the head of a report."""
_LONGEST_NAME = 80
"""Characters of a run's name."""
_OF_THESE_DATA = (
    "All numbers are of the data, the order and the batch sizes that were analysed: thdprof check tells whether "
    "changed data still fit the plan."
)
"""The caveat where the analysis warned of nothing."""
_OF_A_STAND_IN = (
    "times are of ",
    "costs of context parallelism ",
    "the cost of ",
    "the limits on memory or fallbacks decided: ",
    "the recommended graphs are slower ",
)
"""Begins of warnings that speak of times; they are left out where times are not of the user's own model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One of the numbers that matter, with its unit; what it counts; and what it rests on or compares with, if any."""

    value: str
    label: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer that a report gives first."""

    run: str
    """Names of the data of the run."""
    size: str
    """Micro-batches and steps that were counted, and whether they equal training's."""
    date: str
    """Day of the analysis; empty where it is not known."""
    verdict: str
    """Whether graphs pay, in a sentence with its range and origin; without times, what the plan's graphs hold."""
    reason: str
    """The reason of the verdict in a sentence; empty where there is none."""
    basis: str
    """What the times are of, in a sentence; without times, how to get them."""
    numbers: tuple[Number, ...]
    """The three numbers that matter."""
    caveat: str
    """The most important condition of the answer, in a sentence."""
    warnings: tuple[str, ...]
    """All other warnings of the analysis."""


def make_answer(report: Report) -> Answer:
    """The verdict, the numbers and the caveat of a report."""
    times, profile = report.times, report.profile
    predicted, warnings = profile.predicted, _warnings(report)
    reason = ""
    if times.origin != "none" and predicted is not None and predicted.verdict.ruling is not None:
        reason = _sentence(predicted.verdict.reason)
    how = "replayed in training's order" if profile.exact else "drawn or replayed in part, not exactly training's"
    micro = counted(profile.microbatches, "micro-batch", "micro-batches")
    caveat = _sentence(warnings[0]) if warnings else _OF_THESE_DATA
    parts = profile.parts  # one that is named after a folder of one file has that file's name
    names = [PurePath(p.uris[0]).name if len(parts) == len(p.uris) == 1 else p.name for p in parts]
    return Answer(
        run=shortened(", ".join(dict.fromkeys(names)), _LONGEST_NAME),
        size=f"{micro} in {counted(profile.steps, 'step')}, {how}",
        date=profile.analysed_on or "",
        verdict=_verdict(report),
        reason=reason,
        basis=_basis(times),
        numbers=tuple(_numbers(report))[:_NUMBERS],
        caveat=caveat,
        warnings=warnings[1:],
    )


def _warnings(report: Report) -> tuple[str, ...]:
    timed = report.times.origin != "none"
    return tuple(text for text in report.warnings if timed or not text.startswith(_OF_A_STAND_IN))


def _verdict(report: Report) -> str:
    times, graphs, predicted = report.times, report.plan.graphs, report.profile.predicted
    relative = times.relative_step_time
    if times.origin == "none" or relative is None:
        if not graphs.buckets or graphs.impl == "none":
            return "The plan captures no graphs: every micro-batch runs eagerly."
        rate = report.plan.predictions.fallback_rate
        short = has_short_names(graphs.buckets)
        name = f"Graphs for {bucket_names(report)}" if short else f"The plan's {len(graphs.buckets)} graphs"
        own = " of the data that the plan was made for" if report.profile.num_runs > 1 else ""
        if rate.microbatch == 0:
            return f"{name} hold every micro-batch{own}."
        return (
            f"{name} hold {percent(1 - rate.microbatch)} of micro-batches{own}; {percent(rate.step)} of steps have an "
            "eager one."
        )
    ruling = None if predicted is None else predicted.verdict.ruling
    takes = "takes" if graphs.buckets else "would take"
    own = ", on the data that the plan was made for" if report.profile.num_runs > 1 else ""
    step = f"step {takes} {ratio(relative)} of its eager time, {times.origin}{own}"
    return f"A {step}." if ruling is None else f"{ruling.capitalize()}: a {step}."


def _basis(times: Times) -> str:
    if times.origin == "none":
        return _sentence(times.basis or HOW_TO_GET_TIMES)
    return _sentence(f"times are {times.origin} for {times.basis}")


def _numbers(report: Report) -> Iterator[Number]:
    """All numbers that are known, the most important first."""
    times, predicted, plan = report.times, report.profile.predicted, report.plan.predictions
    if times.origin != "none" and times.relative_step_time is not None:
        note = ""
        if times.step_ms is not None and times.eager_step_ms is not None:
            note = f"{spanned(times.step_ms)} instead of {spanned(times.eager_step_ms)} ms, {times.origin}"
        yield Number(
            value=f"{ratio(times.relative_step_time)} \N{MULTIPLICATION SIGN}",
            label="of the eager step time",
            note=note,
        )
        if predicted is not None and predicted.worth is not None:
            yield _saved(predicted.worth)
        if predicted is not None and predicted.memory is not None:
            yield _peak(predicted.memory)
    rate = plan.fallback_rate
    held = Number(
        value=percent(1 - rate.microbatch),
        label="of micro-batches replay",
        note=f"{counted(len(report.plan.graphs.buckets), 'graph')} by the plan",
    )
    stalled = Number(
        value=percent(rate.step),
        label="of steps wait for an eager micro-batch",
        note=f"{percent(rate.rank_step)} of (rank, step) pairs have one",
    )
    yield from (stalled, held) if times.origin != "none" else (held, stalled)
    if not report.plan.graphs.buckets:
        documents = report.profile.histogram()
        median = f"half of the micro-batches hold at most {documents.percentile(50.0):,}"
        yield Number(
            value=f"{documents.percentile(100.0):,}", label="documents in the fullest micro-batch", note=median
        )
        return
    yield Number(
        value=f"under {percent(plan.fallback_rate_upper_bound)}",
        label="of unseen micro-batches fall back",
        note="with 95% confidence, if the data stay alike",
    )


def _saved(worth: Worth) -> Number:
    low, high = worth.gpu_hours_saved
    note = f"{spanned(worth.gpu_hours)} under the plan: {counted(worth.steps, 'step')} on {counted(worth.gpus, 'GPU')}"
    if worth.saved is not None and worth.gpu_hour_price is not None:
        note += f"; at {worth.gpu_hour_price:g} each {spanned(worth.saved)} saved"
    if high <= 0:
        return Number(value=spanned((-high, -low)), label="GPU-hours more than eagerly", note=note)
    label = "GPU-hours saved; below 0, more than eagerly" if low < 0 else "GPU-hours saved"
    return Number(value=spanned((low, high)), label=label, note=note)


def _peak(memory: Memory) -> Number:
    graphs = memory.graph_bytes + memory.static_bytes
    return Number(
        value=f"{memory.peak_bytes / 2**30:.1f} GiB",
        label=f"peak memory, pipeline rank {memory.pipeline_rank}",
        note=f"{graphs / 2**30:.1f} GiB of it for graphs" if memory.graph_bytes else "no graphs are captured",
    )


def _sentence(text: str) -> str:
    """`text` with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def amounts(report: Report) -> dict[str, tuple[tuple[str, str], ...]]:
    """Labelled amounts of the user's own model by their kind and origin; empty where its times are not known.

    Each amount is a label and text with its unit.
    """
    times, predicted = report.times, report.profile.predicted
    if times.origin == "none":
        return {}
    model = None if predicted is None or predicted.model is None else predicted.model
    found = {f"Times, {times.origin}" + (f", of {model}" if model else ""): tuple(_times(times))}
    if predicted is not None and predicted.worth is not None:
        found["Worth over the run"] = tuple(_worth(predicted.worth))
    if predicted is not None and predicted.memory is not None:
        moments = {"training": "in training", "capture": "at the last capture", "verification": "in a verification"}
        title = f"Peak memory of the pipeline rank that needs most, {moments[predicted.memory.moment]}"
        found[title] = _memory(predicted.memory)
    if predicted is not None and (capture := predicted.capture) is not None:
        found["Capture, once in a run"] = (
            ("graphs", f"{capture.graphs:,}"),
            ("forward and backward passes for them", f"{capture.passes:,}"),
            ("time", spanned(capture.seconds, "s")),
        )
    return {title: rows for title, rows in found.items() if rows}


def _times(times: Times) -> Iterator[tuple[str, str]]:
    amounts = {
        "decoder, median micro-batch on one rank, replayed": times.decoder_replay_ms,
        "the same, eagerly": times.decoder_eager_ms,
        "outside the decoder": times.outside_decoder_ms,
        "a step under the plan": times.step_ms,
        "a step, all eager": times.eager_step_ms,
    }
    for label, ms in amounts.items():
        if ms is not None:
            yield label, spanned(ms if isinstance(ms, tuple) else (ms, ms), "ms")


def _worth(worth: Worth) -> Iterator[tuple[str, str]]:
    yield "the run", f"{counted(worth.gpus, 'GPU')}, {counted(worth.steps, 'step')}"
    yield "tokens per second under the plan", spanned(worth.tokens_per_second)
    yield "tokens per second, all eager", spanned(worth.eager_tokens_per_second)
    yield "GPU-hours under the plan", spanned(worth.gpu_hours)
    yield "GPU-hours saved", spanned(worth.gpu_hours_saved)
    if worth.saved is not None and worth.gpu_hour_price is not None:
        yield f"saved at {worth.gpu_hour_price:g} a GPU-hour", spanned(worth.saved)


def _memory(memory: Memory) -> tuple[tuple[str, str], ...]:
    parts = {
        "weights, gradients and the optimizer's state": memory.state_bytes,
        "slots of the graphs": memory.graph_bytes,
        "static inputs, outputs and gradients": memory.static_bytes,
        beside_slots(memory): memory.eager_bytes,
        "experts behind graphs": memory.experts_bytes,
        "outside the decoder": memory.outside_bytes,
        f"in all, on pipeline rank {memory.pipeline_rank}": memory.peak_bytes,
    }
    return tuple((label, f"{size / 2**30:.1f} GiB") for label, size in parts.items() if size)
