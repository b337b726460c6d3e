"""Writes docs/evidence.md from benchmarks/results: `python tools/evidence.py`, or `--check` to compare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "evidence.md"
ROWS = RESULTS / "trainer-rows.md"
"""The rows of Megatron-LM's scripts, compared bit for bit."""
HEAD = """# Evidence

`tools/evidence.py` makes this page from the pages of results, which give each run's command, machine and numbers.
Commands and speeds are those of the commits that a page names.
"""
BELOW = """
## Rows of Megatron-LM's scripts

Each row trains a small model by the plan and by `--replay off`. A row is equal where losses and gradient norms of all
its steps are equal, bit for bit. *Script alone* compares `--replay off` with the unchanged script, where that was run
([all rows](../benchmarks/results/trainer-rows.md)).
"""
_COMMITS = re.compile(r"[Cc]ommits? ((?:[0-9a-f]{7}(?:\s*\([^)]*\))?(?:, and |, | and | to )?)+)")
_EQUAL = re.compile(r"0 of (\d+), 0 of \1")


def describe_page(path: Path) -> str:
    """A table's row: the page's title with its link, the GPUs, the dates and the commits that it names."""
    text = path.read_text(encoding="utf-8")
    title = next((line[2:] for line in text.splitlines()[:1] if line.startswith("# ")), path.stem)
    hashes = re.findall(r"\b[0-9a-f]{7}\b", " ".join(_COMMITS.findall(" ".join(text.split()))))
    machine = re.findall(r"NVIDIA (\w+)|\b([A-Z]+\d00)s?\b", "\n".join(text.splitlines()[:12]))
    gpus = dict.fromkeys(name for pair in machine for name in pair if name)
    dates = sorted(set(re.findall(r"\b20\d\d-\d\d-\d\d\b", text)))
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "not named"
    link = f"[{title}](../benchmarks/results/{path.name})"
    return f"| {link} | {', '.join(gpus) or 'no GPU'} | {when} | {', '.join(dict.fromkeys(hashes)) or 'not named'} |"


def count_rows(text: str) -> list[str]:
    """Table rows: for each section of the page of rows how many there are, and how many of them are equal."""
    counted = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        lines = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")]
        heads = [i for i, line in enumerate(lines) if any("unlike `--replay off`" in cell for cell in line)]
        rows = equal = ran = same = 0
        for at, head in enumerate(heads):
            off = next(i for i, cell in enumerate(lines[head]) if "unlike `--replay off`" in cell)
            alone = next((i for i, cell in enumerate(lines[head]) if "unlike the script alone" in cell), None)
            for line in lines[head + 2 : heads[at + 1] if at + 1 < len(heads) else None]:
                if len(line) != len(lines[head]):
                    break
                rows, equal = rows + 1, equal + bool(_EQUAL.search(line[off]))
                if alone is not None and line[alone] not in ("not run", ""):
                    ran, same = ran + 1, same + line[alone].startswith("0 losses, 0 norms")
        if rows:
            counted.append(f"| {title} | {rows} | {equal} | {f'{same} of {ran}' if ran else 'not run'} |")
    return counted


def make_page() -> str:
    """The whole page, as Markdown."""
    pages = [describe_page(path) for path in sorted(RESULTS.glob("*.md"))]
    rows = count_rows(ROWS.read_text(encoding="utf-8"))
    first = ["| results | GPU | dates | commits |", "|---|---|---|---|", *pages]
    second = ["| section | rows | equal | script alone equal |", "|---|---|---|---|", *rows]
    return "\n".join([HEAD, *first, BELOW, *second]) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == make_page() else "docs/evidence.md is old: tools/evidence.py")
    PAGE.write_text(make_page(), encoding="utf-8")
