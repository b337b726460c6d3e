"""A figure, or the sentence in its place, for pages, notebooks and files.

A figure is drawn twice, for wide and for narrow screens, so that its words keep their size; a page shows one of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from thdprof.analyze.report.figures.svg import NARROW, STYLE, WIDE, Canvas


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
