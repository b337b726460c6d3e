"""`thdprof export`: turn a plan into the flags or overrides of a training system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.options import Overwrite, PlanFile
from thdprof.errors import UsageError
from thdprof.training.systems import EXPORTS

_TARGETS = f"Target: {', '.join([*EXPORTS][:-1])} or {[*EXPORTS][-1]}."


def export(
    plan: PlanFile,
    to: Annotated[str, typer.Option(help=_TARGETS)],
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Export this cap instead of the plan's.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Directory for the target's files; stdout without it.")
    ] = None,
    force: Overwrite = False,
) -> None:
    """Turn a plan into the flags or overrides of a training system."""
    from thdprof.analyze.export import export_plan
    from thdprof.files import check_targets, write_text
    from thdprof.systems import find_target

    exported = export_plan(streams.read_plan(plan), to, max_seqs=max_seqs)
    if output is None:
        streams.write(exported.text)
        if exported.extra_files:
            names = ", ".join(exported.extra_files)
            streams.say(f"-o DIRECTORY writes this and {names}")
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output}: is a file; name a directory for the target's files")
    files = {find_target(to).main_file: exported.text, **exported.extra_files}
    output.mkdir(parents=True, exist_ok=True)
    check_targets([output / name for name in files], force=force)
    for name, text in files.items():
        write_text(output / name, text, force=force)
        streams.say(f"written: {output / name}")
