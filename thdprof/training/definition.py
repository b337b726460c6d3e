"""What a setting is: its type, its bounds, and how it is given, read from the annotation of one field.

Nothing in here imports pydantic, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

from thdprof.errors import UsageError

Kind = Literal["streams", "bridge", "trl", "packs", "documents", "conversations"]
"""What a dataset holds: sequences that GPTDataset joins, rows packed by Megatron-Bridge, by TRL or by somebody else,
documents that are not packed yet, or conversations that Megatron-LM's SFTDataset packs while training."""
Panel = Literal[
    "Dataset",
    "Batch and parallelism",
    "Model",
    "Data loader",
    "Packing and padding",
    "Where settings come from",
    "Costs and limits",
    "What to capture",
    "Output",
]
"""Headings under which `--help` lists options, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a setting is given, and when it matters: the facts that its type does not tell."""

    help: str
    """Help text of the option."""
    panel: Panel
    """Heading of the option in `--help`."""
    everyday: bool = True
    """Whether the command has an option for the setting; without one it is given in a settings file."""
    assumed: str | None = None
    """The help text's words for the value that is taken where none is given; None: the default itself."""
    kinds: tuple[Kind, ...] | None = None
    """Kinds of dataset on which the setting has an effect; None: all."""
    in_every_plan: bool = True
    """Whether a plan without the setting is refused. False for settings that were added after the first plans."""
    as_text: bool = False
    """Whether the option takes text that is parsed later, such as `0.5%` or `0.3,0.7`."""
    swept: bool = True
    """Whether a sweep can vary the setting. False where a value holds commas, or says how files are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """All facts about one setting, read from its annotated field."""

    name: str
    """The field's name: with underscores."""
    type: Any
    """int, float, bool, str, Path or tuple, without None; the type of the choices where there are some."""
    default: Any
    """Value where none is given; `dataclasses.MISSING` where one has to be found."""
    choices: tuple[str, ...]
    """The values that can be; empty: any within the bounds."""
    least: int | None
    """Smallest value."""
    most: int | None
    """Largest value."""
    setting: Setting
    """How the setting is given."""

    @property
    def option(self) -> str:
        """The option that gives the setting, or that gave it before it moved to the settings file."""
        return "--" + self.name.replace("_", "-")

    @property
    def off_option(self) -> str:
        """The option that switches a true-or-false setting off."""
        return "--no-" + self.name.replace("_", "-")

    def shown(self, *value: object) -> str:
        """The setting, and its value where one is given, as messages name them.

        Every message uses this text, so that it names an option only where the command has one:
        `--seq-length 4096`, but `microbatch_group_size 4`.
        """
        return " ".join([self.option if self.setting.everyday else self.name, *map(str, value)])

    def to_give(self, *value: object) -> str:
        """The setting as `shown`, and where to give it if no option does: `microbatch_group_size 4 in --settings`."""
        return self.shown(*value) + ("" if self.setting.everyday else " in --settings")

    def check(self, value: object) -> None:
        """Refuse a value of a wrong type or out of bounds.

        Raises:
            UsageError: naming the setting, the value and what it must be.
        """
        if self.choices:
            if value not in self.choices:
                raise UsageError(f"{self.shown(value)}: choose one of {', '.join(self.choices)}")
        elif self.type is bool:
            if not isinstance(value, bool):
                raise UsageError(f"{self.shown(repr(value))}: must be true or false")
        elif self.type is str:
            if not isinstance(value, str):
                such = f" such as {self.default}" if isinstance(self.default, str) else ""
                raise UsageError(f"{self.shown(repr(value))}: must be text{such}")
        elif self.type is tuple:
            if not isinstance(value, list | tuple) or not all(isinstance(w, int | float) for w in value):
                raise UsageError(f"{self.shown(repr(value))}: must be a list of numbers")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{self.shown(repr(value))}: must be a whole number")
        elif self.least is not None and value < self.least:
            raise UsageError(f"{self.shown(value)}: must be at least {self.least}")
        elif self.most is not None and value > self.most:
            raise UsageError(f"{self.shown(value)}: is larger than {self.most}")


def definitions_of(settings: type) -> dict[str, Definition]:
    """The definitions in a dataclass whose annotations hold a `Setting` each."""
    hints = get_type_hints(settings, include_extras=True)
    return {f.name: definition_of(f.name, hints[f.name], f.default) for f in dataclasses.fields(settings)}


def definition_of(name: str, hint: Any, default: Any) -> Definition:
    """The facts that a field's annotation `hint` holds.

    Args:
        name: the field's name.
        hint: its type, as typing.Annotated with a Setting.
        default: its value where none is given.
    """
    wanted, *facts = get_args(hint)
    if get_origin(wanted) in (Union, UnionType):
        wanted = next(t for t in get_args(wanted) if t is not type(None))
    choices: tuple[str, ...] = get_args(wanted) if get_origin(wanted) is Literal else ()
    bounds = next((fact for fact in facts if isinstance(fact, Interval)), Interval())
    return Definition(
        name=name,
        type=wanted if choices else get_origin(wanted) or wanted,
        default=default,
        choices=choices,
        least=bounds.ge,  # type: ignore[arg-type]
        most=bounds.le,  # type: ignore[arg-type]
        setting=next(fact for fact in facts if isinstance(fact, Setting)),
    )


_LONGEST = 60
"""Characters of a value that a message shows."""
_MISSING = object()


def find_unread_fields(settings: object, defaults: object, known: Collection[str]) -> list[str]:
    """Fields of a run that are off their default and that thdprof does not know, each as `name=value`, in order.

    A field that `defaults` lacks, such as one of a subclass, is off its default unless it is None. Names that begin
    with an underscore are no settings.

    Args:
        settings: the run's: a mapping, a dataclass or any object with attributes.
        defaults: the values of a run that changes nothing, in any of these forms, or a dataclass itself.
        known: names of the fields that thdprof reads, or that change nothing which it relies on.
    """
    usual = _fields(defaults)
    return [
        f"{name}={_shorten(value)}"
        for name, value in _fields(settings).items()
        if not name.startswith("_") and name not in known and not _is_equal(value, usual.get(name))
    ]


def _fields(settings: object) -> dict[str, object]:
    """The fields by name. Of a dataclass itself they are the declared defaults; those without one are left out."""
    if isinstance(settings, Mapping):
        return {str(name): value for name, value in settings.items()}
    if isinstance(settings, type) and dataclasses.is_dataclass(settings):
        return {f.name: value for f in dataclasses.fields(settings) if (value := _default(f)) is not _MISSING}
    found = dict(vars(settings)) if hasattr(settings, "__dict__") else {}
    if dataclasses.is_dataclass(settings):  # with slots too
        found = {f.name: getattr(settings, f.name, None) for f in dataclasses.fields(settings)} | found
    return found


def _default(field: dataclasses.Field[object]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_equal(value: object, usual: object) -> bool:
    if value is usual:
        return True
    try:
        return bool(value == usual)
    except Exception:  # a tensor or an array of several elements has no truth
        return repr(value) == repr(usual)


def _shorten(value: object) -> str:
    """The value in one short line; a function by its name."""
    text = " ".join(str(getattr(value, "__qualname__", None) or repr(value)).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
