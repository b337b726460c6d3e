"""`thdprof sweep`: analyse one dataset under every combination of values of some settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.options import Force, Json, RunOptions, dataset_argument, output_option, with_settings
from thdprof.errors import UsageError


@with_settings
def sweep(
    *,
    arguments: Annotated[
        list[str] | None,
        dataset_argument(
            help="Files, globs, directories or Megatron prefixes of one dataset; and settings to vary, as in "
            "seq-length=4096,8192 micro-batch-size=1,2.",
            metavar="DATASET|NAME=V1,V2",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Dataset",
            help="A setting to vary, where it should be told from a dataset's name.",
            metavar="NAME=V1,V2",
        ),
    ] = None,
    run: RunOptions,
    output: Annotated[Path | None, output_option("-o", "--output", help="Directory for the plans.")] = None,
    json: Json = False,
    force: Force = False,
) -> None:
    """Compare settings: read the dataset once, and show every combination of their values as a row of one table.

    The settings to vary stand among the datasets, as in

    thdprof sweep dataset/ seq-length=4096,8192 buckets=1,3
    """
    from thdprof.analyze.report.sweep import print_sweep, to_dict
    from thdprof.analyze.sweep import check_plan_files, read_axes, split_arguments, write_plans
    from thdprof.analyze.sweep import sweep as analyze_combinations

    locations, texts = split_arguments(arguments or [])
    axes = read_axes([*(vary or []), *texts], run.given)
    if not axes:
        raise UsageError(
            "sweep: nothing to vary; add settings and their values, as in seq-length=4096,8192; --help tells more"
        )
    if output is not None:
        check_plan_files(axes, output, force=force)
    with streams.progress_bar() as progress:
        result = analyze_combinations(axes, lambda values: run.read_request(locations, values), progress=progress)
    for note in result.notes:
        streams.say(note)
    written = write_plans(result, output, force=force) if output is not None else []
    if json:
        streams.write_json(to_dict(result))
    else:
        print_sweep(result, streams.console(stderr=False))
    for path in written:
        streams.say(f"plan written to {path}")
    if all(combination.plan is None for combination in result.combinations):
        raise UsageError(f"sweep: no combination can be; the first: {result.combinations[0].problem}")
