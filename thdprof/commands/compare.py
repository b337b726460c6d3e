"""`thdprof compare`: hold a run's statistics, or another plan, against a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thdprof.commands import streams
from thdprof.commands.options import JsonOutput, PlanFile
from thdprof.errors import GateError, UsageError

if TYPE_CHECKING:
    from thdprof.plan import Plan


def compare(
    plan: PlanFile,
    other: Annotated[
        Path,
        typer.Argument(
            help="Statistics of a run, JSON lines, of which the last is read; or another plan, which - reads from "
            "stdin.",
            metavar="STATS|PLAN",
        ),
    ],
    tolerance: Annotated[str, typer.Option(help="Largest allowed difference: 0.01 or 1%.")] = "0.01",
    json: JsonOutput = False,
) -> None:
    """Compare a plan with a run's statistics or with another plan; exit with 3 where they differ too much.

    With statistics, the compared values are the share of micro-batches that ran eagerly and the share that replayed
    each bucket. Their differences are held to --tolerance. No verified micro-batch may be a mismatch.

    With another plan, every field that differs is listed. Held to --tolerance are the differences of the fallback
    rates, and the relative changes of the predicted step times and of the percentiles from P50 to max. Other fields
    (dataset, training settings, buckets, slots, costs) are listed only.
    """
    from thdprof.analyze.report.comparison import plan_comparison_to_dict, print_plan_comparison
    from thdprof.analyze.settings.limits import share_of
    from thdprof.compare.plans import compare_plans, kind_of

    allowed = share_of("--tolerance", tolerance)
    if streams.is_stdin(plan) and streams.is_stdin(other):
        raise UsageError("- is given twice, but stdin can be read only once; name a file for one of them")
    first = streams.read_plan(plan)
    if streams.is_stdin(other) or kind_of(other) == "plan":
        result = compare_plans(first, streams.read_plan(other), tolerance=allowed)
        streams.print_gate(result, json=json, to_dict=plan_comparison_to_dict, print_text=print_plan_comparison)
        if not result.holds:
            where = f"{streams.name_plan(plan)} and {streams.name_plan(other)}"
            fields = ", ".join(d.field for d in result.past_tolerance)
            raise GateError(f"{where} differ by more than --tolerance {allowed:.3%}: {fields}")
    else:
        _compare_stats(first, other, allowed, json=json)


def _compare_stats(plan: Plan, stats: Path, allowed: float, *, json: bool) -> None:
    from thdprof.analyze.report.comparison import comparison_to_dict, print_comparison
    from thdprof.compare.statistics import compare as compare_shares
    from thdprof.compare.statistics import read_stats

    result = compare_shares(plan, read_stats(stats), tolerance=allowed, where=str(stats))
    streams.print_gate(result, json=json, to_dict=comparison_to_dict, print_text=print_comparison)
    if result.wrong_numbers is not None:
        raise GateError(
            f"{stats}: {result.wrong_numbers}; go back to the checkpoint that the run's log names, train on from it "
            "without replays (--replay off, or replay=False), and report the log's lines"
        )
    if result.of_this_plan is False:
        raise GateError(f"{stats}: counts a run by another plan: other data, settings or buckets")
    if result.nothing_replayed:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in result.other_fallbacks.items())
        raise GateError(f"{stats}: the run replayed nothing ({reasons}): compare a run whose graphs were captured")
    if not result.holds:
        raise GateError(
            f"{stats}: a share differs from the plan's by {result.largest_difference:.3%}, more than --tolerance "
            f"{allowed:.3%}: analyse the data and settings that were trained on"
        )
