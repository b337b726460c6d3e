"""`thdprof check`: hold a dataset against a plan that was made before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.analyze import check_not_refused
from thdprof.commands.options import JsonOutput, PlanFile
from thdprof.dispatch import Level
from thdprof.errors import GateError


def check(
    plan: PlanFile,
    datasets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, globs, directories or Megatron prefixes, in the plan's format; name the directory to see new "
            "files.",
            metavar="DATASET",
            show_default="the files that the plan names",
        ),
    ] = None,
    max_fallback_rate: Annotated[
        str | None,
        typer.Option(help="Largest allowed rate: 0.005 or 0.5%.", show_default="the plan's own prediction"),
    ] = None,
    level: Annotated[
        Level,
        typer.Option(
            help="Rate to check: the share of eager micro-batches, of (rank, step) pairs with an eager micro-batch, or "
            "of steps with one on any rank, for which training waits."
        ),
    ] = "step",
    cache: Annotated[
        Path | None, typer.Option(help="Directory that keeps what was read.", show_default="beside the data")
    ] = None,
    engine: Annotated[str, typer.Option(help="Where files are read: local, ray or ray:ADDRESS.")] = "local",
    json: JsonOutput = False,
) -> None:
    """Check whether a plan still fits a dataset; exit with 3 where it does not, or training would be refused.

    The dataset is replayed with the plan's training settings, and every micro-batch is dispatched to the plan's buckets
    as training does it.
    """
    from thdprof.analyze.check import check as check_dataset
    from thdprof.analyze.report.comparison import check_to_dict, print_check, verdict
    from thdprof.analyze.settings.limits import share_of

    allowed = None if max_fallback_rate is None else share_of("--max-fallback-rate", max_fallback_rate)
    loaded = streams.read_plan(plan)
    with streams.progress_bar() as progress:
        result = check_dataset(
            loaded,
            datasets or [],
            max_fallback_rate=allowed,
            level=level,
            where=streams.name_plan(plan),
            cache=cache,
            engine=engine,
            progress=progress,
        )
    streams.print_gate(result, json=json, to_dict=check_to_dict, print_text=print_check)
    if not result.holds:
        raise GateError(f"{streams.name_plan(plan)}: {verdict(result)} Analyse the dataset again")
    check_not_refused(loaded)
