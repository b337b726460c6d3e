"""Small HTML tables, by which objects show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of text, numbers and nothing else; every cell is escaped, numbers stand to the right."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<table class="thdprof"><caption>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>'


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f'<td style="text-align:left">{escape(str(value))}</td>'
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f'<td style="text-align:right">{text}</td>'
