"""Writes the generated parts of docs/: `python docs/tools/references.py`, or `--check` to compare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cli_reference
import plan_reference
import python_reference
import readme_parts
import settings_reference

DOCS = Path(__file__).parents[1]
GENERATED = {
    "plan": plan_reference.reference,
    "commands": cli_reference.reference,
    "refused settings": settings_reference.reference,
    "versions": readme_parts.versions,
}
"""Parts of pages that have a name; all others are lists of Python names."""
PART = re.compile(r"(<!-- generated: ([^>]+) -->\n).*?(<!-- end -->)", re.S)
"""A generated part of a page, between two comments."""


def fill_parts(markdown: str) -> str:
    """A page with its generated parts made anew."""

    def make(part: re.Match[str]) -> str:
        text = GENERATED[part[2]]() if part[2] in GENERATED else python_reference.reference(part[2])
        return f"{part[1]}\n{text}\n\n{part[3]}"

    return PART.sub(make, markdown)


if __name__ == "__main__":
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
    made = {page: fill_parts(text) for page, text in texts.items()}
    old = [page for page, text in texts.items() if made[page] != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"old: {', '.join(f'docs/{page.name}' for page in old)}; run `make references`" if old else 0)
    for page in old:
        page.write_text(made[page], encoding="utf-8")
