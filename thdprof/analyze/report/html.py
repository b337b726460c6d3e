"""The report as one HTML page that loads nothing else: the answer first, then a slider of caps, figures and tables.

Without scripts the page is complete for its cap; with them the slider moves the marks and rewrites the words, which the
page holds for every cap.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from thdprof.analyze.buckets.statistics import Histogram
from thdprof.analyze.report import figures
from thdprof.analyze.report.answer import Answer, amounts, make_answer
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.drawing import STYLE, Figure
from thdprof.analyze.report.figures.graphs import alternatives, cap_sentences, cheaper_graph
from thdprof.analyze.report.figures.microbatches import (
    cut_run,
    drift_head,
    drift_over,
    shown_parts,
    steps_head,
    steps_over,
)
from thdprof.words import counted, percent, ratio

_EVERY = 400
"""Largest number of documents up to which a page answers for every cap."""
_THINNED = 500
"""Caps about evenly spaced on a logarithmic axis, of which a page answers for those beyond the first few, else."""
_DIGITS = 6
"""Significant digits of a share that the page's script places marks by."""
_LABELS = {
    "replayed": "micro-batches that replay",
    "microbatch": "eager micro-batches",
    "rank_step": "(rank, step) pairs with one",
    "step": "steps with one",
    "time": "step time, eager = 1",
}
"""Columns of the table of caps, by the names that the page's script knows them by, and their labels."""
_HOVER = "of steps over the cap"
"""The end of the words that hovering over a segment of the run shows."""


def to_page(report: Report, cap: int, *, title: str, version: str) -> str:
    """The page of a report, which opens with a cap in documents; its foot names the version of thdprof."""
    answer, every = make_answer(report), _answer_every_cap(report, cap)
    body = "".join(
        (
            _head(answer),
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
            _section(
                "How many slots, and how much memory?", "", _figure(figures.memory(report, cap)) + _amounts(report)
            ),
            _section("Did training do what was predicted?", "", _figure(figures.observed(report, cap))),
            _foot(report, answer, version),
        )
    )
    data = json.dumps(every, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<main>\n{body}\n</main>\n<div id="tip" hidden></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _answer_every_cap(report: Report, cap: int) -> dict[str, Any]:
    """What every cap of the slider does, as the page's script reads it.

    The shares follow exactly from the profile's counts for any cap. Step times are those of the profile's grid of caps,
    and linear between them. `caps` are ascending documents, and the page opens with the one at index `start`. `series`
    are the curves' values, `texts` the words for each cap: cells of the table by `_LABELS`, the cap itself, what it
    does, and the ends of the sentences of two figures. `segments` and `parts` hold the share of steps over each cap in
    each segment of the run and each part that is shown, as indices into `levels`.
    """
    profile = report.profile
    caps = _page_caps(report, cap)
    rates = [profile.fallback_rate(n) for n in caps]
    times = report.relative_step_times(caps)
    largest = cut_run(report, "segment_step_max")
    series = {"replayed": [1 - rate.microbatch for rate in rates]}
    series.update({level: [getattr(rate, level) for rate in rates] for level in ("microbatch", "rank_step", "step")})
    texts = {name: [percent(v) for v in values] for name, values in series.items()}
    texts["cap"] = [f"{n:,}" for n in caps]
    texts["sentence"] = cap_sentences(report, caps)
    texts["steps"] = [steps_over(report, n) for n in caps]
    texts["drift"] = [drift_over(largest, n, several=profile.num_runs > 1) for n in caps]
    if times is not None:
        series["time_low"], series["time_high"] = ([t[end] for t in times] for end in (0, 1))
        texts["time"] = [ratio(t) for t in times]
    segments = [_shares_over(h, caps) for h in largest]
    parts = [_shares_over(profile.histogram("step_max", part=p.name), caps) for p in shown_parts(report)]
    levels = sorted({value for row in (*segments, *parts) for value in row})
    index = {value: i for i, value in enumerate(levels)}
    return {
        "caps": caps,
        "start": caps.index(cap),
        "series": {name: [_round(v) for v in values] for name, values in series.items()},
        "texts": texts,
        "levels": [(_round(v), percent(v)) for v in levels],
        "segments": [[index[v] for v in row] for row in segments],
        "parts": [[index[v] for v in row] for row in parts],
        "tip": _HOVER,
    }


def _page_caps(report: Report, cap: int) -> list[int]:
    """Caps that a page answers for: every one up to `_EVERY` documents; of more, every one at first, then some."""
    buckets = [b.max_seqs for b in report.plan.graphs.buckets]
    most = max(report.profile.histogram().percentile(100.0), cap, *buckets, 1)
    if most <= _EVERY:
        return list(range(1, most + 1))
    named = {cap, most, *(c.max_seqs for c in report.profile.caps()), *buckets}
    spaced = np.unique(np.rint(np.geomspace(1, most, _THINNED)).astype(np.int64)).tolist()
    return sorted({n for n in (*named, *spaced) if 1 <= n <= most})


def _shares_over(histogram: Histogram, caps: list[int]) -> list[float]:
    """Share of the histogram's values over each of `caps`."""
    within = np.cumsum(histogram.counts)[np.minimum(caps, len(histogram.counts) - 1)]
    shares: list[float] = ((histogram.total - within) / histogram.total).tolist()
    return shares


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _asset(name: str) -> str:
    return resources.files("thdprof.analyze.report").joinpath(name).read_text(encoding="utf-8")


def _head(answer: Answer) -> str:
    """The answer: the run, the verdict, three numbers and the caveat."""
    date = f'<time datetime="{escape(answer.date)}">{escape(answer.date)}</time> · ' if answer.date else ""
    numbers = "".join(
        f"<li><b>{escape(n.value)}</b><span>{escape(n.label)}</span><small>{escape(n.note)}</small></li>"
        for n in answer.numbers
    )
    reason = f"{escape(answer.reason)} " if answer.reason else ""
    return (
        f'<header>\n<p class="run"><b>{escape(answer.run)}</b> · {date}{escape(answer.size)}</p>\n'
        f'<h1 id="verdict">{escape(answer.verdict)}</h1>\n<p class="basis">{reason}{escape(answer.basis)}</p>\n'
        f'<ul class="numbers">{numbers}</ul>\n<p class="caveat">{escape(answer.caveat)}</p>\n</header>\n'
    )


def _caps(report: Report, cap: int, every: dict[str, Any]) -> str:
    """The slider with what its cap does, the curves over all caps, and the table."""
    names = [name for name in _LABELS if name in every["texts"]]
    rates = "".join(f"<div><dt>{_LABELS[name]}</dt>{_cell(every, name, tag='dd')}</div>" for name in names[1:])
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
        f"{_figure(figures.caps(report, cap), caption)}{note}{_table(report, cap, every, names)}"
    )
    lead = "A micro-batch over the cap runs eagerly, and holds back all ranks of its step. A larger cap pads more."
    return _section("What does each cap cost?", lead, inner, look=' class="open"')


