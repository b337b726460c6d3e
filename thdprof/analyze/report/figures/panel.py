"""A panel of a figure: axes with labels, lines, bars, strips that tell values on hovering, and the marks of the cap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thdprof.analyze.report.figures.scale import EM, Scale
from thdprof.analyze.report.figures.svg import BOLD, LINE, MARKERS, Canvas

_STRIP = 5
"""Least pixels of a strip that tells values."""
_MARKED = 14
"""Least pixels between the markers of a line."""


def whole(value: float) -> str:
    """A whole number with thousands separated, or nothing for other values."""
    return f"{value:,.0f}"


def share(value: float) -> str:
    """A share in per cent, with as many decimals as a tick needs."""
    return f"{value * 100:.4g}%"


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle of a canvas with two axes."""

    canvas: Canvas
    """The canvas that is drawn on."""
    x: Scale
    """Scale to the right."""
    y: Scale
    """Scale upwards."""

    def axes(
        self,
        *,
        x_label: str = "",
        write_x: Callable[[float], str] = whole,
        write_y: Callable[[float], str] = share,
        whole_y: bool = False,
        x_ticks: bool = True,
    ) -> None:
        """Draw the grid, both axes and their labels."""
        canvas, left, right = self.canvas, self.x.start, self.x.end
        for value in self._levels(write_y, whole_y):
            at = self.y(value)
            canvas.line([(left, at), (right, at)], "g")
            canvas.text(left - 6, at + 4, write_y(value), anchor="end", look="q")
        bottom = self.y.start
        canvas.line([(left, bottom), (right, bottom)], "a")
        canvas.bottom = max(canvas.bottom, bottom)
        if not x_ticks:
            return
        for value in self.x.ticks(write_x, whole=True):
            at = self.x(value)
            canvas.line([(at, bottom), (at, bottom + 4)], "a")
            self._tick(at, bottom + LINE, write_x(value))
        if x_label:
            canvas.text((left + right) / 2, bottom + 2 * LINE, x_label, anchor="middle", look="q")
        canvas.bottom = max(canvas.bottom, bottom + (2 if x_label else 1) * LINE)

    def _tick(self, at: float, y: float, words: str) -> None:
        """A label of the x axis, kept within the canvas."""
        half = len(words) * EM / 2
        self.canvas.text(min(max(at, half), self.canvas.width - half), y, words, anchor="middle", look="q")

    def _levels(self, write: Callable[[float], str], only_whole: bool) -> list[float]:
        """Values of the y axis that are labelled: lines of text need room above one another, whatever they say."""
        high = abs(self.y.end - self.y.start)
        flat = Scale(self.y.low, self.y.high, 0, high / 36 * (2 * EM + 14), self.y.logarithmic)
        return flat.ticks(lambda value: "00", whole=only_whole)

    def line(self, xs: Sequence[float], ys: Sequence[float], style: int, *, marked: bool = True) -> None:
        """A line with a marker where there is room for one."""
        points = [(self.x(a), self.y(b)) for a, b in zip(xs, ys, strict=True)]
        self.canvas.line(points, f"l s{style}")
        last = -float(_MARKED)
        for at, up in points if marked else ():
            if at - last >= _MARKED:
                self.canvas.marker(at, up, MARKERS[style], f"m s{style}")
                last = at

    def stairs(self, xs: Sequence[float], ys: Sequence[float], style: int) -> None:
        """A curve that keeps each value up to the next point."""
        points = [(self.x(xs[0]), self.y(ys[0]))]
        for a, b in zip(xs[1:], ys[1:], strict=True):
            points += [(self.x(a), points[-1][1]), (self.x(a), self.y(b))]
        self.canvas.line(points, f"l s{style}")

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: int) -> None:
        """The area between two curves."""
        up = [(self.x(a), self.y(b)) for a, b in zip(xs, highs, strict=True)]
        down = [(self.x(a), self.y(b)) for a, b in zip(xs, lows, strict=True)]
        self.canvas.line([*up, *reversed(down)], f"band f{style}")

    def strips(self, xs: Sequence[float], tips: Sequence[str]) -> None:
        """Invisible upright strips around the points `xs`, each of which tells its words on hovering."""
        chosen: list[int] = []
        for index, value in enumerate(xs):
            if not chosen or self.x(value) - self.x(xs[chosen[-1]]) >= _STRIP:
                chosen.append(index)
        centres = [self.x(xs[i]) for i in chosen]
        borders = [
            self.x.start, *((a + b) / 2 for a, b in itertools.pairwise(centres)), self.x.end,
        ]  # fmt: skip
        top = self.y.end
        for index, (left, right) in zip(chosen, itertools.pairwise(borders), strict=True):
            self.canvas.rect(left, top, right - left, self.y.start - top, "hit", tip=tips[index])

    def cap(self, cap: int, *, named: bool = True) -> None:
        """Mark `cap` on the x axis by a dashed line, which the page's script moves."""
        at, top = self.x(cap), self.y.end
        self.canvas.add(
            f'<g class="cap" data-x="{self.x.data}" transform="translate({at:.1f} 0)">'
            f'<path d="M0 {top - (4 if named else 0):.1f}V{self.y.start:.1f}"/></g>'
        )
        if named:
            words = f"cap {cap:,}"
            half = len(words) * BOLD / 2
            place = min(max(at, half), self.canvas.width - half)
            self.canvas.text(
                place, top - 8, words, anchor="middle", look="b capname", extra=f' data-cap-x="{self.x.data}"'
            )

    def level(self, cap: int) -> None:
        """Mark `cap` on the y axis by a dashed line, which the page's script moves."""
        self.canvas.add(
            f'<g class="cap" data-y="{self.y.data}" transform="translate(0 {self.y(cap):.1f})">'
            f'<path d="M{self.x.start:.1f} 0H{self.x.end:.1f}"/></g>'
        )

    def dot(self, cap: int, value: float, series: str) -> None:
        """A dot on the curve `series` at `cap`, which the page's script moves."""
        self.canvas.marker(
            self.x(cap), self.y(value), "diamond", "dot",
            extra=f' data-x="{self.x.data}" data-y="{self.y.data}" data-series="{series}"',
        )  # fmt: skip
