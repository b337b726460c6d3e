"""Parts of the README that the site shows too, so that they are written once."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def part(begin: str, end: str) -> str:
    """The README's text from the line `begin` up to the line `end`, without both; its links lead to the site's pages.

    Raises:
        ValueError: a line is not there.
    """
    text = README.read_text(encoding="utf-8")
    for line in (begin, end):
        if f"\n{line}\n" not in text:
            raise ValueError(f"README.md has no line {line!r}")
    between = text.split(f"\n{begin}\n", 1)[1].split(f"\n{end}\n", 1)[0].strip()
    return between.replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")


def versions() -> str:
    """Which training systems can use a plan today."""
    return part("**Which training systems can use a plan today**", "## Limits")
