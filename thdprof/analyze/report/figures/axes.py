"""Parts of the axes that several figures share: tick labels, the line of the cap, and the looks of lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thdprof.analyze.report.figures.canvas import BLUE, GREEN, INK, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Formatter

STYLES = ((BLUE, "-", "o"), (GREEN, "--", "s"), (ORANGE, "-.", "^"), (INK, ":", "X"))
"""Colour, dash and marker of the first, second, ... line of a figure."""
CAP_LINE: dict[str, Any] = {"color": ORANGE, "linestyle": (0, (5, 2)), "linewidth": 1.3}
"""The look of the line that marks the report's cap."""


def scale(axis: Axes, *, logarithmic: bool, largest: int, smallest: int = 1, narrow: bool = False) -> None:
    """Label the x axis with whole numbers, no more than it has room for.

    Args:
        axis: the axes whose x axis is labelled.
        logarithmic: whether the x axis is logarithmic.
        largest: the largest number on the x axis.
        smallest: the smallest number on the x axis.
        narrow: whether the axes take half of the figure's width, and so have room for fewer labels.
    """
    if logarithmic:
        axis.set_xscale("log")
    crowded = largest > (500 if narrow else 2_000) and largest > 100 * smallest
    most = (4 if largest >= 10_000 else 6) if narrow else 9
    whole_numbers(axis.xaxis, logarithmic=logarithmic, subs=(1.0,) if crowded else (1.0, 2.0, 5.0), most=most)


def whole_numbers(axis: Axis, *, logarithmic: bool, subs: tuple[float, ...] = (1.0, 2.0, 5.0), most: int = 10) -> None:
    """Label `axis` with whole numbers: 1, 2, 5, 10, ... where it is `logarithmic`, else at most `most` steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if logarithmic:
        axis.set_major_locator(LogLocator(subs=subs, numticks=50))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))


def percent_format() -> Formatter:
    """A formatter that writes shares from 0 to 1 in per cent."""
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=None)


def cap_line(axis: Axes, cap: int) -> None:
    """Mark `cap` on the x axis by a dashed vertical line with its number above it."""
    axis.axvline(cap, **CAP_LINE)
    axis.annotate(
        f"cap {cap:,}", (cap, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
        fontsize=8.5, ha="center", va="bottom",
    )  # fmt: skip
