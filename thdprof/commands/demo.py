"""`thdprof demo`: write a small sample dataset in every format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams


def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the sample datasets.", metavar="DIRECTORY")],
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a small sample dataset in every format."""
    from thdprof.analyze.sources.demo import write_demo

    for path in dataclasses.astuple(write_demo(directory, force=force)):
        streams.write(f"{path}\n")
