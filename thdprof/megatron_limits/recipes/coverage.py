"""How many recipes could train by a plan: each one's verdict, by the table of limits and what GPU rows proved."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thdprof.megatron_limits.limit import Limit
from thdprof.megatron_limits.proved import PROVED
from thdprof.megatron_limits.recipes.evaluator import Evaluator
from thdprof.megatron_limits.recipes.find import recipes_of
from thdprof.megatron_limits.recipes.modules import Modules
from thdprof.megatron_limits.recipes.settled import Settled, settled
from thdprof.megatron_limits.recipes.values import Function, Settings
from thdprof.megatron_limits.served import REPLACED, settings_of
from thdprof.megatron_limits.table import LIMITS

Kind = Literal["refused", "accepted unmeasured", "proved"]
_PRECISIONS = "training/mixed_precision.py"
_FINE_TUNING = ("_sft_", "_peft_")
HOPPER = ("h100", "h200")
"""Types of GPUs, as recipes name them, of the architecture of the H200s that the rows of `proved` ran on. No recipe for
another type is proved.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the table says of one recipe."""

    name: str
    """The recipe's function."""
    gpu: str
    """The type of GPU that the recipe is for, such as h100; empty where its name tells none."""
    fine_tuning: bool
    """Whether it fine-tunes, on a packed dataset."""
    refusals: Mapping[str, str]
    """By the name of each limit that the recipe meets: the line that `install` would say."""
    settings: Mapping[str, tuple[str, ...]]
    """The settings that the recipe uses, each with the GPU rows that prove it; none where nothing was measured."""
    replaced: tuple[str, ...]
    """Fields that choose Megatron's own graphs: by a plan its graphs take their place."""
    unknown: tuple[str, ...]
    """What the package's text does not tell: fields with values out of files, or a model of no known family."""

    @property
    def kind(self) -> Kind:
        """Whether the recipe is refused, accepted, or proved: a GPU row covers each of its settings, and the recipe is
        for GPUs of the same architecture.
        """
        if self.refusals:
            return "refused"
        proved = all(self.settings.values()) and not self.unknown and self.is_for_hopper
        return "proved" if proved else "accepted unmeasured"

    @property
    def is_for_hopper(self) -> bool:
        """Whether the recipe is for GPUs of the architecture that rows ran on."""
        return self.gpu in HOPPER

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The settings without a GPU row."""
        return tuple(name for name, rows in self.settings.items() if not rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The verdicts on all recipes of a package."""

    bridge: Path
    """The package's folder."""
    verdicts: tuple[Verdict, ...]
    """One for each recipe, in the order of their names."""

    def of_gpu(self, gpu: str) -> tuple[Verdict, ...]:
        """The verdicts on recipes for one type of GPU."""
        return tuple(verdict for verdict in self.verdicts if verdict.gpu == gpu)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The types of GPUs, by name."""
        return tuple(sorted({verdict.gpu for verdict in self.verdicts}))

    @property
    def fine_tuning(self) -> tuple[Verdict, ...]:
        """The verdicts on recipes that fine-tune."""
        return tuple(verdict for verdict in self.verdicts if verdict.fine_tuning)


def counts(verdicts: Sequence[Verdict]) -> dict[Kind, int]:
    """How many recipes are refused, accepted unmeasured and proved."""
    found = Counter(verdict.kind for verdict in verdicts)
    kinds: tuple[Kind, ...] = ("refused", "accepted unmeasured", "proved")
    return {kind: found[kind] for kind in kinds}


def reasons(verdicts: Sequence[Verdict]) -> list[tuple[str, int, int]]:
    """For every limit that refuses recipes: its name, how many meet it, and how many meet it alone; the most first."""
    met = Counter(name for verdict in verdicts for name in verdict.refusals)
    alone = Counter(next(iter(verdict.refusals)) for verdict in verdicts if len(verdict.refusals) == 1)
    return [(name, number, alone[name]) for name, number in met.most_common()]


def missing(verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    """The settings that keep accepted recipes from being proved, and how many recipes use each; the most first."""
    accepted = [verdict for verdict in verdicts if not verdict.refusals]
    return Counter(name for verdict in accepted for name in (*verdict.unmeasured, *verdict.unknown)).most_common()


def coverage_of(
    root: Path,
    *,
    limits: Sequence[Limit] = LIMITS,
    proved: Mapping[str, tuple[str, ...]] = PROVED,
) -> Coverage:
    """The verdicts on the performance recipes of a Megatron-Bridge. None of its modules is run.

    Args:
        root: the folder of the package `megatron.bridge`.
        limits: the table to judge by.
        proved: rows by the names of settings.

    Raises:
        DataError: a file cannot be read, or there are no recipes.
    """
    modules = Modules(root)
    found = {}
    for name, function in recipes_of(root, modules):
        recipe = Evaluator(modules).call(function, [], {})
        if isinstance(recipe, Settings):
            of_run = settled(recipe, _precision(recipe, root, modules))
            found[name] = _verdict(name, of_run, limits, proved)
        else:
            found[name] = _unreadable(name)
    return Coverage(bridge=root, verdicts=tuple(found[name] for name in sorted(found)))


def _precision(recipe: Settings, root: Path, modules: Modules) -> Settings | None:
    """The precision that a recipe names; None where it holds one itself."""
    name = recipe.values.get("mixed_precision")
    if not isinstance(name, str):
        return None
    function = Evaluator(modules).of_module(root / _PRECISIONS, name)
    made = Evaluator(modules).call(function, [], {}) if isinstance(function, Function) else None
    return made if isinstance(made, Settings) else Settings("", {"mixed_precision": name})


def _verdict(name: str, recipe: Settled, limits: Sequence[Limit], proved: Mapping[str, tuple[str, ...]]) -> Verdict:
    run, given = recipe.run, recipe.given
    unknown = [*recipe.unknown] if recipe.known_model else ["the model", *recipe.unknown]
    return Verdict(
        name=name,
        gpu=_gpu(name),
        fine_tuning=any(word in name for word in _FINE_TUNING),
        refusals={limit.name: limit.in_fields(run) for limit in limits if limit.holds(run)},
        settings={setting: proved.get(setting, ()) for setting in settings_of(run, given)},
        replaced=tuple(key for key, value in given.items() if key.startswith(REPLACED) and value not in (None, "none")),
        unknown=tuple(unknown),
    )


def _unreadable(name: str) -> Verdict:
    return Verdict(
        name=name,
        gpu=_gpu(name),
        fine_tuning=any(word in name for word in _FINE_TUNING),
        refusals={},
        settings={},
        replaced=(),
        unknown=("the recipe's text makes no configuration",),
    )


def _gpu(name: str) -> str:
    """The part of a recipe's name behind the number of GPUs."""
    parts = name.split("_")
    return next((after for part, after in itertools.pairwise(parts) if part.endswith("gpu")), "")