def _cell(every: dict[str, Any], name: str, *, tag: str, label: str = "") -> str:
    """An element whose text follows the slider."""
    head = f' data-label="{label}"' if label else ""
    return f'<{tag} data-text="{name}"{head}>{escape(every["texts"][name][every["start"]])}</{tag}>'


def _table(report: Report, cap: int, every: dict[str, Any], names: list[str]) -> str:
    """The cap of the slider, the caps that have names, and the plan; `names` are those of the columns."""
    head = "".join(f'<th scope="col">{_LABELS[name]}</th>' for name in names)
    here = "".join(_cell(every, name, tag="td", label=_LABELS[name]) for name in names)
    rows = [
        f'<tr class="here" id="row"><th scope="row"><span>this cap: {_cell(every, "cap", tag="span")}</span></th>'
        f"{here}</tr>"
    ]
    for one in sorted(alternatives(report, cap), key=lambda a: (a.role == "plan", a.cap or 0)):
        values = {"replayed": percent(1 - one.rate.microbatch)}
        values.update({level: percent(share) for level, share in one.rate})
        values["time"] = "" if one.relative_step_time is None else ratio(one.relative_step_time)
        cells = "".join(f'<td data-label="{_LABELS[name]}">{escape(values[name])}</td>' for name in names)
        look = ' class="plan"' if one.role == "plan" else ""
        rows.append(f'<tr{look}><th scope="row">{escape(one.name)}</th>{cells}</tr>')
    return (
        '<table class="caps"><caption>Caps beside the plan</caption><thead><tr><th scope="col">cap, documents</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _section(question: str, lead: str, inner: str, *, look: str = "") -> str:
    intro = f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"<section{look}>\n<h2>{escape(question)}</h2>\n{intro}{inner}\n</section>\n"


def _figure(figure: Figure, head: str | None = None, every: dict[str, Any] | None = None, tail: str = "") -> str:
    """A figure with its caption, whose end follows the slider where `tail` names a text of `every`."""
    caption = escape(figure.text if head is None else head)
    if every is not None:
        caption += _cell(every, tail, tag="span")
    return figure.page_html(caption)


def _amounts(report: Report) -> str:
    tables = []
    for title, rows in amounts(report).items():
        cells = "".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in rows)
        tables.append(f'<table class="facts"><caption>{escape(title)}</caption><tbody>{cells}</tbody></table>')
    return "".join(tables)


def _foot(report: Report, answer: Answer, version: str) -> str:
    listed = "".join(f"<li>{escape(text)}</li>" for text in answer.warnings)
    more = f'<section>\n<h2>What else to know</h2>\n<ul class="warnings">{listed}</ul>\n</section>\n' if listed else ""
    names = ", ".join(uri for part in report.profile.parts for uri in part.uris[:1])
    runs = counted(report.profile.num_runs, "run")
    several = (
        " Verdict, worth, memory and capture are predicted for one run alone." if report.profile.num_runs > 1 else ""
    )
    return (
        f"{more}<footer>Made by thdprof {escape(version)} from a plan and the profile of {runs}: {escape(names)}. The "
        f"dataset was not read again.{several} To change the analysis itself, make a notebook: thdprof report PLAN -o "
        "report.ipynb.</footer>"
    )
