"""Analyses one dataset, which is read once, under every combination of values of some options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.analyze.analysis import Progress, Study, check_gpu, read_showing
from thdprof.analyze.buckets.cost_table import load_costs
from thdprof.analyze.planning import make_plan
from thdprof.analyze.predictions import Memory, Times, Verdict, Worth
from thdprof.analyze.schedule.replay import DatasetSummary
from thdprof.analyze.schedule.schedule import Memo
from thdprof.analyze.settings.request import Axis, Request
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.times.ranking import Ranking, Rate, rank, why_unranked
from thdprof.errors import DataError, UsageError
from thdprof.files import check_targets
from thdprof.plan import Plan

if TYPE_CHECKING:
    from thdprof.plan import Impl

_READ_SHARE = 0.1
"""Progress-bar estimate: reading ends at 10% of the total time."""
_SCHEDULE_ANEW = ("seed", "packer", "max_docs_per_pack", "pad_seq_to_mult", "train_samples", "train_iters")
"""Options whose change makes everything in a Memo useless."""
_SAMPLES_ANEW = ("add_extra_token", "seq_length")
"""Options whose change makes everything in a Memo useless but the shuffled sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One value of each swept option, and the plan that they lead to."""

    values: dict[str, Any]
    """The values by the option's name, which has underscores."""
    plan: Plan | None
    """The plan that `analyze` would write; None where the analysis of the combination failed."""
    problem: str | None
    """The error of the analysis; None where there is a plan."""
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
    times: Times | None = None
    verdict: Verdict | None = None
    memory: Memory | None = None
    """These five are the analysis's own; None or empty where it failed."""
    worth: Worth | None = None
    """What the plan is worth over the run; None where tokens per second are not known."""
    rate: Rate | None = None
    """Tokens per second under the plan; None where they are not known."""
    unranked: str | None = None
    """Why they are not known; None where they are, or the analysis failed."""

    @property
    def file_name(self) -> str:
        """Name of the combination's plan file, made of its values."""
        parts = (f"{name.replace('_', '-')}-{_plain(value)}" for name, value in self.values.items())
        return "_".join(parts) + ".yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Everything that `thdprof sweep` reports."""

    dataset: DatasetSummary
    """The dataset that was read."""
    names: tuple[str, ...]
    """Names of the swept options, with underscores."""
    combinations: tuple[Combination, ...]
    """Combinations of all values; the values of the last name vary fastest."""
    notes: tuple[str, ...]
    """Notes from reading the requests, each once."""

    @property
    def any_works(self) -> bool:
        """Whether any combination has a plan."""
        return any(c.plan is not None for c in self.combinations)

    def ranking(self) -> Ranking:
        """The order of the combinations by tokens per second."""
        return rank([c.rate for c in self.combinations], [c.plan is not None for c in self.combinations])


def combinations_of(axes: Sequence[Axis]) -> list[Combination]:
    """Every combination of the axes' values, none of them analysed yet."""
    return [
        Combination(
            values=dict(zip((axis.name for axis in axes), values, strict=True)), plan=None, problem="not analysed"
        )
        for values in product(*(axis.values for axis in axes))
    ]


