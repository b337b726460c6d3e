"""What a report is made of: a plan, its profile and, where there are some, a run's statistics."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import get_args

from thdprof.analyze.buckets.cost_table import built_in_costs
from thdprof.analyze.profile.merge import same_settings
from thdprof.analyze.profile.run_profile import RunProfile, load_profile
from thdprof.compare.statistics import Comparison, compare, read_stats
from thdprof.errors import DataError
from thdprof.files import read_yaml
from thdprof.plan import Plan, parse_plan
from thdprof.training import Attention, TrainingSettings, definitions_of
from thdprof.words import counted as told

TOLERANCE = 0.01
"""Difference of a share from its prediction up to which the two are called alike, as in `thdprof compare`."""
_MOST_URIS = 5
_FILE = "settings.yaml"
_PAST = 2
"""How many times the largest cap that is known a cap may be: times beyond are a line drawn on."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """Everything that figures are computed from; nothing reads the dataset again."""

    plan: Plan
    profile: RunProfile
    comparison: Comparison | None
    """The plan beside a run's statistics; None where none were given."""

    @property
    def default_cap(self) -> int:
        """The cap that the report opens with: the plan's best single one, else the quickest of the profile."""
        one = self.plan.graphs.one_cap
        if one is not None:
            return one.max_seqs
        return min(self.profile.caps(), key=lambda cap: (cap.step_ms, cap.max_seqs)).max_seqs

    def check_cap(self, cap: object) -> None:
        """Refuse a cap of which nothing was measured.

        Raises:
            ValueError: it is no whole number, less than 1, or so large that its times would be made up.
        """
        if isinstance(cap, bool) or not isinstance(cap, Integral):
            raise ValueError(f"cap {cap!r:.40}: is no whole number; give documents of a micro-batch, 1 or more")
        if int(cap) < 1:
            raise ValueError(f"cap {cap}: is less than 1; give documents of a micro-batch, 1 or more")
        measured = max(point.max_seqs for point in self.profile.costs.replay)
        known = self.profile.caps()[-1].max_seqs
        most = _PAST * max(measured, known)
        if int(cap) > most:
            fullest = self.profile.histogram().percentile(100.0)
            raise ValueError(
                f"cap {cap:,}: past what was measured: graphs were timed up to {told(measured, 'document')}, and no "
                f"micro-batch holds more than {fullest:,}; give at most {most:,}"
            )

    def __repr__(self) -> str:
        """What it is of; the whole shows itself in a notebook."""
        return f"Report of {self.plan.dataset.uris[0]}: {self.profile!r}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_() + self.profile._repr_html_() + self._warnings_html()

    def _warnings_html(self) -> str:
        from html import escape

        told = list(dict.fromkeys(w for part in self.profile.parts for w in part.warnings))
        return "<ul>" + "".join(f"<li>{escape(w)}</li>" for w in told) + "</ul>" if told else ""


def default_profile(plan: Path) -> Path:
    """Where the profile of a plan file is looked for: beside it, as in plan.profile.parquet."""
    return plan.with_name(f"{plan.stem}.profile.parquet")


def open_report(
    plan: str | Path,
    *,
    profile: str | Path | None = None,
    stats: str | Path | None = None,
    plan_name: str | None = None,
) -> Report:
    """Read what a report is made of.

    Args:
        plan: what `analyze -o` wrote.
        profile: what `analyze --profile` or `merge` wrote; None: plan.profile.parquet beside plan.yaml.
        stats: statistics of a run, JSON lines; the last one is read.
        plan_name: the plan in messages; None: its path.

    Raises:
        DataError: a file is missing or wrong, or the profile is not of the plan's data and settings.
    """
    plan = Path(plan)
    name = str(plan) if plan_name is None else plan_name
    loaded = parse_plan(read_yaml(plan, where=name), where=name)
    where = default_profile(plan) if profile is None else Path(profile)
    if not where.exists():
        raise DataError(f"{where}: there is no such profile; make it with: {profile_command(loaded, where)}")
    counted = load_profile(where)
    check_belongs(loaded, counted, plan_name=name, profile_name=str(where))
    comparison = None
    if stats is not None:
        comparison = compare(loaded, read_stats(Path(stats)), tolerance=TOLERANCE, where=str(stats))
    return Report(plan=loaded, profile=counted, comparison=comparison)


def check_belongs(plan: Plan, profile: RunProfile, *, plan_name: str = "plan", profile_name: str = "profile") -> None:
    """Refuse a profile that was not counted from the plan's data, settings and costs.

    Raises:
        DataError: naming what differs.
    """
    remedy = "give the profile that was written with the plan, or analyse again with --profile and -o"
    if plan.dataset.fingerprint not in {f for part in profile.parts for f in part.fingerprints}:
        raise DataError(f"{profile_name}: not of the data of {plan_name} (its fingerprint is not among them): {remedy}")
    differs = same_settings(plan.training, profile.training)
    if differs is not None:
        name, planned, found = differs
        raise DataError(f"{profile_name}: {name} is {found}, but {planned} in {plan_name}: {remedy}")
    if len(profile.parts) == len(profile.parts[0].fingerprints) == 1 and plan.training != profile.training:
        raise DataError(f"{profile_name}: of another length or blend of the run than {plan_name}: {remedy}")
    for name in type(plan.costs).model_fields:
        if getattr(plan.costs, name) != getattr(profile.costs, name):
            raise DataError(
                f"{profile_name}: times are of {profile.costs.name} on {profile.costs.hardware}, those of {plan_name} "
                f"of {plan.costs.name} on {plan.costs.hardware}: {remedy}"
            )


def profile_command(plan: Plan, profile: Path) -> str:
    """The command that counts the plan's data into `profile`."""
    uris = plan.dataset.uris if len(plan.dataset.uris) <= _MOST_URIS else ["DATASET"]
    options, in_a_file = _options(plan.training)
    words = ["thdprof", "analyze", *uris, *options, *(["--settings", _FILE] if in_a_file else []), *_costs(plan)]
    command = shlex.join([*words, "--profile", str(profile)])
    return f"{command} (where {_FILE} holds {{{', '.join(in_a_file)}}})" if in_a_file else command


def _costs(plan: Plan) -> list[str]:
    """The options of `analyze` that take the costs of `plan`."""
    for attention in get_args(Attention):
        built_in = built_in_costs(attention, plan.graph_tokens)
        if all(getattr(built_in, name) == getattr(plan.costs, name) for name in type(plan.costs).model_fields):
            return [] if attention == "transformer_engine" else ["--attention", attention]
    return ["--cost-table", "FILE"]


def _options(training: TrainingSettings) -> tuple[list[str], list[str]]:
    """The options of `analyze` that give `training`, and the lines of a settings file, but for defaults."""
    words, in_a_file = list[str](), list[str]()
    for name, definition in definitions_of(TrainingSettings).items():
        value = getattr(training, name)
        if value is None or value == definition.default:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if not definition.setting.everyday:
            in_a_file.append(f"{name}: {text.lower()}")
        elif definition.type is bool:
            words.append(definition.option if value else definition.off_option)
        else:
            words += [definition.option, text]
    return words, in_a_file
