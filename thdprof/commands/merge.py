"""`thdprof merge`: join profiles of several datasets or shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.errors import UsageError


def merge(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles of the same settings and costs.", metavar="PROFILE")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile to write (parquet).")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Join the profiles of several datasets or shards; parts with the same name are added up."""
    from thdprof.analyze.profile.run_profile import describe_merged, load_profile, merge_profiles, merged_to_json
    from thdprof.files import check_not_inputs, check_targets

    if str(output) == "-":
        raise UsageError("-o -: a profile cannot go to stdout; name a file (--json prints what it holds)")
    check_not_inputs([output], profiles)
    check_targets([output], force=force)
    merged = merge_profiles([load_profile(path) for path in profiles], names=[str(path) for path in profiles])
    merged.save(output, force=force)
    if json:
        streams.write(merged_to_json(merged) + "\n")
    else:
        streams.write(describe_merged(merged))
        streams.say(f"profile written to {output}")
