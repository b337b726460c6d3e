"""`thdprof recipes`: how many of Megatron-Bridge's performance recipes could train by a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.options import Json


def recipes(
    bridge_dir: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of the package megatron.bridge, or of a checkout; without it the installed one is read.",
            metavar="BRIDGE_DIR",
        ),
    ] = None,
    one_each: Annotated[
        bool, typer.Option("--list", help="A line for each recipe: its verdict, and why.", rich_help_panel="Output")
    ] = False,
    json: Json = False,
) -> None:
    """Count which of Megatron-Bridge's performance recipes thdprof could serve: refused, accepted unmeasured, proved.

    Proved: nothing is refused, each setting was run in some row of benchmarks/results, and the recipe is for GPUs of
    the architecture that the rows ran on (Hopper). No recipe was run whole.

    Recipes are read as text. Nothing of Megatron-Bridge is run, and nothing is downloaded.
    """
    from thdprof.analyze.report.recipes import described, listed, to_json
    from thdprof.megatron_limits.recipes import coverage_of, find_bridge

    coverage = coverage_of(find_bridge(bridge_dir))
    if json:
        streams.write(to_json(coverage) + "\n")
    else:
        streams.write(listed(coverage) if one_each else described(coverage))
