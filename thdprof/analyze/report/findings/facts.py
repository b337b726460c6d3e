"""What the analysis predicts for the user's own model, as labelled amounts: times, worth, memory and capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thdprof.analyze.predictions import Capture, Memory, Times, Worth
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.peak import beside_slots
from thdprof.analyze.report.words import counted, spanned


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Labelled amounts of one kind."""

    title: str
    """The kind, with where the amounts come from."""
    rows: tuple[tuple[str, str], ...]
    """Label and amount with its unit."""


def facts(report: Report) -> tuple[Facts, ...]:
    """All amounts that are known of the user's own model; empty where its times are not."""
    times, predicted = report.times, report.profile.predicted
    if times.origin == "none":
        return ()
    model = None if predicted is None or predicted.model is None else predicted.model
    of = f"Times, {times.origin}" + (f", of {model}" if model else "")
    found = [Facts(title=of, rows=tuple(_times(times)))]
    if predicted is not None:
        if predicted.worth is not None:
            found.append(Facts(title="Worth over the run", rows=tuple(_worth(predicted.worth))))
        if predicted.memory is not None:
            moments = {"training": "in training", "capture": "at the last capture", "verification": "in a verification"}
            title = f"Peak memory of the pipeline rank that needs most, {moments[predicted.memory.moment]}"
            found.append(Facts(title=title, rows=_memory(predicted.memory)))
        if predicted.capture is not None:
            found.append(Facts(title="Capture, once in a run", rows=_capture(predicted.capture)))
    return tuple(f for f in found if f.rows)


def _times(times: Times) -> Iterator[tuple[str, str]]:
    if times.decoder_replay_ms is not None:
        alike = (times.decoder_replay_ms, times.decoder_replay_ms)
        yield "decoder, median micro-batch on one rank, replayed", spanned(alike, "ms")
    if times.decoder_eager_ms is not None:
        yield "the same, eagerly", spanned(times.decoder_eager_ms, "ms")
    if times.outside_decoder_ms is not None:
        yield "outside the decoder", spanned((times.outside_decoder_ms, times.outside_decoder_ms), "ms")
    if times.step_ms is not None:
        yield "a step under the plan", spanned(times.step_ms, "ms")
    if times.eager_step_ms is not None:
        yield "a step, all eager", spanned(times.eager_step_ms, "ms")


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


def _capture(capture: Capture) -> tuple[tuple[str, str], ...]:
    return (
        ("graphs", f"{capture.graphs:,}"),
        ("forward and backward passes for them", f"{capture.passes:,}"),
        ("time", spanned(capture.seconds, "s")),
    )
