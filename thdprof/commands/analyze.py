"""`thdprof analyze`: predict the micro-batches of a run, recommend graphs, write the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from thdprof.commands import streams
from thdprof.commands.options import Datasets, Force, Json, RunOptions, capture_option, output_option, with_settings
from thdprof.errors import GateError, UsageError

if TYPE_CHECKING:
    from thdprof.analyze.settings.request import Request
    from thdprof.plan import Plan


@with_settings
def analyze(
    *,
    datasets: Datasets = None,
    run: RunOptions,
    offload: Annotated[
        str | None, capture_option(help="Activations to keep on the host: all, or modules such as core_attn,mlp_act.")
    ] = None,
    offload_fraction: Annotated[str | None, capture_option(help="Share of them: 0.5 or 50%.", show_default="1")] = None,
    output: Annotated[Path | None, output_option("-o", "--output", help="Plan file; - for stdout.")] = None,
    profile: Annotated[
        Path | None, output_option(help="Write the profile that report and merge read here (parquet).")
    ] = None,
    part: Annotated[
        str | None, output_option(help="Name of the data in the profile.", show_default="its file or directory")
    ] = None,
    microbatches: Annotated[Path | None, output_option(help="Write the micro-batch table here (parquet).")] = None,
    json: Json = False,
    details: Annotated[bool, output_option("--details", help="Say all that is known, not the answer alone.")] = False,
    force: Force = False,
) -> None:
    """Predict the micro-batches of a run and recommend which graphs to capture.

    Exits with 3, the plan written all the same, where training by the plan would be refused.
    """
    from thdprof.analyze.alternatives import analyze_with_alternatives
    from thdprof.analyze.analysis import open_study
    from thdprof.analyze.planning import add_plan
    from thdprof.analyze.report.analysis import print_report, to_dict
    from thdprof.analyze.settings.captures import read_choice
    from thdprof.analyze.settings.limits import share_of
    from thdprof.files import check_not_inputs, check_targets
    from thdprof.training.stamp import compare_with_installed

    to_stdout = str(output) == "-"
    file = None if to_stdout else output
    if json and to_stdout:
        raise UsageError("--json and -o - both print on stdout; give one")
    if part is not None and profile is None:
        raise UsageError(f"--part {part}: names the data in a profile; give --profile too")
    for option, table in (("--microbatches", microbatches), ("--profile", profile)):
        if str(table) == "-":
            raise UsageError(f"{option} -: a parquet table cannot go to stdout; name a file")
    if profile is not None:
        from thdprof.analyze.profile.run_profile import check_part, make_profile

        check_part(part)
    outputs = [path for path in (file, microbatches, profile) if path is not None]
    check_targets(outputs, force=force)
    share = None if offload_fraction is None else share_of("--offload-fraction", offload_fraction)
    choice = read_choice(offload, share)
    request = run.read_request(datasets, offload=choice)
    _check_captures(request)
    run.check_outputs(request, outputs)
    with streams.progress_bar() as progress:
        analysis = add_plan(analyze_with_alternatives(open_study(request, progress=progress)))
        check_not_inputs(outputs, map(Path, analysis.dataset.uris))
        if microbatches is not None:
            progress("writing the table", 1.0, 0)
            analysis.microbatches.write_parquet(microbatches)
        if profile is not None:
            progress("writing the profile", 1.0, 0)
            make_profile(analysis, part=part).save(profile, force=force)
    if choice is not None and analysis.offload is None:
        streams.say("--offload: no graphs are recommended, so nothing is moved to the host")
    plan, unknown = analysis.plan, analysis.unknown_refusals
    if unknown is not None:
        streams.say(f"which settings of the script training by this plan would refuse is not known: {unknown}")
    if (other := compare_with_installed(plan.costs.stamp, gpu=analysis.gpu)) is not None:
        streams.say(other)
    if to_stdout:
        streams.write(plan.to_yaml())
    elif file is not None:
        plan.save(file, force=force)
    if json:
        streams.write_json(to_dict(analysis))
    else:
        then = _next_command(request, file, experts=plan.training.experts != "none") if plan.captured else ""
        print_report(analysis, streams.console(stderr=to_stdout), then=then, details=details)
        for name, written in (("plan", file), ("profile", profile)):
            if written is not None:
                streams.say(f"{name} written to {written}")
    check_not_refused(plan)


def check_not_refused(plan: Plan) -> None:
    """Fail where training by the plan would be refused.

    Raises:
        GateError: it would be, as far as the run's settings tell.
    """
    refused = plan.predictions.refused
    if refused:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise GateError(f"training by this plan would be refused: {refused[0]}{more}")


def _next_command(request: Request, plan: Path | None, *, experts: bool) -> str:
    if plan is None:
        return "the same with -o plan.yaml, which writes the plan"

    from thdprof.analyze.report.shared import training_command

    of_trainer, of_script = request.is_of_trainer, request.script is not None
    found = training_command(plan, of_trainer=of_trainer, of_script=of_script, experts=experts)
    return found if of_trainer or of_script else f"{found}; with --profile FILE, thdprof report shows it"


def _check_captures(request: Request) -> None:
    """Refuse, before the work and not after it, what training could not capture or move to the host."""
    from thdprof.analyze.settings.captures import note_core_offload, note_idle_modules

    captures, choice = request.captures, request.offload
    captures.check(choice, pipeline_parallel_size=request.given.get("pipeline_parallel_size"))  # the plan checks all
    if choice is not None:
        for note in (note_idle_modules(choice, captures.experts), note_core_offload(captures.impl, captures.experts)):
            if note is not None:
                streams.say(note)