def sweep(
    axes: Sequence[Axis],
    request_of: Callable[[Mapping[str, Any]], Request],
    *,
    impl: Impl | None = None,
    progress: Progress = lambda stage, done, documents: None,
) -> Sweep:
    """Analyse one dataset under every combination of the axes' values.

    Args:
        axes: the swept options with their values.
        request_of: makes the request from values of the swept options, by name; all requests must name one dataset.
        impl: the kind of graphs that the plans capture; None: the default of `make_plan`.

    Raises:
        DataError: the dataset or a cost table cannot be read.
        UsageError: no combination makes a request, so that nothing could be read.
    """
    requests: list[Request | UsageError] = []
    value_sets = [c.values for c in combinations_of(axes)]
    for values in value_sets:
        try:
            request = request_of(values)
            check_gpu(request)
            requests.append(request)
        except UsageError as error:
            requests.append(error)
    good = [r for r in requests if isinstance(r, Request)]
    if not good:
        raise requests[0] if isinstance(requests[0], UsageError) else UsageError("sweep: names nothing to vary")
    costs = {path: load_costs(path) for path in sorted({r.cost_table for r in good if r.cost_table is not None})}
    first = next(
        (r for r in good if r.given.get("packer") == "none"), good[0]
    )  # it alone needs to know what is trained
    dataset, progress = read_showing(
        first.locations, format=first.format, settings=first.given, cache=first.cache, progress=progress
    )
    varied = [axis.name for axis in axes if len(axis.values) > 1]
    memo, done, share = Memo(), dict[int, Combination](), (1 - _READ_SHARE) / len(value_sets)
    for count, index in enumerate(analysis_order(axes)):
        chosen = requests[index]

        def show(stage: str, part: float, documents: int, low: float = _READ_SHARE + share * count) -> None:
            progress(stage, low + share * part, documents)

        if isinstance(chosen, UsageError):
            done[index] = Combination(values=value_sets[index], plan=None, problem=str(chosen))
        else:
            measured = None if chosen.cost_table is None else costs[chosen.cost_table]
            study = Study(chosen, dataset, measured, impl=impl, progress=show, memo=memo)
            done[index] = _analyze(value_sets[index], study, varied)
    return Sweep(
        dataset=DatasetSummary.summarize(dataset),
        names=tuple(axis.name for axis in axes),
        combinations=tuple(done[index] for index in range(len(value_sets))),
        notes=tuple(dict.fromkeys(note for r in good for note in r.notes)),
    )


def check_plan_files(axes: Sequence[Axis], directory: Path, *, force: bool) -> None:
    """Make the directory for the plans of a sweep, and refuse it before the work if the plans cannot be written there.

    Raises:
        UsageError: `directory` is a file or stdout, or has one of the plans' files and `force` is false.
        DataError: the directory cannot be made.
    """
    if str(directory) == "-":
        raise UsageError("-o -: several plans cannot go to stdout; name a directory, or use --json")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"-o {directory}: is a file; name a directory for the plans")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory}: cannot be made: {error.strerror}") from error
    check_targets([directory / c.file_name for c in combinations_of(axes)], force=force)


def write_plans(sweep: Sweep, directory: Path, *, force: bool) -> list[Path]:
    """Write the plan of every combination that has one, each file whole or not at all, and return their paths.

    Raises:
        DataError: a file exists and `force` is false, or a file cannot be written.
    """
    paths = []
    for combination in sweep.combinations:
        if combination.plan is not None:
            paths.append(directory / combination.file_name)
            combination.plan.save(paths[-1], force=force)
    return paths


def _analyze(values: dict[str, Any], study: Study, varied: Sequence[str]) -> Combination:
    """The combination of `values`, analysed; `varied` are the options that have several values in the sweep."""
    request = study.request
    try:
        result = study.analyze()
        plan = make_plan(result, impl=study.impl, usual=request.usual_impl, layers_per_graph=request.layers_per_graph)
    except (DataError, UsageError) as error:
        return Combination(values=values, plan=None, problem=str(error))
    unranked = why_unranked(result.times, result.costs, n_tokens=result.graph_tokens, varied=varied)
    step_ms = result.recommendation.step_ms
    return Combination(
        values=values,
        plan=plan,
        problem=None,
        **{name: getattr(result, name) for name in ("assumptions", "warnings", "times", "verdict", "memory")},
        worth=None if unranked else result.worth,
        rate=None if unranked else Rate.from_worth(result.worth, result.times, step_ms=step_ms),
        unranked=unranked,
    )


def analysis_order(axes: Sequence[Axis]) -> list[int]:
    """Indices of the combinations, ordered so that combinations that share much work follow one another."""
    places = list(product(*(range(len(axis.values)) for axis in axes)))
    slow = [k for names in (_SCHEDULE_ANEW, _SAMPLES_ANEW) for k, axis in enumerate(axes) if axis.name in names]
    return sorted(range(len(places)), key=lambda index: [places[index][k] for k in slow])


def _plain(value: Any) -> str:
    """`value` as text, in characters that any file system accepts."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(c if c.isascii() and (c.isalnum() or c in ".+-") else "-" for c in text)
