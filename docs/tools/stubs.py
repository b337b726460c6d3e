"""What pages say in the repository in place of the parts that the site alone has, and how the site leaves that out."""

from __future__ import annotations

import re

NOTE = "*Not in the repository: `make docs`"
"""How a paragraph begins that stands above a generated part; it tells a reader of the repository where that part is."""


def without_notes(markdown: str) -> str:
    """A page without such paragraphs, as the site shows it."""
    return re.sub(rf"^{re.escape(NOTE)}.*?\n(?:\n+|\Z)", "", markdown, flags=re.M | re.S)
