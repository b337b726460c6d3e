"""Three of the page's figures as matplotlib draws them, which people can change; the page keeps its own drawings.

matplotlib is imported where the first figure is drawn. The extra `plots` installs it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from thdprof.analyze.analysis import Analysis
from thdprof.analyze.caveats import MODELLED
from thdprof.analyze.planning import add_plan
from thdprof.analyze.profile.run_profile import make_profile
from thdprof.analyze.report.analysis import answer
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures.graphs import trace_caps
from thdprof.analyze.report.figures.microbatches import count_bars, is_skewed, trace_steps
from thdprof.analyze.report.shared import spread_sentence
from thdprof.errors import UsageError
from thdprof.words import install_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEXT = 'thdprof.analyze.make_plan(result).save("plan.yaml") writes the plan'
_STYLES = ("-", "--", ":")
"""Lines of one figure, which differ without colour."""


def plot_caps(report: Report, cap: int, ax: Axes | None = None) -> Axes:
    """The three shares that run eagerly under each single cap, and the relative step time where times are known.

    Args:
        report: the report whose data is drawn.
        cap: the cap that is marked, in documents of a micro-batch.
        ax: where to draw; None: a figure of its own.

    Raises:
        UsageError: matplotlib is not installed.
    """
    ax = _open_axes(ax)
    caps, shares = trace_caps(report)
    for (name, values), style in zip(shares.items(), _STYLES, strict=True):
        ax.plot(caps, values, style, label=name)
    times, unit = report.relative_step_times(caps), "share that runs eagerly"
    if times is not None:
        low, high = np.transpose(times)
        ax.fill_between(caps, low, high, alpha=0.4, linewidth=2, color="C3", label="step time")
        unit += "; step time, all eager = 1"
    ax.set_xscale("log")
    return _label_axes(ax, cap, "cap, documents", unit)


def plot_documents(report: Report, cap: int, ax: Axes | None = None) -> Axes:
    """The histogram of a micro-batch's documents; arguments and errors as for `plot_caps`."""
    ax, documents = _open_axes(ax), report.profile.histogram()
    edges, shares = count_bars(documents)
    ax.stairs(shares / np.diff(edges), edges, fill=True, label="micro-batches")
    if is_skewed(documents):
        ax.set_xscale("log")
    return _label_axes(ax, cap, "documents of a micro-batch", "share of micro-batches, per document")


def plot_steps(report: Report, cap: int, ax: Axes | None = None) -> Axes:
    """The share of micro-batches, and of the fullest of a rank's step and of a step, with more than so many documents.

    Arguments and errors are as for `plot_caps`.
    """
    ax = _open_axes(ax)
    for (name, (documents, over)), style in zip(trace_steps(report).items(), _STYLES, strict=True):
        ax.step(documents, over, style, where="post", label=name)
    return _label_axes(ax, cap, "documents", "share with more documents")


def _open_axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(f"plots need matplotlib: {install_line('plots')}") from error
    return pyplot.subplots()[1]


def _label_axes(ax: Axes, cap: int, x: str, y: str) -> Axes:
    ax.axvline(cap, color="black", linewidth=1, label=f"cap {cap:,}")
    ax.set(xlabel=x, ylabel=y)
    ax.legend()
    return ax


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Analysis):
    """An analysis that a notebook shows and draws. Figures are of its plan.

    Each figure takes the axes to draw into, or None for a figure of its own, and returns them. It marks the
    recommended cap, else P99 of documents. It raises a UsageError without matplotlib, or where there can be no plan.
    """

    @classmethod
    def from_analysis(cls, analysis: Analysis) -> Result:
        """The analysis as a result, with its plan."""
        planned = add_plan(analysis)
        return cls(**{field.name: getattr(planned, field.name) for field in fields(planned)})

    def __str__(self) -> str:
        """The answer of five lines, after what is refused: what to capture, what runs eagerly, what it saves, memory,
        and what to do next. What was assumed, notes and warnings follow.
        """
        then = _NEXT if self.recommendation.buckets else ""
        lines = [*(("refused", reason) for reason in self.refused), *answer(self, then=then)]
        if self.assumptions:
            lines.append(("assumed", ", ".join(f"{one.name}={one.value!r}" for one in self.assumptions)))
        lines += [] if self.spread is None else [("drawn", spread_sentence(self.spread))]
        lines += [("note", note) for note in self.notes]
        warnings = (text for text in self.warnings if text not in self.notes and not text.startswith(MODELLED))
        lines += [("warning", text) for text in warnings]
        return "\n".join(f"{heading:<8} {line}" for heading, line in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _open_report(self) -> tuple[Report, int]:
        report = Report(plan=self.plan, profile=make_profile(self), comparison=None)
        return report, report.default_cap

    def plot_caps(self, ax: Axes | None = None) -> Axes:
        """The three shares that run eagerly under each single cap, and the relative step time where times are known."""
        return plot_caps(*self._open_report(), ax)

    def plot_documents(self, ax: Axes | None = None) -> Axes:
        """The histogram of a micro-batch's documents."""
        return plot_documents(*self._open_report(), ax)

    def plot_steps(self, ax: Axes | None = None) -> Axes:
        """The share of micro-batches, and of the fullest of a rank's step and of a step, with more than so many
        documents.
        """
        return plot_steps(*self._open_report(), ax)
