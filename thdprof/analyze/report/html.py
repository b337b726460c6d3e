"""The report as one HTML page that loads nothing else: the answer first, then a slider of caps and figures.

Without scripts the page is complete for its cap; with them the slider moves the marks and rewrites the words, which the
page holds for every cap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import PurePath
from typing import Any

import numpy as np

from thdprof.analyze.report import figures
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.drawing import STYLE, Figure
from thdprof.analyze.report.figures.graphs import bucket_names, cap_sentences, cheaper_graph, has_short_names
from thdprof.analyze.report.figures.microbatches import cut_run, drift_head, drift_over, steps_head, steps_over
from thdprof.analyze.report.shared import capture_sentence, memory_sentence, spread_sentence, times_sentences
from thdprof.words import html_table, percent, ratio, shorten, write_count, write_range

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
_EVERY = 400
"""Largest number of documents up to which a page answers for every cap."""
_THINNED = 500
"""Caps about evenly spaced on a logarithmic axis, of which a page answers for those beyond the first few, else."""
_DIGITS = 6
"""Significant digits of a share that the page's script places marks by."""
_LABELS = {
    "microbatch": "eager micro-batches",
    "rank_step": "(rank, step) pairs with one",
    "step": "steps with one",
    "time": "step time, eager = 1",
}
"""What the slider's cap does, by the names that the page's script knows it by, and the labels."""


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
    facts: tuple[str, ...]
    """What the verdict rests on, in the sentences of `analyze`."""
    caveat: str
    """The most important condition of the answer, in a sentence."""
    warnings: tuple[str, ...]
    """All other warnings of the analysis."""


def make_answer(report: Report) -> Answer:
    """The verdict, the facts and the caveat of a report."""
    times, profile = report.times, report.profile
    predicted, timed = profile.predicted, times.origin != "none"
    warnings = tuple(text for text in report.warnings if timed or not text.startswith(_OF_A_STAND_IN))
    reason = ""
    if timed and predicted is not None and predicted.verdict.ruling is not None:
        reason = _sentence(predicted.verdict.reason)
    verdict = _verdict(report)
    if refused := report.plan.predictions.refused:
        reason = " ".join(filter(None, [*map(_sentence, refused), verdict, reason]))
        verdict = "Training by this plan would be refused."
    how = "replayed in training's order" if profile.exact else "drawn or replayed in part, not exactly training's"
    micro = write_count(profile.microbatches, "micro-batch", "micro-batches")
    caveat = _sentence(warnings[0]) if warnings else _OF_THESE_DATA
    parts = profile.parts  # one that is named after a folder of one file has that file's name
    names = [PurePath(p.uris[0]).name if len(parts) == len(p.uris) == 1 else p.name for p in parts]
    return Answer(
        run=shorten(", ".join(dict.fromkeys(names)), _LONGEST_NAME),
        size=f"{micro} in {write_count(profile.steps, 'step')}, {how}",
        date=profile.analysed_on or "",
        verdict=verdict,
        reason=reason,
        basis=_sentence(times.basis if times.origin == "none" else f"times are {times.origin} for {times.basis}"),
        facts=tuple(_list_facts(report)),
        caveat=caveat,
        warnings=warnings[1:],
    )


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


