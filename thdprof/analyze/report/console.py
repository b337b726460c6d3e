"""What all reports on a terminal share: their printing, plain tables, and the line on the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.schedule.replay import DatasetSummary


def print_parts(parts: Iterable[str | Table | Text], console: Console, *, markup: bool | None = None) -> None:
    """Write the parts of a report to `console`: sentences are not wrapped, tables are fitted to its width."""
    for part in parts:
        console.print(part, highlight=False, soft_wrap=not isinstance(part, Table), markup=markup)


def plain_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines, of columns that are aligned to the left, then of columns aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for names, justify in ((left, "left"), (right, "right")):
        for name in names:
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table


def name_dataset(data: DatasetSummary) -> str:
    """The first file, how many there are besides, and the format."""
    source = data.uris[0] if len(data.uris) == 1 else f"{data.uris[0]} and {len(data.uris) - 1} more"
    return f"{source} ({data.format})"
