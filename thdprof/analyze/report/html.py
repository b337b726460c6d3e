"""Turns the executed notebook into one HTML file that loads nothing else."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from thdprof.analyze.report.notebook import need

if TYPE_CHECKING:
    from nbformat import NotebookNode

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --page: #ffffff; --faint: #6b6b6b; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --page: #16181c; --faint: #a2a2a2; --line: #3c3f45; }
}
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif;
  max-width: 56rem; margin: 2rem auto 4rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0.3rem; }
a.anchor-link { display: none; }
figure { margin: 1.2rem 0; overflow-x: auto; } svg { display: block; min-width: 40rem; }
p.thdprof { color: var(--faint); }
table.thdprof { border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem; display: block; overflow-x: auto; }
table.thdprof caption { text-align: left; font-weight: 600; padding-bottom: 0.3rem; }
table.thdprof th, table.thdprof td { padding: 0.15rem 0.8rem 0.15rem 0; border-bottom: 1px solid var(--line); }
table.thdprof th { text-align: left; font-weight: 400; color: var(--faint); }
li { color: var(--faint); }
"""


def to_html(notebook: NotebookNode, *, title: str) -> str:
    """The HTML page: the notebook's text and outputs without its code. It has no scripts, and loads no fonts or images.

    Raises:
        UsageError: nbconvert is not installed.
    """
    exporter = need("nbconvert").HTMLExporter(template_name="basic")
    exporter.exclude_input = True
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )
