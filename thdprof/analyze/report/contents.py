"""The inputs of a report: a plan, its profile and, where they are given, a run's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from numbers import Integral
from pathlib import Path

from thdprof.analyze.buckets.statistics import PERCENTILES
from thdprof.analyze.predictions import Range, Times
from thdprof.analyze.profile.run_profile import RunProfile, check_alike, load_profile
from thdprof.compare.statistics import Comparison, compare, read_stats
from thdprof.errors import DataError
from thdprof.plan import Plan, load_plan
from thdprof.words import write_count

HOW_TO_GET_TIMES = (
    "times are not known: analyse again and say which model trains on which GPU (--model or --megatron-args, and "
    "--gpu), or measure it with thdprof calibrate and give --cost-table"
)
TIMES_OF_ONE_RUN = (
    "this profile joins several runs, and modelled times are of one run alone: make the report of each for its times"
)
TOLERANCE = 0.01
"""Largest difference of a share from its prediction that counts as agreement, as in `thdprof compare`."""
_MOST_EXTRAPOLATION = 2
"""Largest cap of a report, as a multiple of the largest known one: step times beyond are extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """Everything that figures are computed from; no figure reads the dataset again."""

    plan: Plan
    """The plan that is reported on."""
    profile: RunProfile
    """The micro-batch counts of the plan's data and settings, and of joined data."""
    comparison: Comparison | None
    """The plan's predictions beside a run's statistics; None where no statistics were given."""

    @property
    def recommended_cap(self) -> int | None:
        """The single cap, in documents, that the plan recommends; None where it recommends none."""
        one = self.plan.graphs.one_cap
        return None if one is None else one.max_seqs

    @property
    def default_cap(self) -> int:
        """The cap, in documents, that the report opens with: the recommended one, else P99 of the micro-batches."""
        if self.recommended_cap is not None:
            return self.recommended_cap
        return max(1, self.profile.histogram().percentile(PERCENTILES["p99"]))

    @property
    def times(self) -> Times:
        """Times of the user's own model and where they come from, of the plan's own data; origin "none" without."""
        predicted, costs = self.profile.predicted, self.profile.costs
        if predicted is not None and predicted.times.origin != "none":
            return predicted.times
        if costs.origin == "measured":
            return self.plan.predictions.times
        if self.profile.num_runs > 1 and costs.origin == "modelled":
            return Times(origin="none", basis=TIMES_OF_ONE_RUN)
        return Times(origin="none", basis=HOW_TO_GET_TIMES if predicted is None else predicted.times.basis)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the analyses, each once."""
        return list(dict.fromkeys(text for part in self.profile.parts for text in part.warnings))

    def relative_step_times(self, caps: Sequence[int]) -> list[Range] | None:
        """The range of the relative step time under each single cap; None without times of the user's own model."""
        return None if self.times.origin == "none" else self.profile.relative_step_times(caps)

    def check_cap(self, cap: object) -> None:
        """Refuse a cap, in documents, whose step time cannot be estimated from measured times.

        Raises:
            ValueError: `cap` is no whole number, is less than 1, or is so far above all measured caps that its step
                time would be a guess.
        """
        if isinstance(cap, bool) or not isinstance(cap, Integral):
            raise ValueError(f"cap {cap!r:.40}: is no whole number; give documents of a micro-batch, 1 or more")
        if int(cap) < 1:
            raise ValueError(f"cap {cap}: is less than 1; give documents of a micro-batch, 1 or more")
        measured = max(point.max_seqs for point in self.profile.costs.replay)
        known = max(self.profile.caps())
        most = _MOST_EXTRAPOLATION * max(measured, known)
        if int(cap) > most:
            fullest = self.profile.histogram().percentile(100.0)
            raise ValueError(
                f"cap {cap:,}: past what was measured: graphs were timed up to {write_count(measured, 'document')}, "
                f"and no micro-batch holds more than {fullest:,}; give at most {most:,}"
            )

    def __repr__(self) -> str:
        return f"Report of {self.plan.dataset.uris[0]}: {self.profile!r}"

    def _repr_html_(self) -> str:
        listed = "".join(f"<li>{escape(text)}</li>" for text in self.warnings)
        return self.plan._repr_html_() + self.profile._repr_html_() + (f"<ul>{listed}</ul>" if listed else "")


def default_profile(plan: Path) -> Path:
    """The path at which the profile of a plan file is expected: plan.profile.parquet beside plan.yaml."""
    return plan.with_name(f"{plan.stem}.profile.parquet")


def open_report(
    plan: str | Path,
    *,
    profile: str | Path | None = None,
    stats: str | Path | None = None,
) -> Report:
    """Read the files that a report is made of.

    Args:
        plan: path of a plan that `analyze -o` wrote.
        profile: path of a profile that `analyze --profile` or `merge` wrote; None: plan.profile.parquet beside
            plan.yaml.
        stats: path of a run's statistics, JSON lines of which the last is read; None: no statistics.

    Raises:
        DataError: a file is missing or wrong, or the profile was not counted from the plan's data and settings.
    """
    path = default_profile(Path(plan)) if profile is None else Path(profile)
    return make_report(load_plan(plan), name=str(plan), profile=path, stats=None if stats is None else Path(stats))


def make_report(plan: Plan, *, name: str, profile: Path, stats: Path | None) -> Report:
    """The report of a plan, which messages call `name`, with its profile and a run's statistics, as `open_report`."""
    if not profile.exists():
        raise DataError(
            f"{profile}: there is no such profile; analyse again as for {name}, with --profile {profile} --force"
        )
    counts = load_profile(profile)
    check_belongs(plan, counts, plan_name=name, profile_name=str(profile))
    comparison = None
    if stats is not None:
        comparison = compare(plan, read_stats(stats), tolerance=TOLERANCE, where=str(stats))
    return Report(plan=plan, profile=counts, comparison=comparison)


def check_belongs(plan: Plan, profile: RunProfile, *, plan_name: str = "plan", profile_name: str = "profile") -> None:
    """Refuse a profile that was not counted from the plan's data, settings and costs.

    Raises:
        DataError: the data, a setting or the costs differ; the message names the difference.
    """
    remedy = "give the profile that was written with the plan, or analyse again with --profile and -o"
    if plan.dataset.fingerprint not in {f for part in profile.parts for f in part.fingerprints}:
        raise DataError(f"{profile_name}: not of the data of {plan_name} (its fingerprint is not among them): {remedy}")
    check_alike(plan, profile, name=plan_name, other_name=profile_name, remedy=remedy)
    if len(profile.parts) == len(profile.parts[0].fingerprints) == 1 and plan.training != profile.training:
        raise DataError(f"{profile_name}: of another length or blend of the run than {plan_name}: {remedy}")
