"""`thdprof pack`: pack a dataset so that graphs are small and steps are even, and write it for a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from thdprof.commands import streams
from thdprof.commands.analyze import check_not_refused
from thdprof.commands.options import (
    Force,
    Json,
    RunOptions,
    dataset_argument,
    output_option,
    pack_option,
    with_settings,
)
from thdprof.errors import UsageError


@with_settings
def pack(
    *,
    datasets: Annotated[
        list[str] | None,
        dataset_argument(help="Files, globs, directories or Megatron prefixes of one dataset.", metavar="DATASET"),
    ] = None,
    run: RunOptions,
    max_docs: Annotated[
        str | None,
        pack_option(
            metavar="<int|auto>",
            help="Most documents of a pack, with the one of an unused tail; auto: the quickest by the model's times.",
            show_default="any number",
        ),
    ] = None,
    window: Annotated[
        int | None,
        pack_option(
            min=0, help="Steps over which packs are balanced; 0 keeps a random order.", show_default="by the data"
        ),
    ] = None,
    to: Annotated[
        Literal["trl", "bridge", "megatron-sft", "index"],
        output_option(help="What is written: rows of a trainer, or an index of documents."),
    ] = "index",
    output: Annotated[Path | None, output_option("-o", "--output", help="File of the packs.")] = None,
    plan: Annotated[Path | None, output_option(help="Write the plan of the packs here.")] = None,
    report: Annotated[Path | None, output_option(help="Write the report page of the packs here (HTML).")] = None,
    dry_run: Annotated[bool, output_option("--dry-run", help="Print the comparison alone; write no packs.")] = False,
    json: Json = False,
    force: Force = False,
) -> None:
    """Pack a dataset anew, compare it with the trainer's own packs, and write it in the order of training."""
    from thdprof.files import check_not_inputs, check_targets, write_text
    from thdprof.pack.repack import plan_packs, repack
    from thdprof.pack.report import print_repacking, to_dict, to_page
    from thdprof.pack.write import explain_reading, metadata_path, write_packs

    cap = _read_cap(max_docs)
    if dry_run and (output, plan, report) != (None, None, None):
        raise UsageError("--dry-run writes no packs; leave out -o, --plan and --report, or --dry-run")
    if output is None and not dry_run:
        raise UsageError("no output named: give -o FILE, or --dry-run for the comparison alone")
    if "-" in map(str, (output, plan, report)):
        raise UsageError("-: packs, plan and report cannot go to stdout; name files")
    if plan is not None and to == "index":
        raise UsageError("--plan: an index is no data that training reads; give --to, or analyze the index")
    beside = None if output is None or to != "bridge" else metadata_path(output)
    outputs = [path for path in (output, beside, plan, report) if path is not None]
    check_targets(outputs, force=force)
    request = run.read_request(datasets)
    run.check_outputs(request, outputs)
    with streams.progress_bar() as progress:
        result, dataset = repack(request, max_docs=cap, window=window, target=to, progress=progress)
        check_not_inputs(outputs, map(Path, dataset.uris))
        if output is not None:
            write_packs(result, dataset, target=to, path=output, progress=progress)
    if json:
        streams.write_json(to_dict(result))
    else:
        then = [] if output is None else explain_reading(result, to, output)
        print_repacking(result, streams.console(stderr=False), then=then)
    if output is not None:
        streams.say(f"packs written to {output}")
    if plan is None and report is None:
        return
    analysis = plan_packs(result, None if to == "index" else output)
    if plan is not None:
        analysis.plan.save(plan, force=force)
        streams.say(f"plan written to {plan}")
    if report is not None:
        write_text(report, to_page(result, analysis), force=force)
        streams.say(f"report written to {report}")
    check_not_refused(analysis.plan)


def _read_cap(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    if text.isascii() and text.isdigit() and 1 <= int(text) < 2**31:
        return int(text)
    raise UsageError(f"--max-docs {text}: give a number from 1 on, or auto")