def _list_facts(report: Report) -> Iterator[str]:
    """What is predicted of the plan's graphs, and of the user's own model where its times are known."""
    times, predicted, plan = report.times, report.profile.predicted, report.plan.predictions
    of_trainer = report.plan.training.is_of_trainer
    for name, run in (("quickest run", plan.best), ("quickest without graphs", plan.best_without_graphs)):
        if run is not None:
            yield f"the {name} of these documents: {run.describe(of_trainer=of_trainer)}"
    if times.origin != "none":
        if times.step_ms is not None and times.eager_step_ms is not None:
            yield f"a step: {write_range(times.step_ms, 'ms')}, eagerly {write_range(times.eager_step_ms, 'ms')}"
        if predicted is not None:
            worth = predicted.worth if report.plan.graphs.buckets else None
            yield from times_sentences(times, worth)
            yield from () if predicted.memory is None else [memory_sentence(predicted.memory)]
            yield from () if predicted.capture is None else [capture_sentence(predicted.capture)]
            yield from () if report.profile.model is None else [f"model: {report.profile.model}"]
    if (spread := report.plan.microbatches.spread) is not None:
        yield spread_sentence(spread)
    if report.plan.graphs.buckets:
        yield (
            f"with 95% confidence under {percent(plan.fallback_rate_upper_bound)} of unseen micro-batches fall back, "
            "if the data keep their distribution"
        )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def to_page(
    report: Report,
    cap: int,
    *,
    title: str,
    version: str,
    compared: Sequence[Sequence[str]] = (),
    explained: str = "",
    then: str = "",
) -> str:
    """The page of a report, which opens with a cap in documents; its foot names the version of thdprof.

    `compared` is a table of the packs before and after, its head first, and `explained` stands below it. `then` is what
    the user does next.
    """
    answer, every = make_answer(report), _answer_every_cap(report, cap)
    body = "".join(
        (
            _head(answer, then),
            _compare_packs(compared, explained),
            _caps(report, cap, every),
            _section(
                "What will micro-batches look like?",
                "Documents decide which graph a micro-batch fits; with some attention backends so does the longest.",
                _figure(figures.shapes(report, cap)) + _figure(figures.joint(report, cap)),
            ),
            _section("What was chosen, and why?", "", _figure(figures.choice(report, cap))),
            _section(
                "How does it vary over the run?",
                "Training is synchronous: not the usual micro-batch counts, but the fullest of each step.",
                _figure(figures.steps(report, cap), steps_head(report), every, "steps")
                + _figure(figures.drift(report, cap), drift_head(report), every, "drift")
                + _figure(figures.parts(report, cap)),
            ),
            _section("How many slots, and how much memory?", "", _figure(figures.memory(report, cap))),
            _section("Did training do what was predicted?", "", _figure(figures.observed(report, cap))),
            _foot(report, answer, version),
        )
    )
    data = json.dumps(every, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _answer_every_cap(report: Report, cap: int) -> dict[str, Any]:
    """What every cap of the slider does, as the page's script reads it.

    The shares follow exactly from the profile's counts for any cap. Step times are those of the profile's grid of caps,
    and linear between them. `caps` are ascending documents, and the page opens with the one at index `start`. `series`
    are the curves' values, `texts` the words for each cap: numbers by `_LABELS`, the cap itself, what it
    does, and the ends of the sentences of two figures.
    """
    profile = report.profile
    caps = _page_caps(report, cap)
    rates = [dict(profile.fallback_rate(n)) for n in caps]
    times = report.relative_step_times(caps)
    largest = cut_run(report, "segment_step_max")
    series = {level: [rate[level] for rate in rates] for level in rates[0]}
    texts = {name: [percent(v) for v in values] for name, values in series.items()}
    texts["cap"] = [f"{n:,}" for n in caps]
    texts["sentence"] = cap_sentences(report, caps)
    texts["steps"] = [steps_over(report, n) for n in caps]
    texts["drift"] = [drift_over(largest, n, several=profile.num_runs > 1) for n in caps]
    if times is not None:
        series["time_low"], series["time_high"] = ([t[end] for t in times] for end in (0, 1))
        texts["time"] = [ratio(t) for t in times]
    return {
        "caps": caps,
        "start": caps.index(cap),
        "series": {name: [_round(v) for v in values] for name, values in series.items()},
        "texts": texts,
    }


def _page_caps(report: Report, cap: int) -> list[int]:
    """Caps that a page answers for: every one up to `_EVERY` documents; of more, every one at first, then some."""
    buckets = [b.max_seqs for b in report.plan.graphs.buckets]
    most = max(report.profile.histogram().percentile(100.0), cap, *buckets, 1)
    if most <= _EVERY:
        return list(range(1, most + 1))
    named = {cap, most, *report.profile.caps(), *buckets}
    spaced = np.unique(np.rint(np.geomspace(1, most, _THINNED)).astype(np.int64)).tolist()
    return sorted({n for n in (*named, *spaced) if 1 <= n <= most})


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _asset(name: str) -> str:
    return resources.files("thdprof.analyze.report").joinpath(name).read_text(encoding="utf-8")


def _head(answer: Answer, then: str) -> str:
    date = f'<time datetime="{escape(answer.date)}">{escape(answer.date)}</time> · ' if answer.date else ""
    reason = f"{escape(answer.reason)} " if answer.reason else ""
    following = f'<p id="next">Next: <code>{escape(then)}</code></p>\n' if then else ""
    return (
        f'<header>\n<p class="run"><b>{escape(answer.run)}</b> · {date}{escape(answer.size)}</p>\n'
        f'<h1 id="verdict">{escape(answer.verdict)}</h1>\n<p class="basis">{reason}{escape(answer.basis)}</p>\n'
        f'{_list("facts", answer.facts)}<p class="caveat">{escape(answer.caveat)}</p>\n{following}</header>\n'
    )


def _list(name: str, texts: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{name}">{listed}</ul>\n' if listed else ""


def _compare_packs(rows: Sequence[Sequence[str]], explained: str) -> str:
    if not rows:
        return ""
    table = html_table("", rows[0], rows[1:])
    return _section("What do the new packs change?", "", f'{table}\n<p class="note">{escape(explained)}</p>')


def _caps(report: Report, cap: int, every: dict[str, Any]) -> str:
    """The slider with what its cap does, and the curves over all caps."""
    names = [name for name in _LABELS if name in every["texts"]]
    rates = "".join(f"<div><dt>{_LABELS[name]}</dt>{_cell(every, name, tag='dd')}</div>" for name in names)
    panel = (
        '<div class="panel">\n<form hidden><label for="cap">Cap '
        f"{_cell(every, 'cap', tag='span')} documents</label>"
        f'<input type="range" id="cap" min="0" max="{len(every["caps"]) - 1}" value="{every["start"]}">'
        f'<button type="reset">{"recommended" if cap == report.recommended_cap else "back"}</button></form>\n'
        f'<dl class="rates">{rates}</dl>\n</div>\n'
    )
    caption = (
        f"One cap for all micro-batches: what runs eagerly{', and how long a step takes.' if 'time' in names else '.'}"
    )
    cheaper = cheaper_graph(report) if "time" in names else ""
    note = f'<p class="note">{escape(cheaper)}</p>' if cheaper else ""
    inner = (
        f'<p id="sentence" aria-live="polite">{_cell(every, "sentence", tag="span")}</p>\n{panel}'
        f"{_figure(figures.caps(report, cap), caption)}{note}"
    )
    lead = "A micro-batch over the cap runs eagerly, and holds back all ranks of its step. A larger cap pads more."
    return _section("What does each cap cost?", lead, inner, look=' class="open"')


def _cell(every: dict[str, Any], name: str, *, tag: str) -> str:
    """An element whose text follows the slider."""
    return f'<{tag} data-text="{name}">{escape(every["texts"][name][every["start"]])}</{tag}>'


def _section(question: str, lead: str, inner: str, *, look: str = "") -> str:
    intro = f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"<section{look}>\n<h2>{escape(question)}</h2>\n{intro}{inner}\n</section>\n"


def _figure(figure: Figure, head: str | None = None, every: dict[str, Any] | None = None, tail: str = "") -> str:
    """A figure with its caption, whose end follows the slider where `tail` names a text of `every`."""
    caption = escape(figure.text if head is None else head)
    if every is not None:
        caption += _cell(every, tail, tag="span")
    return figure.page_html(caption)


def _foot(report: Report, answer: Answer, version: str) -> str:
    listed = _list("warnings", answer.warnings)
    more = f"<section>\n<h2>What else to know</h2>\n{listed}</section>\n" if listed else ""
    names = ", ".join(uri for part in report.profile.parts for uri in part.uris[:1])
    runs = write_count(report.profile.num_runs, "run")
    several = (
        " Verdict, worth, memory and capture are predicted for one run alone." if report.profile.num_runs > 1 else ""
    )
    return (
        f"{more}<footer>Made by thdprof {escape(version)} from a plan and the profile of {runs}: {escape(names)}. The "
        f"dataset was not read again.{several} To change the analysis itself, make a notebook: thdprof report PLAN -o "
        "report.ipynb.</footer>"
    )
