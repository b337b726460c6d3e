"""Figures as SVG text: scales, ticks, marks, and the drawing of a figure at two widths.

A figure is drawn twice, for wide and for narrow screens, so that its words keep their size; a page shows one of both.
Ink is the text colour around the figure. No difference is shown by colour alone: lines also differ by dash and marker.
Every mark that moves with the cap tells its scale in `data-` attributes, which the page's script reads. Equal figures
have equal bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDE, NARROW = 720, 358
"""Widths of a figure in CSS pixels: the text column of a page, and that of a phone."""
EM = 7.0
"""Pixels that a character of a label takes at most on average."""
BOLD = 8.6
"""The same of bold words."""
LINE = 17
"""Pixels between lines of text."""
_TICK_ROOM = 14
"""Pixels between two tick labels."""
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
    f".thd .fc{{fill:{CAP};fill-opacity:.8}}"
    ".thd .hit{fill:currentColor;fill-opacity:0}.thd .hit:hover{fill-opacity:.09}"
)
"""The style sheet of all figures."""
_SHAPES = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M-3.5-3.5h7v7h-7z",
    "triangle": "M0-4.6L4.4 3.4H-4.4z",
    "cross": "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5",
    "diamond": "M0-5L5 0L0 5L-5 0z",
}
MARKERS = ("circle", "square", "triangle", "cross", "diamond")
"""Shapes of markers: those of the first, second, ... line."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values to pixels, linear or logarithmic."""

    low: float
    """Value at `start`."""
    high: float
    """Value at `end`."""
    start: float
    """Pixel of `low`."""
    end: float
    """Pixel of `high`."""
    logarithmic: bool = False
    """Whether equal ratios are equally long."""

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
        return f"{kind} {self.low:g} {self.high:g} {_n(self.start)} {_n(self.end)}"

    def ticks(self, write: Callable[[float], str], *, whole: bool = False) -> list[float]:
        """Values to label, as many as there is room for when `write` writes them side by side.

        Args:
            write: the label of a value.
            whole: whether only whole numbers are labelled.
        """
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


def _n(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(slots=True)
class Canvas:
    """An empty drawing of a given width, to which marks are added; it grows downwards."""

    width: int
    """Width in CSS pixels."""
    marks: list[str] = field(default_factory=list)
    """SVG elements in painting order."""
    bottom: float = 0
    """Lower end of what was drawn."""

    @property
    def narrow(self) -> bool:
        """Whether the drawing is for a phone."""
        return self.width < WIDE

    def add(self, mark: str) -> None:
        """Add an SVG element."""
        self.marks.append(mark)

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
        self.add(f'<text x="{_n(x)}" y="{_n(y)}"{at}{looks}{extra}>{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """Add a line through `points`."""
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.add(f'<path class="{look}" d="M{path}"/>')

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, *, tip: str = "", extra: str = ""
    ) -> None:
        """Add a rectangle; `tip` is what hovering over it tells."""
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(0, width))}" height="{_n(max(0, height))}"'
        told = f"<title>{escape(tip)}</title>" if tip else ""
        self.add(f'<rect class="{look}" {box}{extra}>{told}</rect>' if told else f'<rect class="{look}" {box}{extra}/>')

    def marker(self, x: float, y: float, shape: str, look: str, *, extra: str = "") -> None:
        """Add a marker of `_SHAPES` at a point."""
        self.add(f'<path class="{look}" d="{_SHAPES[shape]}" transform="translate({_n(x)} {_n(y)})"{extra}/>')

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, int | str]], *, marked: bool = True) -> float:
        """Name the lines, in rows from `y` on; the pixel below the last row.

        Args:
            x: left end.
            y: upper end.
            entries: name of each line, and its number in `STYLE`, or "cap" for the line of the cap.
            marked: whether lines have markers.
        """
        left, top = x, y + LINE - 4
        for name, style in entries:
            needed = 30 + len(name) * EM
            if left > x and left + needed > self.width:
                left, top = x, top + LINE
            if isinstance(style, int):
                self.line([(left, top - 4), (left + 22, top - 4)], f"l s{style}")
                if marked:
                    self.marker(left + 11, top - 4, MARKERS[style], f"m s{style}")
            else:
                self.add(f'<g class="cap"><path d="M{_n(left)} {_n(top - 4)}h22"/></g>')
            self.text(left + 28, top, name)
            left += needed + 14
        self.bottom = max(self.bottom, top + 6)
        return top + 8

    def svg(self, *, name: str, title: str, alt: str, standalone: bool = False) -> str:
        """The drawing as an SVG element.

        Args:
            name: class of the element.
            title: what the drawing shows, in a sentence.
            alt: a description for readers who cannot see it.
            standalone: whether the element is a file of its own, with its own style sheet.
        """
        height = math.ceil(self.bottom + 6)
        own = ""
        if standalone:
            scheme = "svg{color:#1b1b1b}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}"
            own = f"<style>{scheme}{STYLE}</style><title>{escape(title)}</title>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="thd {name}" viewBox="0 0 {self.width} {height}" '
            f'role="img" aria-label="{escape(title)}">{own}<desc>{escape(alt)}</desc>{"".join(self.marks)}</svg>'
        )


@dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """One figure."""

    id: str
    """The figure's name in every report; the figure is `figure-{id}` in a page and `{id}.svg` in a directory."""
    title: str
    """The finding about these data that the figure shows, in a sentence."""
    alt: str
    """A description of the drawing for readers who cannot see it."""
    paint: Callable[[Canvas], None]
    """Draws the figure on an empty canvas of any width."""

    def __repr__(self) -> str:
        """The id and the title, for a terminal."""
        return f"Figure {self.id}: {self.title}"

    def __eq__(self, other: object) -> bool:
        """Whether the other figure looks and reads the same."""
        return isinstance(other, Drawing) and self.standalone() == other.standalone()

    def __hash__(self) -> int:
        return hash(self.standalone())

    @property
    def svg(self) -> str:
        """The drawing for wide screens."""
        return self._drawn(WIDE)

    def page_html(self, caption: str) -> str:
        """The figure of a page at both widths; `caption` is HTML."""
        return (
            f'<figure id="figure-{self.id}"><figcaption>{caption}</figcaption>'
            f"{self._drawn(WIDE)}{self._drawn(NARROW)}</figure>"
        )

    def _repr_html_(self) -> str:
        return (
            f'<figure id="figure-{self.id}" class="thdprof" style="max-width:{WIDE}px"><style>{STYLE}</style>'
            f"<figcaption><b>{escape(self.title)}</b></figcaption>{self._drawn(WIDE)}</figure>"
        )

    def standalone(self) -> str:
        """The SVG as a file of its own, which follows the reader's light or dark scheme."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self._drawn(WIDE, standalone=True) + "\n"

    def _drawn(self, width: int, *, standalone: bool = False) -> str:
        canvas = Canvas(width)
        self.paint(canvas)
        name = "narrow" if canvas.narrow else "wide"
        return canvas.svg(name=name, title=self.title, alt=self.alt, standalone=standalone)


@dataclass(frozen=True, slots=True, repr=False)
class Note:
    """A sentence in the place of a figure that has nothing to draw."""

    id: str
    """The name of the figure that it stands for."""
    title: str
    """The sentence."""

    def __repr__(self) -> str:
        """The sentence."""
        return self.title

    def page_html(self, caption: str) -> str:
        """The sentence in a page; `caption` is HTML."""
        return f'<p id="note-{self.id}" class="note">{caption}</p>'

    def _repr_html_(self) -> str:
        return f'<p id="note-{self.id}" class="thdprof">{escape(self.title)}</p>'
