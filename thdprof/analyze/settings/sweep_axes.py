"""The axes of `thdprof sweep DATASET name=v1,v2`: the settings to vary, and their values."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thdprof.analyze.settings.limits import analysis_options
from thdprof.analyze.settings.request import check_option
from thdprof.errors import UsageError
from thdprof.training import Definition, definitions, model_definitions

_MOST = 256
_BETWEEN = re.compile(r"\s+(?=[A-Za-z-][A-Za-z0-9-]*=)")
_TOKEN = re.compile(r"(?:--)?([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


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
    known = {**definitions(), **analysis_options(), **model_definitions()}
    return {name: d for name, d in known.items() if d.setting.swept}


def split_arguments(datasets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The datasets among a sweep's positional arguments, and the arguments of the form name=value,... to vary.

    A file whose name has that form is a dataset, unless the name is a setting's.
    """
    found: tuple[list[str], list[str]] = [], []
    for text in datasets:
        match = _TOKEN.fullmatch(text)
        varied = match is not None and (_name(match[1]) in swept_settings() or not _is_there(text))
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
            raise UsageError(f"{text}: {swept_settings()[axis.name].shown()} is given too; give it once")
        if any(axis.name == other.name for other in axes):
            raise UsageError(f"{text}: {axis.flag} is varied already; give all its values at once")
        axes.append(axis)
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > _MOST:
        raise UsageError(f"{count:,} combinations to analyse; at most {_MOST} are analysed at once")
    return axes


def _axis(text: str) -> Axis:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise UsageError(f"--vary {text}: must be name=value,value as in seq-length=4096,8192")
    name = _name(match[1])
    if name not in swept_settings():
        known = ", ".join(sorted(n.replace("_", "-") for n in swept_settings()))
        raise UsageError(f"{text}: {match[1]} cannot be varied; known are {known}")
    values: list[Any] = []
    for part in match[2].split(","):
        value = _value(name, part)
        try:
            check_option(name, value)
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from error
        if value in values:
            raise UsageError(f"{text}: {part} is there twice")
        values.append(value)
    return Axis(name=name, values=tuple(values))


def _name(text: str) -> str:
    return text.replace("-", "_")


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
