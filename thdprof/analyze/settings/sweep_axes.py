"""What `analyze --sweep name=v1,v2` asks for: the options to sweep and their values."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thdprof.analyze.settings.request import OF_THE_COMMAND, check_option
from thdprof.analyze.settings.resolve import NAMES
from thdprof.errors import UsageError

SWEPT = (NAMES | OF_THE_COMMAND) - {"format", "weights", "split"}
"""Options that can be swept: all of one value without a comma, but for the format of the files, read once."""
_SWITCHES = ("data_sharding", "drop_last", "add_extra_token", "pad_to_max_length")
_MOST = 256
_BETWEEN = re.compile(r"\s+(?=[A-Za-z-]+=)")
_TOKEN = re.compile(r"(?:--)?([A-Za-z][A-Za-z_-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An option and the values that it takes."""

    name: str
    """With underscores."""
    values: tuple[Any, ...]
    """As in a settings file; at least one, each once."""

    @property
    def flag(self) -> str:
        """The option's name on the command line, without dashes before it."""
        return self.name.replace("_", "-")


def split_arguments(datasets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The datasets among a sweep's positional arguments, and those of the form name=value,... for the sweep.

    A file whose name has that form is a dataset, unless the name is an option's.
    """
    found: tuple[list[str], list[str]] = [], []
    for text in datasets:
        match = _TOKEN.fullmatch(text)
        swept = match is not None and (_name(match[1]) in SWEPT or not _is_there(text))
        found[swept].append(text)
    return found


def _is_there(location: str) -> bool:
    return Path(location).exists() or Path(f"{location}.idx").exists() or bool(glob.glob(location))


def read_axes(texts: Sequence[str], given: Mapping[str, Any]) -> list[Axis]:
    """The axes that `texts` of the form name=v1,v2 name, several to a text where spaces separate them.

    `given` maps options that the command has been given, which cannot be swept too, to values; None is not given.

    Raises:
        UsageError: naming the text, name or value that cannot be.
    """
    axes: list[Axis] = []
    for text in (part for whole in texts for part in _BETWEEN.split(whole.strip())):
        axis = _axis(text)
        if given.get(axis.name) is not None:
            raise UsageError(f"--sweep {text}: --{axis.flag} is given too; give it once")
        if any(axis.name == other.name for other in axes):
            raise UsageError(f"--sweep {text}: {axis.flag} is swept already; give all its values at once")
        axes.append(axis)
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > _MOST:
        raise UsageError(f"--sweep: {count:,} combinations; at most {_MOST} are analysed at once")
    return axes


def _axis(text: str) -> Axis:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise UsageError(f"--sweep {text}: must be name=value,value as in seq-length=4096,8192")
    name = _name(match[1])
    if name not in SWEPT:
        known = ", ".join(sorted(n.replace("_", "-") for n in SWEPT))
        raise UsageError(f"--sweep {text}: {match[1]} cannot be swept; known are {known}")
    values: list[Any] = []
    for part in match[2].split(","):
        value = _value(name, part)
        try:
            check_option(name, value)
        except UsageError as error:
            raise UsageError(f"--sweep {text}: {error}") from error
        if value in values:
            raise UsageError(f"--sweep {text}: {part} is there twice")
        values.append(value)
    return Axis(name=name, values=tuple(values))


def _name(text: str) -> str:
    return text.replace("-", "_")


def _value(name: str, text: str) -> Any:
    """`text` as the value that a settings file would hold; what is none of the option's kind stays text."""
    if text == "":
        raise UsageError(f"--sweep {name.replace('_', '-')}: a value is empty; give name=value,value")
    if name in _SWITCHES:
        return {"true": True, "false": False}.get(text.lower(), text)
    if name == "graph_memory_gib":
        try:
            return float(text)
        except ValueError:
            return text
    if name not in ("cost_table", "max_fallback_rate") and re.fullmatch(r"[+-]?[0-9]{1,30}", text):
        return int(text)
    return text
