"""The report as one HTML page that loads nothing else: the answer first, then a slider of caps, figures and tables.

Without scripts the page is complete for its cap; with them the slider moves the marks and rewrites the words, which the
page holds for every cap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from thdprof.analyze.report import figures, findings
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures.drawing import Drawing, Note
from thdprof.analyze.report.figures.svg import STYLE
from thdprof.analyze.report.findings.facts import facts
from thdprof.analyze.report.words import counted, percent, ratio

_DIGITS = 6
"""Significant digits of a share that the page's script places marks by."""
_LABELS = {
    "replayed": "micro-batches that replay",
    "microbatch": "eager micro-batches",
    "rank_step": "(rank, step) pairs with one",
    "step": "steps with one",
    "time": "step time, eager = 1",
}
"""Labels of the table's columns, by the names of `findings.COLUMNS`."""
_TOLD = "of steps over the cap"
"""The end of what hovering over a segment of the run tells."""


def to_page(report: Report, cap: int, *, title: str, version: str) -> str:
    """The page of a report.

    Args:
        report: the report.
        cap: documents of the cap with which the page opens.
        title: the page's title.
        version: version of thdprof, for the page's foot.
    """
    drift, parts = findings.drift(report, cap), findings.parts(report, cap)
    every = findings.every_cap(report, cap, drift, () if parts is None else parts.keys)
    body = "".join(
        (
            _head(findings.answer(report)),
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
                _figure(figures.steps(report, cap), findings.steps(report, cap).head, every, "steps")
                + _figure(figures.drift(report, cap), drift.head, every, "drift")
                + _figure(figures.parts(report, cap)),
            ),
            _section("How many slots, and how much memory?", "", _figure(figures.memory(report, cap)) + _facts(report)),
            _section("Did training do what was predicted?", "", _figure(figures.observed(report, cap))),
            _foot(report, version),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<main>\n{body}\n</main>\n<div id="tip" hidden></div>\n'
        f'<script type="application/json" id="data">{_data(every)}</script>\n'
        f"<script>{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("thdprof.analyze.report").joinpath(name).read_text(encoding="utf-8")


def _head(answer: findings.Answer) -> str:
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


def _caps(report: Report, cap: int, every: findings.EveryCap) -> str:
    """The slider with what its cap does, the curves over all caps, and the table."""
    curve = findings.cap_curve(report, cap)
    rates = "".join(
        f"<div><dt>{_LABELS[name]}</dt>{_cell(every, name, tag='dd')}</div>" for name in _columns(every)[1:]
    )
    panel = (
        '<div class="panel">\n<form hidden><label for="cap">Cap '
        f"{_cell(every, 'cap', tag='span')} documents</label>"
        f'<input type="range" id="cap" min="0" max="{len(every.caps) - 1}" value="{every.start}">'
        f'<button type="reset">{"recommended" if cap == report.recommended_cap else "back"}</button></form>\n'
        f'<dl class="rates">{rates}</dl>\n</div>\n'
    )
    drawn = figures.caps(report, cap)
    caption = "One cap for all micro-batches: what runs eagerly" + (
        ", and how long a step takes." if curve.cap_step_time else "."
    )
    cheaper = f'<p class="note">{escape(curve.cheaper)}</p>' if curve.cheaper else ""
    inner = (
        f'<p id="sentence" aria-live="polite">{_cell(every, "sentence", tag="span")}</p>\n{panel}'
        f"{_figure(drawn, caption)}{cheaper}{_table(report, every)}"
    )
    lead = "A micro-batch over the cap runs eagerly, and holds back all ranks of its step. A larger cap pads more."
    return _section("What does each cap cost?", lead, inner, look=' class="open"')


def _cell(every: findings.EveryCap, name: str, *, tag: str, label: str = "") -> str:
    """An element whose text follows the slider."""
    head = f' data-label="{label}"' if label else ""
    return f'<{tag} data-text="{name}"{head}>{escape(every.texts[name][every.start])}</{tag}>'


def _columns(every: findings.EveryCap) -> list[str]:
    return [name for name in findings.COLUMNS if name in every.texts]


def _table(report: Report, every: findings.EveryCap) -> str:
    """The cap of the slider, the caps that have names, and the plan."""
    names = _columns(every)
    head = "".join(f'<th scope="col">{_LABELS[name]}</th>' for name in names)
    here = "".join(_cell(every, name, tag="td", label=_LABELS[name]) for name in names)
    rows = [
        f'<tr class="here" id="row"><th scope="row"><span>this cap: {_cell(every, "cap", tag="span")}</span></th>'
        f"{here}</tr>"
    ]
    alternatives = findings.choice(report, every.caps[every.start]).alternatives
    for one in sorted(alternatives, key=lambda a: (a.role == "plan", a.cap or 0)):
        values = {
            "replayed": percent(1 - one.rate.microbatch),
            "microbatch": percent(one.rate.microbatch),
            "rank_step": percent(one.rate.rank_step),
            "step": percent(one.rate.step),
            "time": "" if one.relative_step_time is None else ratio(one.relative_step_time),
        }
        cells = "".join(f'<td data-label="{_LABELS[name]}">{escape(values[name])}</td>' for name in names)
        look = ' class="plan"' if one.role == "plan" else ""
        rows.append(f'<tr{look}><th scope="row">{escape(one.name)}</th>{cells}</tr>')
    return (
        '<table class="caps"><caption>Caps beside the plan</caption><thead><tr><th scope="col">cap, documents</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _section(question: str, lead: str, inner: str, *, look: str = "") -> str:
    told = f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"<section{look}>\n<h2>{escape(question)}</h2>\n{told}{inner}\n</section>\n"


def _figure(
    drawn: Drawing | Note, head: str | None = None, every: findings.EveryCap | None = None, tail: str = ""
) -> str:
    """A figure or note with its caption, whose end follows the slider where `tail` names a text of `every`."""
    caption = escape(drawn.title if head is None else head)
    if every is not None:
        caption += _cell(every, tail, tag="span")
    return drawn.page_html(caption)


def _facts(report: Report) -> str:
    tables = []
    for one in facts(report):
        rows = "".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in one.rows)
        tables.append(f'<table class="facts"><caption>{escape(one.title)}</caption><tbody>{rows}</tbody></table>')
    return "".join(tables)


def _foot(report: Report, version: str) -> str:
    warnings = findings.answer(report).warnings
    listed = "".join(f"<li>{escape(text)}</li>" for text in warnings)
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


def _data(every: findings.EveryCap) -> str:
    """What the script needs: caps, values and words for each; shares of segments and parts as indices into levels."""
    shares: Sequence[Sequence[float]] = (*every.segments, *every.parts)
    levels = sorted({value for row in shares for value in row})
    index = {value: i for i, value in enumerate(levels)}
    value = {
        "caps": every.caps,
        "start": every.start,
        "series": {name: [_rounded(v) for v in values] for name, values in every.series.items()},
        "texts": every.texts,
        "levels": [(_rounded(v), percent(v)) for v in levels],
        "segments": [[index[v] for v in row] for row in every.segments],
        "parts": [[index[v] for v in row] for row in every.parts],
        "told": _TOLD,
    }
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
