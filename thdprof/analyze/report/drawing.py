"""Figures as SVG text: scales, marks, panels with axes, the one style sheet, and the figure with its sentence.

Ink is the text colour around the figure. No difference is shown by colour alone: lines also differ by dash and marker.
Every mark that moves with the cap tells its scale in `data-` attributes, which the page's script reads. Equal figures
have equal bytes. A figure is drawn twice, for wide and for narrow screens, so that its words keep their size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

from thdprof.words import html_table

EM = 7.0
"""Pixels that a character of a label takes at most on average."""
_TICK_ROOM = 14
"""Pixels between two tick labels."""
WIDE, NARROW = 720, 358
"""Widths of a figure in CSS pixels: the text column of a page, and that of a phone."""
BOLD = 8.6
"""Pixels that a bold character takes at most on average."""
LINE = 17
"""Pixels between lines of text."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_COLOURS = ("#2a87c8", "#d9630f", "#0a9b74", "currentColor")
"""Colours of the first to third line, which colour-blind readers can tell apart; legible on white and on black."""
CAP = "#c05299"
"""The colour of everything that shows the cap."""
STYLE = (
    "svg.thd{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:currentColor;width:100%;height:auto;"
    "display:block}.thd .g{stroke:currentColor;opacity:.13}.thd .a{stroke:currentColor;opacity:.55}"
    ".thd .b{font-weight:600}.thd .q{opacity:.72}.thd .l{fill:none;stroke-width:2;stroke-linejoin:round}"
    + "".join(
        f".thd .s{i}{{stroke:{c}}}.thd .f{i}{{fill:{c}}}" + (f".thd .l.s{i}{{stroke-dasharray:{d}}}" if d else "")
        for i, (c, d) in enumerate(zip(_COLOURS, _DASHES, strict=True))
    )
    + ".thd .f0,.thd .f1,.thd .f2{fill-opacity:.78}.thd .band{fill-opacity:.22}.thd .m{stroke-width:1.6;fill:none}"
    f".thd .cap path{{stroke:{CAP};stroke-width:1.7;stroke-dasharray:5 3;fill:none}}.thd .dot{{fill:{CAP}}}"
)
"""The style sheet of all figures."""
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.6L4.4 3.4H-4.4z",
    "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
)
"""Markers of the first to fourth line: a circle, a square, a triangle and a cross."""
_DIAMOND = "M0-5L5 0L0 5L-5 0z"
_MARKED = 14
"""Least pixels between the markers of a line."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from the values `low` to `high` to the pixels `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of `value`, no further out than the scale's ends."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    @property
    def data(self) -> str:
        """The scale as an attribute's value: kind, values at both ends, their pixels."""
        kind = "log" if self.logarithmic else "lin"
        return f"{kind} {self.low:g} {self.high:g} {px(self.start)} {px(self.end)}"

    def ticks(self, write: Callable[[float], str], *, whole: bool = False) -> list[float]:
        """Values to label, as many as there is room for when `write` writes them side by side; `whole` ones alone."""
        for values in _logarithmic(self) if self.logarithmic else _linear(self, whole=whole):
            room = [abs(self(b) - self(a)) for a, b in itertools.pairwise(values)]
            wide = [(len(write(a)) + len(write(b))) / 2 * EM for a, b in itertools.pairwise(values)]
            if all(r >= w + _TICK_ROOM for r, w in zip(room, wide, strict=True)):
                return values
        return [self.high]


def _linear(scale: Scale, *, whole: bool) -> Iterable[list[float]]:
    """Lists of evenly spaced round numbers, the densest first."""
    span = max(scale.high - scale.low, 1e-9)
    first = math.floor(math.log10(span)) - 1
    for exponent in range(first, first + 4):
        for step in (1, 2, 2.5, 5):
            width = step * 10.0**exponent
            if (whole and (width < 1 or width != int(width))) or span / width > 10:
                continue
            begin, end = math.ceil(scale.low / width - 1e-9), math.floor(scale.high / width + 1e-9)
            values = [round(i * width, 12) for i in range(begin, end + 1)]
            if values:
                yield values


def _logarithmic(scale: Scale) -> Iterable[list[float]]:
    """Lists of round numbers from 1 on, the densest first."""
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        values = [f * 10.0**d for d in decades[::every] for f in factors]
        yield [v for v in values if max(1, scale.low) * 0.999 <= v <= scale.high * 1.001]


