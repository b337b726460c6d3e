"""Hooks of mkdocs: measured results become pages of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the results that the pages cite."""
    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to results lead to their pages."""
    return markdown.replace("](../benchmarks/results/", "](results/")
