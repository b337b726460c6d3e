"""`thdprof report`: say and draw what a plan rests on, and what happened in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.options import JsonOutput, Overwrite, PlanFile
from thdprof.errors import UsageError
from thdprof.words import wrap_text


def report(
    plan: PlanFile,
    stats: Annotated[
        Path | None, typer.Argument(help="Statistics of a run, JSON lines; the last one is read.", metavar="STATS")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile that analyze --profile or merge wrote.", show_default="PLAN.profile.parquet beside the plan"
        ),
    ] = None,
    cap: Annotated[
        int | None,
        typer.Option(min=1, help="Cap, in documents, that the figures are about.", show_default="the recommended one"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write, .html or .ipynb; or a directory for the figures as SVG."),
    ] = None,
    force: Overwrite = False,
    json: JsonOutput = False,
) -> None:
    """Describe a plan in sentences and figures: its data, the cost of each cap, and what happened in a run."""
    from thdprof.analyze.report.write import write_report

    if streams.is_stdin(plan):
        if profile is None:
            raise UsageError("-: a plan from stdin has no profile beside it; give --profile")
        if output is not None and output.suffix.lower() == ".ipynb":
            raise UsageError(f"-o {output}: a notebook reads its plan from a file; save the plan and name the file")
    loaded = streams.read_plan(plan)
    written = write_report(
        loaded,
        path=plan,
        name=streams.name_plan(plan),
        profile=profile,
        stats=stats,
        cap=cap,
        output=output,
        force=force,
    )
    if json:
        streams.write(written.to_json() + "\n")
        return
    streams.write("".join(f"{line}\n" for found in written.findings for line in wrap_text(f"- {found.text}")))
    for file in written.files:
        streams.say(f"written: {file}")
