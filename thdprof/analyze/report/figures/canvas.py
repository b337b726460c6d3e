"""A figure as text: SVG whose ink is the page's, so that it reads in light and dark, and the same bytes every time.

Lines differ by colour, by dash and by marker; areas by hatch: nothing is told by colour alone.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"
"""Drawn in this, shown in the page's text colour."""
BLUE, ORANGE, GREEN = "#2A87C8", "#D9630F", "#0A9B74"
"""Apart for colour-blind eyes, and legible on white and on black."""
WIDTH = 9.0
"""Inches; SVG scales to the page."""
_TITLE_COLUMNS = 92
_STANDALONE = "<style>svg{color:#1b1b1b}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>"
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
}


@dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """One figure."""

    id: str
    """The same in every report; `figure-{id}` in a page, `{id}.svg` in a directory."""
    title: str
    """What it shows of these data, in a sentence."""
    alt: str
    """What is drawn, for those who do not see it."""
    svg: str
    """For a page: ink is `currentColor`."""

    def __repr__(self) -> str:
        """The title: the drawing itself is for a page."""
        return f"Figure {self.id}: {self.title}"

    def _repr_html_(self) -> str:
        return f'<figure id="figure-{self.id}" class="thdprof">{self.svg}</figure>'

    def standalone(self) -> str:
        """The SVG as a file of its own, which follows the reader's light or dark scheme."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self.svg.replace(">", f">{_STANDALONE}", 1) + "\n"


@dataclass(frozen=True, slots=True, repr=False)
class Note:
    """A sentence where a figure has nothing to draw."""

    id: str
    title: str

    def __repr__(self) -> str:
        """The sentence."""
        return self.title

    def _repr_html_(self) -> str:
        return f'<p id="note-{self.id}" class="thdprof">{escape(self.title)}</p>'


@contextmanager
def canvas(height: float, title: str) -> Iterator[Figure]:
    """An empty figure `WIDTH` by `height` inches with its title, drawn in the report's style.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise UsageError(f"figures need matplotlib ({error}): pip install matplotlib in the kernel's Python") from error

    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.08))
        text = textwrap.fill(title, _TITLE_COLUMNS, break_long_words=False)
        figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        yield figure


def drawing(figure: Figure, id: str, title: str, alt: str) -> Drawing:
    """The finished figure; called within `canvas`."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": id}):
        figure.savefig(stream, format="svg", transparent=True, dpi=120, metadata={"Date": None, "Creator": None})
    return Drawing(id=id, title=title, alt=alt, svg=_page_svg(stream.getvalue(), id, title, alt))


def _page_svg(text: str, id: str, title: str, alt: str) -> str:
    """Matplotlib's SVG with ids of its own, the page's ink, a title and a description, and no fixed size."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{id}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{id}-", text)
    text = text.replace(INK, "currentColor")
    end = text.index(">")
    box = re.search(r'viewBox="[^"]+"', text[:end])
    if box is None:
        raise RuntimeError("matplotlib's SVG has no viewBox")
    names = f'aria-labelledby="{id}-title {id}-desc"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} '
        f'role="img" {names} '
        f'style="width:100%;max-width:{WIDTH * 100:.0f}px;height:auto">'
        f'<title id="{id}-title">{escape(title)}</title><desc id="{id}-desc">{escape(alt)}</desc>'
    )
    return head + text[end + 1 :]
