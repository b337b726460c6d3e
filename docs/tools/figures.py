"""The figures of `choosing-a-cap.md`, drawn from the demo dataset each time the site is built."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from thdprof.analyze import analyze_dataset
from thdprof.analyze.analysis import Analysis
from thdprof.analyze.buckets.statistics import fallback_rate
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.sources.demo import write_demo
from thdprof.dispatch import Bucket
from thdprof.training import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one theme of the site; the three of lines differ for colour-blind readers too."""

    background: str
    """Of the page; the figure itself has none."""
    ink: str
    """Text and axes."""
    lines: tuple[str, str, str]


THEMES = {
    "light": Theme(background="#ffffff", ink="#212121", lines=("#0072b2", "#b35000", "#00795c")),
    "dark": Theme(background="#1e2129", ink="#e0e0e0", lines=("#56b4e9", "#e69f00", "#2fc297")),
}
STYLES = ("-", "--", ":")
"""Of the three lines: told apart without colour."""


MODEL = Model(
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    gated_linear_unit=True,
    normalization="RMSNorm",
    qk_layernorm=True,
    add_bias_linear=False,
    rotary=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=151936,
)
"""The model that the pages name: the sizes of Qwen3 0.6B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Every cap from 1 to the largest that was considered, and what it would do."""

    caps: Sequence[int]
    microbatch: Sequence[float]
    """Share of micro-batches that run eagerly."""
    rank_step: Sequence[float]
    step: Sequence[float]
    relative_step_time: Sequence[float]
    chosen: float
    """relative_step_time of the recommended buckets."""
    num_buckets: int
    marks: Mapping[str, int]
    """Caps that have a name."""


def demo_analysis(directory: Path) -> Analysis:
    """The analysis that the pages show, of sample data that is written to `directory`."""
    files = write_demo(directory / "demo")
    return analyze_dataset(
        files.bridge,
        loader="single",
        pad_to_max_length=True,
        data_parallel_size=8,
        global_batch_size=64,
        model=MODEL,
        gpu="h100",
    )


def curve(analysis: Analysis) -> Curve:
    """The cap curve of `analysis`, a point for each number of documents."""
    table, found = analysis.microbatches, analysis.recommendation
    length = max(analysis.settings.seq_length, analysis.max_seqlen.max)
    caps, tokens = list(range(1, found.candidates[-1].max_seqs + 1)), analysis.graph_tokens
    costs = StepCosts(table, analysis.costs, caps, [length], analysis.settings.pipeline_parallel_size, n_tokens=tokens)
    options = [(Bucket(cap, length, tokens),) for cap in caps]
    rates = [fallback_rate(table, table.n_seqs > cap) for cap in caps]
    return Curve(
        caps=caps,
        microbatch=[rate.microbatch for rate in rates],
        rank_step=[rate.rank_step for rate in rates],
        step=[rate.step for rate in rates],
        relative_step_time=[float(ms) / found.eager_step_ms for ms in costs.step_ms(options)],
        chosen=found.relative_step_time,
        num_buckets=len(found.buckets),
        marks={"P90": analysis.n_seqs.p90, "P99": analysis.n_seqs.p99, "max": analysis.n_seqs.max},
    )


def draw_rates(axes: Axes, found: Curve, theme: Theme) -> None:
    """What runs eagerly under each cap, counted in three ways."""
    named = {"steps": found.step, "ranks of a step": found.rank_step, "micro-batches": found.microbatch}
    for (name, values), colour, style in zip(named.items(), theme.lines, STYLES, strict=True):
        axes.plot(found.caps, values, style, color=colour, label=name, linewidth=2)
    _caps(axes, found, theme)
    axes.set_ylabel("share with something eager")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, labelcolor=theme.ink, loc="lower left")


def draw_step_time(axes: Axes, found: Curve, theme: Theme) -> None:
    """What a step costs under each cap, against the recommended buckets."""
    axes.plot(found.caps, found.relative_step_time, STYLES[0], color=theme.lines[0], label="one cap", linewidth=2)
    several = f"{found.num_buckets} buckets, as recommended: {found.chosen:.3f}"
    axes.axhline(found.chosen, linestyle=STYLES[1], color=theme.lines[1], label=several, linewidth=2)
    _caps(axes, found, theme)
    axes.set_ylabel("modelled step time, all eager = 1")
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, labelcolor=theme.ink, loc="lower left")


def _caps(axes: Axes, found: Curve, theme: Theme) -> None:
    axes.set_xscale("log")
    axes.set_xlim(found.caps[0], found.caps[-1] * 1.25)
    ticks = [1, 4, 16, *found.marks.values()]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("cap: documents that the graph holds")
    for name, cap in found.marks.items():
        axes.axvline(cap, color=theme.ink, linewidth=0.5, alpha=0.5)
        axes.annotate(
            name, (cap, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center"
        )


FIGURES: Mapping[str, Callable[[Axes, Curve, Theme], None]] = {"rates": draw_rates, "step-time": draw_step_time}


def svg(draw: Callable[[Axes, Curve, Theme], None], found: Curve, theme: Theme) -> str:
    """One figure as SVG text, without a background of its own; its words stay text."""
    style: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "thdprof",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink),
    }
    written = io.StringIO()
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
        draw(axes, found, theme)
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return written.getvalue()


def every_figure() -> dict[str, str]:
    """SVG text of every figure in every theme, by file name."""
    with tempfile.TemporaryDirectory() as directory:
        found = curve(demo_analysis(Path(directory)))
    return {
        f"{name}-{theme}.svg": svg(draw, found, THEMES[theme]) for name, draw in FIGURES.items() for theme in THEMES
    }
