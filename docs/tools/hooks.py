"""Hooks of mkdocs: references and figures are generated, and measured results become pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cli_reference
import figures
import plan_reference
import readme_parts
import settings_reference
import stubs
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

GENERATED: Mapping[str, Callable[[], str]] = {
    "<!-- generated: plan -->": plan_reference.reference,
    "<!-- generated: commands -->": cli_reference.reference,
    "<!-- generated: refused settings -->": settings_reference.reference,
    "<!-- generated: versions -->": readme_parts.versions,
}
"""Lines of pages, and what stands for each in the site."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the figures, and the results that the pages cite."""
    for name, text in figures.every_figure().items():
        files.append(File.generated(config, f"figures/{name}", content=text))
    for path in sorted(RESULTS.glob("*.md")):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated, for which a note stands in the repository; links to results lead to their pages."""
    markdown = stubs.without_notes(markdown)
    for line, make in GENERATED.items():
        if line in markdown:
            markdown = markdown.replace(line, make())
    return markdown.replace("](../benchmarks/results/", "](results/")
