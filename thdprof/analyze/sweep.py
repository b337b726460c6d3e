"""Analyses one dataset, which is read once, under every combination of the values of some settings, and ranks them.

Plans are ranked by tokens per second, or per second and GPU where their GPUs differ in number.
"""

from __future__ import annotations

import functools
import glob
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from thdprof.analyze.analysis import Progress, Study, read_requested
from thdprof.analyze.buckets.cost_table import CostTable, load_costs
from thdprof.analyze.caveats import find_gpu_memory
from thdprof.analyze.planning import add_plan
from thdprof.analyze.predictions import Memory, Times, Verdict, Worth
from thdprof.analyze.replay import summarize_dataset
from thdprof.analyze.settings.request import Request, read_option
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.settings.settings_file import advise_name, list_settings, read_name
from thdprof.errors import DataError, UsageError
from thdprof.files import check_targets
from thdprof.plan import DatasetPart, Plan
from thdprof.schedule.schedule import Memo
from thdprof.training import Definition, definitions, model_definitions
from thdprof.training.model import read_field
from thdprof.words import memory_size

_READ_SHARE = 0.1
"""Progress-bar estimate: reading ends at 10% of the total time."""
_SCHEDULE_ANEW = ("seed", "packer", "max_docs_per_pack", "pad_seq_to_mult", "train_samples", "train_iters")
"""Options whose change makes everything in a Memo useless."""
_SAMPLES_ANEW = ("add_extra_token", "seq_length")
"""Options whose change makes everything in a Memo useless but the shuffled sequences."""
_LIKE_TOKENS = 0.05
"""Share by which micro-batches may have more or fewer tokens than those that a cost table was measured on."""
_OF_A_STAGE = ("model", "pipeline_parallel_size", "virtual_pipeline_size", "context_parallel_size")
"""Settings, beside those of the model, by which a rank's share of the layers and tokens changes."""
_MOST = 256
"""Most combinations of a sweep."""
_BETWEEN = re.compile(r"\s+(?=[A-Za-z-][A-Za-z0-9-]*=)")
_TOKEN = re.compile(r"(?:--)?([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)

Measure = Literal["tokens_per_second", "tokens_per_second_per_gpu"]
"""What plans are ranked by: the rate of the whole run, or that rate divided by the run's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting and the values that it takes."""

    name: str
    """The name of the setting, written with underscores."""
    values: tuple[Any, ...]
    """The values as a settings file would hold them: at least one, and none of them twice."""

    @property
    def flag(self) -> str:
        """The option's name on the command line, without dashes before it."""
        return self.name.replace("_", "-")


@functools.cache
def swept_settings() -> Mapping[str, Definition]:
    """The settings that can be varied, by name: those whose values hold no comma, and do not say how files are read."""
    return {name: d for name, d in list_settings().items() if d.setting.swept}


def split_arguments(datasets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The datasets among a sweep's positional arguments, and the arguments of the form name=value,... to vary.

    A file whose name has that form is a dataset, unless the name is a setting's.
    """
    found: tuple[list[str], list[str]] = [], []
    for text in datasets:
        match = _TOKEN.fullmatch(text)
        varied = match is not None and (read_name(match[1]) in swept_settings() or not _is_there(text))
        found[varied].append(text)
    return found


def _is_there(location: str) -> bool:
    return Path(location).exists() or Path(f"{location}.idx").exists() or bool(glob.glob(location))


def read_axes(texts: Sequence[str], given: Mapping[str, Any]) -> list[Axis]:
    """The axes that `texts` of the form name=v1,v2 name, several to a text where spaces separate them.

    `given` maps the command's other options, which cannot be varied too, to values; None counts as not given.

    Raises:
        UsageError: naming the text, name or value that cannot be.
    """
    axes: list[Axis] = []
    for text in (part for whole in texts for part in _BETWEEN.split(whole.strip())):
        axis = _axis(text)
        if given.get(axis.name) is not None:
            raise UsageError(f"{text}: {swept_settings()[axis.name].describe()} is given too; give it once")
        if any(axis.name == other.name for other in axes):
            raise UsageError(f"{text}: {axis.flag} is varied already; give all its values at once")
        axes.append(axis)
    if (count := math.prod(len(axis.values) for axis in axes)) > _MOST:
        raise UsageError(f"{count:,} combinations to analyse; at most {_MOST} are analysed at once")
    return axes


def _axis(text: str) -> Axis:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise UsageError(f"--vary {text}: must be name=value,value as in seq-length=4096,8192")
    name = read_name(match[1])
    if name not in swept_settings():
        if name in list_settings():
            raise UsageError(
                f"{text}: {match[1]} cannot be varied; give it as an option or in --settings, and vary others"
            )
        advice = advise_name(name, swept_settings(), "settings stand in `thdprof analyze --help`").replace("_", "-")
        raise UsageError(f"{text}: {match[1]} cannot be varied, since it is no setting; {advice}")
    values: list[Any] = []
    for part in match[2].split(","):
        value = _value(name, part)
        try:
            if name in definitions():
                definitions()[name].check(value)
            elif name in model_definitions():
                read_field(name, value)
            else:
                read_option(name, value)
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from error
        if value in values:
            raise UsageError(f"{text}: {part} is there twice")
        values.append(value)
    return Axis(name=name, values=tuple(values))


def _value(name: str, text: str) -> Any:
    """`text` as the value that a settings file would hold; a text of another kind than the setting's stays text."""
    if text == "":
        raise UsageError(f"{name.replace('_', '-')}: a value is empty; give name=value,value")
    setting = swept_settings()[name]
    if setting.type is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if setting.type is float and not setting.setting.as_text:
        try:
            return float(text)
        except ValueError:
            return text
    return int(text) if setting.type is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens of documents that a run trains on per second, over all its GPUs. All plans of a comparison run on the same
    hosts, so that the same ends of their ranges are compared."""

    gpus: int
    """GPUs of the run."""
    low: float
    """The rate on the slowest host that is expected."""
    middle: float
    """The rate on a host in the middle of the range."""
    high: float
    """The rate on the quickest host that is expected."""

    @classmethod
    def from_worth(cls, worth: Worth | None, times: Times, *, step_ms: float | None) -> Rate | None:
        """The rate of a plan; `step_ms` is its mean step on a host in the middle of the range. None without times."""
        if worth is None or times.step_ms is None or step_ms is None:
            return None
        low, high = worth.tokens_per_second
        return cls(gpus=worth.gpus, low=low, middle=high * times.step_ms[0] / step_ms, high=high)

    def per_gpu(self) -> Rate:
        """The rate of one of the GPUs."""
        return Rate(gpus=1, low=self.low / self.gpus, middle=self.middle / self.gpus, high=self.high / self.gpus)


def explain_unranked(times: Times, costs: CostTable, *, n_tokens: int, varied: Sequence[str]) -> str | None:
    """Why a plan cannot be compared with others by its tokens per second; None where it can.

    A measured table is of one model, one stage and one number of tokens: its milliseconds say nothing of others.

    Args:
        n_tokens: tokens of a graph's micro-batches on one context-parallel rank.
    """
    if times.origin == "none":
        return times.basis
    if times.origin == "modelled":
        return None
    other = [name.replace("_", "-") for name in varied if name in model_definitions() or name in _OF_A_STAGE]
    if other:
        return (
            f"a cost table has the times of one model on one rank, and {' and '.join(other)} "
            f"{'varies' if len(other) == 1 else 'vary'}: without --cost-table times are modelled"
        )
    if abs(n_tokens - costs.n_tokens) > _LIKE_TOKENS * costs.n_tokens:
        return (
            f"the cost table has the times of {costs.n_tokens:,} tokens on a rank, and micro-batches have "
            f"{n_tokens:,}: measure a table of as many, or leave --cost-table out for modelled times"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The order of plans, the quickest first. Plans are named by their places in what was ranked."""

    measure: Measure | None
    """What they are ranked by; None where none has times, and their given order stays."""
    order: tuple[int, ...]
    """All plans: those with times by rank, those without in their given order, and at last those that failed."""
    ranks: tuple[int | None, ...]
    """The rank of every plan, from 1, in their given order; None without times."""
    first_on_slow_host: int | None = None
    """The plan that is quickest on the slowest host that is expected; None where none has times."""
    first_on_quick_host: int | None = None
    """The plan that is quickest on the quickest host."""


def rank(rates: Sequence[Rate | None], works: Sequence[bool]) -> Ranking:
    """Rank plans by their rates on a host in the middle of the range; of equal ones the first given comes first.

    Args:
        rates: the rate of every plan; None without times.
    """
    timed = {place: rate for place, rate in enumerate(rates) if rate is not None}
    if not timed:
        return Ranking(measure=None, order=tuple(range(len(rates))), ranks=(None,) * len(rates))
    same_gpus = len({rate.gpus for rate in timed.values()}) == 1
    compared = timed if same_gpus else {place: rate.per_gpu() for place, rate in timed.items()}
    ranked = _quickest_first(compared, lambda rate: rate.middle)
    untimed = [place for place in range(len(rates)) if place not in compared]
    ranks = {place: number for number, place in enumerate(ranked, start=1)}
    return Ranking(
        measure="tokens_per_second" if same_gpus else "tokens_per_second_per_gpu",
        order=(*ranked, *(p for p in untimed if works[p]), *(p for p in untimed if not works[p])),
        ranks=tuple(ranks.get(place) for place in range(len(rates))),
        first_on_slow_host=_quickest_first(compared, lambda rate: rate.low)[0],
        first_on_quick_host=_quickest_first(compared, lambda rate: rate.high)[0],
    )


def _quickest_first(rates: dict[int, Rate], value: Callable[[Rate], float]) -> list[int]:
    return sorted(rates, key=lambda place: -value(rates[place]))


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

    memory_gib: int | None = None
    """Memory of the GPU that times are of, in GiB; None where it is not known."""

    @property
    def blocked(self) -> str | None:
        """Why no run can train by the plan: what would be refused, or more memory than the GPU has; None where nothing
        is known against it.
        """
        if self.plan is not None and self.plan.predictions.refused:
            first, *others = self.plan.predictions.refused
            return f"refused: {first}" + (f" and {len(others)} more" if others else "")
        if self.memory is not None and self.memory_gib is not None and self.memory.peak_bytes > self.memory_gib * 2**30:
            return f"needs {memory_size(self.memory.peak_bytes / 2**30)} of the GPU's {self.memory_gib} GiB"
        return None

    @property
    def file_name(self) -> str:
        """Name of the combination's plan file, made of its values."""
        parts = (f"{name.replace('_', '-')}-{_plain(value)}" for name, value in self.values.items())
        return "_".join(parts) + ".yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Everything that `thdprof sweep` reports."""

    dataset: DatasetPart
    """The dataset that was read."""
    names: tuple[str, ...]
    """Names of the swept options, with underscores."""
    combinations: tuple[Combination, ...]
    """Combinations of all values; the values of the last name vary fastest."""
    notes: tuple[str, ...]
    """Notes from reading the requests, each once."""

    def ranking(self) -> Ranking:
        """The order of the combinations by tokens per second; those that no run can train by go last, and have no rank
        where there are others.
        """
        can_train = [c.plan is not None and c.blocked is None for c in self.combinations]
        if not any(can_train):
            can_train = [c.plan is not None for c in self.combinations]
        pairs = zip(self.combinations, can_train, strict=True)
        return rank([c.rate if trains else None for c, trains in pairs], can_train)


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
    progress: Progress = lambda stage, done, documents: None,
) -> Sweep:
    """Analyse one dataset under every combination of the axes' values.

    Args:
        request_of: makes the request from values of the swept options, by name; all requests must name one dataset.

    Raises:
        DataError: the dataset or a cost table cannot be read.
        UsageError: no combination makes a request, so that nothing could be read.
    """
    combinations, requests, errors = combinations_of(axes), dict[int, Request](), list[UsageError]()
    for index, combination in enumerate(combinations):
        try:
            requests[index] = request_of(combination.values)
        except UsageError as error:
            errors.append(error)
            combinations[index] = replace(combination, problem=str(error))
    good = [*requests.values()]
    if not good:
        raise errors[0]
    costs = {path: load_costs(path) for path in sorted({r.cost_table for r in good if r.cost_table is not None})}
    first = next(
        (r for r in good if r.given.get("packer") == "none"), good[0]
    )  # it alone needs to know what is trained
    dataset, progress = read_requested(first, progress)
    varied = [axis.name for axis in axes if len(axis.values) > 1]
    memo, share = Memo(), (1 - _READ_SHARE) / len(good)
    for count, index in enumerate(filter(requests.__contains__, analysis_order(axes))):

        def show(stage: str, part: float, documents: int, low: float = _READ_SHARE + share * count) -> None:
            progress(stage, low + share * part, documents)

        chosen = requests[index]
        measured = None if chosen.cost_table is None else costs[chosen.cost_table]
        study = Study(chosen, dataset, measured, progress=show, memo=memo)
        combinations[index] = _analyze(combinations[index].values, study, varied)
    return Sweep(
        dataset=summarize_dataset(dataset),
        names=tuple(axis.name for axis in axes),
        combinations=tuple(combinations),
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
    try:
        result = add_plan(study.analyze())
        plan = result.plan
    except (DataError, UsageError) as error:
        return Combination(values=values, plan=None, problem=str(error))
    unranked = explain_unranked(result.times, result.costs, n_tokens=result.graph_tokens, varied=varied)
    step_ms = result.recommendation.step_ms
    return Combination(
        values=values,
        plan=plan,
        problem=None,
        **{name: getattr(result, name) for name in ("assumptions", "warnings", "times", "verdict", "memory")},
        worth=None if unranked else result.worth,
        rate=None if unranked else Rate.from_worth(result.worth, result.times, step_ms=step_ms),
        unranked=unranked,
        memory_gib=find_gpu_memory(result.gpu),
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