def px(value: float) -> str:
    """A pixel with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class FigureTable(NamedTuple):
    """A table of a figure; every row has a cell for each name of its head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text, with thousands separated."""
        return [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in self.rows]


@dataclass(slots=True)
class Canvas:
    """An empty drawing of a width in CSS pixels, to which SVG elements are added; it grows downwards."""

    width: int
    marks: list[str] = field(default_factory=list)
    """SVG elements in painting order."""
    bottom: float = 0
    """Lower end of what was drawn."""

    @property
    def narrow(self) -> bool:
        """Whether the drawing is for a phone."""
        return self.width < WIDE

    def within(self, at: float, length: float) -> float:
        """The middle of words of `length` pixels, as near to `at` as keeps them on the canvas."""
        return min(max(at, length / 2), self.width - length / 2)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: Literal["start", "middle", "end"] = "start",
        look: str = "",
        extra: str = "",
    ) -> None:
        """Add words whose base line is at `y`; `look` names classes of `STYLE`, `extra` is SVG attributes."""
        looks = f' class="{look}"' if look else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.marks.append(f'<text x="{px(x)}" y="{px(y)}"{at}{looks}{extra}>{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """Add a line through `points`."""
        path = "L".join(f"{px(x)} {px(y)}" for x, y in points)
        self.marks.append(f'<path class="{look}" d="M{path}"/>')

    def marker(self, x: float, y: float, style: int) -> None:
        """Add the marker of line `style` at a point."""
        self.marks.append(f'<path class="m s{style}" d="{_MARKERS[style]}" transform="translate({px(x)} {px(y)})"/>')

    def legend(self, entries: Mapping[str, int], *, top: float = 0, marked: bool = True) -> float:
        """Name the lines by their numbers in `STYLE`, in rows below `top`; return the pixel below the last row."""
        left, top = 0.0, top + LINE - 4
        for name, style in entries.items():
            needed = 30 + len(name) * EM
            if left > 0 and left + needed > self.width:
                left, top = 0.0, top + LINE
            self.line([(left, top - 4), (left + 22, top - 4)], f"l s{style}")
            if marked:
                self.marker(left + 11, top - 4, style)
            self.text(left + 28, top, name)
            left += needed + 14
        self.bottom = max(self.bottom, top + 6)
        return top + 8

    def table(self, table: FigureTable) -> None:
        """Add a table below all marks, a line of text for each row."""
        self.text(0, self.bottom + 18, table.title, look="b")
        self.bottom += 18
        rows = table.cells
        left = 0.0
        for cells in zip(*([table.head] if table.head else []), *rows, strict=True):
            for number, words in enumerate(cells, start=1):
                self.text(left, self.bottom + number * LINE, words)
            left += (max(map(len, cells)) + 2) * EM
        self.bottom += (len(rows) + bool(table.head)) * LINE

    def panel(
        self,
        title: str,
        x: Scale,
        limits: tuple[float, float],
        height: float,
        *,
        top: float = 0,
        gap: float = 48,
        left: float = 0,
        logarithmic: bool = False,
    ) -> Panel:
        """Add a title below `top`, and a panel of some height that begins `gap` pixels below `top`."""
        self.text(left, top + 14, title, look="b")
        return Panel(self, x, Scale(*limits, top + gap + height, top + gap, logarithmic))

    def svg(self, *, name: str, title: str, alt: str, standalone: bool = False) -> str:
        """The drawing as an SVG element of class `name`; `standalone` adds the style sheet that a file needs."""
        height = math.ceil(self.bottom + 6)
        own = ""
        if standalone:
            scheme = "svg{color:#1b1b1b}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}"
            own = f"<style>{scheme}{STYLE}</style><title>{escape(title)}</title>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="thd {name}" viewBox="0 0 {self.width} {height}" '
            f'role="img" aria-label="{escape(title)}">{own}<desc>{escape(alt)}</desc>{"".join(self.marks)}</svg>'
        )


def write_whole(value: float) -> str:
    """A whole number with thousands separated, or nothing for other values."""
    return f"{value:,.0f}"


def write_share(value: float) -> str:
    """A share in per cent, with as many decimals as a tick needs."""
    return f"{value * 100:.4g}%"


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle of a canvas with two axes: `x` goes to the right, `y` upwards."""

    canvas: Canvas
    x: Scale
    y: Scale

    def axes(self, *, x_label: str = "", write_y: Callable[[float], str] = write_share, x_ticks: bool = True) -> None:
        """Draw the grid, both axes and their labels; `write_whole` labels whole numbers alone."""
        canvas, left, right = self.canvas, self.x.start, self.x.end
        # Lines of text need room above one another, whatever they say.
        height = abs(self.y.end - self.y.start)
        flat = Scale(self.y.low, self.y.high, 0, height / 36 * (2 * EM + 14), self.y.logarithmic)
        for value in flat.ticks(lambda value: "00", whole=write_y is write_whole):
            at = self.y(value)
            canvas.line([(left, at), (right, at)], "g")
            canvas.text(left - 6, at + 4, write_y(value), anchor="end", look="q")
        bottom = self.y.start
        canvas.line([(left, bottom), (right, bottom)], "a")
        canvas.bottom = max(canvas.bottom, bottom)
        if not x_ticks:
            return
        for value in self.x.ticks(write_whole, whole=True):
            at, words = self.x(value), write_whole(value)
            canvas.line([(at, bottom), (at, bottom + 4)], "a")
            canvas.text(canvas.within(at, len(words) * EM), bottom + LINE, words, anchor="middle", look="q")
        if x_label:
            canvas.text((left + right) / 2, bottom + 2 * LINE, x_label, anchor="middle", look="q")
        canvas.bottom = max(canvas.bottom, bottom + (2 if x_label else 1) * LINE)

    def line(self, xs: Sequence[float], ys: Sequence[float], style: int, *, marked: bool = True) -> None:
        """A line with a marker where there is room for one."""
        points = [(self.x(a), self.y(b)) for a, b in zip(xs, ys, strict=True)]
        self.canvas.line(points, f"l s{style}")
        last = -float(_MARKED)
        for at, up in points if marked else ():
            if at - last >= _MARKED:
                self.canvas.marker(at, up, style)
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

    def column(self, low: float, high: float, value: float, tip: str) -> None:
        """An upright bar of height `value` from `low` to `high`; hovering over it shows `tip`."""
        left, width, top = self.x(low), self.x(high) - self.x(low), self.y(value)
        inset = 0.6 if width > 3 else 0
        box = f'x="{px(left + inset)}" y="{px(top)}" width="{px(width - 2 * inset)}" height="{px(self.y.start - top)}"'
        self.canvas.marks.append(f'<rect class="f0" {box}><title>{escape(tip)}</title></rect>')

    def cap(self, cap: int, *, named: bool = True) -> None:
        """Mark `cap` on the x axis by a dashed line, which the page's script moves."""
        at, top = self.x(cap), self.y.end
        self.canvas.marks.append(
            f'<g class="cap" data-x="{self.x.data}" transform="translate({at:.1f} 0)">'
            f'<path d="M0 {top - (4 if named else 0):.1f}V{self.y.start:.1f}"/></g>'
        )
        if named:
            words, data = f"cap {cap:,}", f' data-cap-x="{self.x.data}"'
            place = self.canvas.within(at, len(words) * BOLD)
            self.canvas.text(place, top - 8, words, anchor="middle", look="b capname", extra=data)

    def dot(self, cap: int, value: float, series: str) -> None:
        """A dot on the curve `series` at `cap`, which the page's script moves."""
        self.canvas.marks.append(
            f'<path class="dot" d="{_DIAMOND}" transform="translate({px(self.x(cap))} {px(self.y(value))})" '
            f'data-x="{self.x.data}" data-y="{self.y.data}" data-series="{series}"/>'
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Figure:
    """One finding of a report: its sentence, its numbers, and its drawing or tables where there is more to show."""

    id: str
    """The figure's name in every report: `figure-{id}` in a page and `{id}.svg` in a directory."""
    text: str
    """The finding about these data in a sentence, or why there is nothing to draw."""
    values: dict[str, Any]
    """The finding's numbers by name, which ends in the unit: `_documents`, `_tokens`, `_microbatches`, `_share` (from 0
    to 1), `_gib` or `_ms`. A `relative_step_time` is the lowest and the highest mean step time divided by that of
    running all micro-batches eagerly; null where times are not of the user's own model."""
    alt: str = ""
    """A description of the drawing for readers who cannot see it."""
    paint: Callable[[Canvas], None] | None = None
    """Draws the figure on an empty canvas of any width; None where tables or the sentence say it all."""
    tables: tuple[FigureTable, ...] = ()
    """Tables below the drawing, or in its place."""

    def __repr__(self) -> str:
        return f"Figure {self.id}: {self.text}" if self.drawn else self.text

    @property
    def drawn(self) -> bool:
        """Whether the figure shows more than its sentence: a drawing or tables."""
        return self.paint is not None or bool(self.tables)

    @property
    def svg(self) -> str:
        """The drawing for wide screens; empty where there is none."""
        return "" if self.paint is None else self._draw(WIDE)

    def page_html(self, caption: str) -> str:
        """The figure of a page at both widths, or its sentence; `caption` is HTML."""
        if not self.drawn:
            return f'<p id="note-{self.id}" class="note">{caption}</p>'
        narrow = "" if self.paint is None else self._draw(NARROW)
        shown = f"{self.svg}{narrow}{self._tables()}"
        return f'<figure id="figure-{self.id}"><figcaption>{caption}</figcaption>{shown}</figure>'

    def _repr_html_(self) -> str:
        if not self.drawn:
            return f'<p id="note-{self.id}" class="thdprof">{escape(self.text)}</p>'
        return (
            f'<figure id="figure-{self.id}" class="thdprof" style="max-width:{WIDE}px"><style>{STYLE}</style>'
            f"<figcaption><b>{escape(self.text)}</b></figcaption>{self.svg}{self._tables()}</figure>"
        )

    def _tables(self) -> str:
        return "".join(html_table(table.title, table.head, table.cells) for table in self.tables)

    def standalone(self) -> str:
        """The SVG as a file of its own, which follows the reader's light or dark scheme."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self._draw(WIDE, standalone=True) + "\n"

    def _draw(self, width: int, *, standalone: bool = False) -> str:
        canvas = Canvas(width)
        if self.paint is not None:
            self.paint(canvas)
        for table in self.tables if standalone else ():
            canvas.table(table)
        name = "narrow" if canvas.narrow else "wide"
        tables = [f"Table: {table.title}: {', '.join(filter(None, table.head))}." for table in self.tables]
        alt = " ".join(filter(None, (self.alt, *tables)))
        return canvas.svg(name=name, title=self.text, alt=alt, standalone=standalone)
