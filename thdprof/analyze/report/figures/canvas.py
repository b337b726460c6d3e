"""Figures as SVG text. Their ink is the page's text colour, so that they are legible on light and dark pages.

Equal figures have equal bytes. No difference is shown by colour alone: lines also differ by dash and marker, areas by
hatch.
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
"""The colour that matplotlib draws ink in; the page shows it in its text colour."""
BLUE, ORANGE, GREEN = "#2A87C8", "#D9630F", "#0A9B74"
"""Colours that colour-blind readers can tell apart, legible on white and on black."""
WIDTH = 9.0
"""Width of every figure in inches; the page scales the SVG."""
_TITLE_COLUMNS = 92
"""Characters of a line of a title."""
_STANDALONE_STYLE = "<style>svg{color:#1b1b1b}@media(prefers-color-scheme:dark){svg{color:#e6e6e6}}</style>"
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
    """The figure's name in every report; the figure is `figure-{id}` in a page and `{id}.svg` in a directory."""
    title: str
    """The finding about these data that the figure shows, in a sentence."""
    alt: str
    """A description of the drawing for readers who cannot see it."""
    svg: str
    """The SVG for a page, in which ink is `currentColor`."""

    def __repr__(self) -> str:
        """The id and the title, for a terminal."""
        return f"Figure {self.id}: {self.title}"

    def _repr_html_(self) -> str:
        return f'<figure id="figure-{self.id}" class="thdprof">{self.svg}</figure>'

    def standalone(self) -> str:
        """The SVG as a file of its own, which follows the reader's light or dark scheme."""
        return '<?xml version="1.0" encoding="utf-8"?>\n' + self.svg.replace(">", f">{_STANDALONE_STYLE}", 1) + "\n"


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
    """The drawing of a finished figure; call it within the `canvas` that made the figure."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": id}):
        figure.savefig(stream, format="svg", transparent=True, dpi=120, metadata={"Date": None, "Creator": None})
    return Drawing(id=id, title=title, alt=alt, svg=_page_svg(stream.getvalue(), id, title, alt))


def _page_svg(text: str, id: str, title: str, alt: str) -> str:
    """Matplotlib's SVG `text` for a page: ids begin with `id`, ink is the page's, and the size is not fixed."""
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
