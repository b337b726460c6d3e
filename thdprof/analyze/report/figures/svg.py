"""Marks of figures as SVG text, and their one style sheet.

Ink is the text colour around the figure. No difference is shown by colour alone: lines also differ by dash and marker.
Every mark that moves with the cap tells its scale in `data-` attributes, which the page's script reads. Equal figures
have equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from thdprof.analyze.report.figures.scale import EM, px

WIDE, NARROW = 720, 358
"""Widths of a figure in CSS pixels: the text column of a page, and that of a phone."""
BOLD = 8.6
"""The same of bold words."""
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
        self.add(f'<text x="{px(x)}" y="{px(y)}"{at}{looks}{extra}>{escape(words)}</text>')

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """Add a line through `points`."""
        path = "L".join(f"{px(x)} {px(y)}" for x, y in points)
        self.add(f'<path class="{look}" d="M{path}"/>')

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, *, tip: str = "", extra: str = ""
    ) -> None:
        """Add a rectangle; `tip` is what hovering over it tells."""
        box = f'x="{px(x)}" y="{px(y)}" width="{px(max(0, width))}" height="{px(max(0, height))}"'
        told = f"<title>{escape(tip)}</title>" if tip else ""
        self.add(f'<rect class="{look}" {box}{extra}>{told}</rect>' if told else f'<rect class="{look}" {box}{extra}/>')

    def marker(self, x: float, y: float, shape: str, look: str, *, extra: str = "") -> None:
        """Add a marker of `_SHAPES` at a point."""
        self.add(f'<path class="{look}" d="{_SHAPES[shape]}" transform="translate({px(x)} {px(y)})"{extra}/>')

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
                self.add(f'<g class="cap"><path d="M{px(left)} {px(top - 4)}h22"/></g>')
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
