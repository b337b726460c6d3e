"""What `thdprof analyze` is asked for: its flags over a settings file over a launch script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from thdprof.analyze.settings.resolve import NAMES, check_values, load_settings_file
from thdprof.errors import DataError, UsageError
from thdprof.training import Attention

if TYPE_CHECKING:
    from thdprof.analyze.buckets.recommend import Limits

OF_THE_COMMAND = frozenset(
    ("format", "buckets", "cost_table", "attention", "max_fallback_rate", "graph_memory_gib", "world_size")
)
"""Options that are no training settings; a settings file takes them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `thdprof.analyze.analysis.analyze`, and what the user should know about them."""

    locations: list[str]
    given: dict[str, Any]
    """Training settings by name."""
    format: str
    cost_table: Path | None
    attention: Attention
    limits: Limits
    notes: list[str]


def read_request(
    locations: Sequence[str], flags: Mapping[str, Any], *, settings: Path | None, megatron_args: Path | None
) -> Request:
    """The request that flags, a settings file and a launch script make, in this order of precedence.

    `flags` maps names of options to values; None counts as not given.

    Raises:
        DataError: a file that cannot be read.
        UsageError: an option that is unknown, or of a value that cannot be.
    """
    stronger = load_settings_file(settings, NAMES | OF_THE_COMMAND) if settings is not None else {}
    _override(stronger, {name: value for name, value in flags.items() if value is not None})
    if "weights" in stronger:
        stronger["weights"] = _weights(stronger["weights"])
    if isinstance(stronger.get("split"), int | float):  # YAML takes a text such as 1 for a number
        stronger["split"] = str(stronger["split"])
    command = {name: stronger.pop(name) for name in OF_THE_COMMAND & set(stronger)}
    world_size = _count("--world-size", command.get("world_size"))
    found, given, notes = list(locations), dict[str, Any](), list[str]()
    if megatron_args is not None:
        from thdprof.analyze.settings.launch_script import parse_megatron_args

        script = parse_megatron_args(
            _read_text("--megatron-args", megatron_args),
            where=str(megatron_args),
            world_size=world_size,
            given={**stronger, **({"data_paths": found} if found else {})},
        )
        given, notes = dict(script.settings), script.notes
        if not found:
            found = script.data_paths
            if script.weights is not None:
                given["weights"] = script.weights
    elif world_size is not None:
        raise UsageError("--world-size: only completes --megatron-args; give --data-parallel-size instead")
    _override(given, stronger)
    return Request(
        locations=found,
        given=given,
        format=_text("--format", command.get("format", "auto")),
        cost_table=Path(_text("--cost-table", command["cost_table"])) if "cost_table" in command else None,
        attention=_attention(command.get("attention", "transformer_engine")),
        limits=_limits(command),
        notes=notes,
    )


def check_option(name: str, value: Any) -> None:
    """Refuse a value of option `name` (with underscores) that can be in no request, whatever the other options.

    Raises:
        UsageError: naming the option and the value.
    """
    if name in NAMES:
        check_values({name: value})
    elif name == "world_size":
        _count("--world-size", value)
    else:
        read_request([], {name: value}, settings=None, megatron_args=None)


def share_of(flag: str, value: Any) -> float:
    """A share, given as 0.005 or 0.5%.

    Raises:
        UsageError: it is none.
    """
    text = str(value)
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{flag} {text}: must be a share such as 0.005 or 0.5%")
    return share


def counts_of(flag: str, text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas.

    Raises:
        UsageError: they are not.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UsageError(f"{flag} {text}: must be whole numbers of at least 1, separated by commas, as in 16,64")
    return counts


def _override(given: dict[str, Any], stronger: Mapping[str, Any]) -> None:
    """Put `stronger` over `given`; the two ways to say a run's length replace each other."""
    length = {"train_samples", "train_iters"}
    if length & set(stronger):
        for name in length:
            given.pop(name, None)
    given.update(stronger)


def _limits(command: Mapping[str, Any]) -> Limits:
    from thdprof.analyze.buckets.recommend import Limits

    limits = Limits()
    rate, memory = command.get("max_fallback_rate"), command.get("graph_memory_gib")
    return Limits(
        num_buckets=_count("--buckets", command.get("buckets")) or limits.num_buckets,
        max_fallback_rate=None if rate is None else share_of("--max-fallback-rate", rate),
        graph_memory_bytes=None if memory is None else _bytes("--graph-memory-gib", memory),
    )


def _bytes(flag: str, gib: Any) -> int:
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib <= 2**30 or math.isnan(gib):
        raise UsageError(f"{flag} {gib}: must be a number of GiB from 0 to 2**30")
    return int(gib * 2**30)


def _count(flag: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{flag} {value}: must be a whole number of at least 1")
    return value


def _text(flag: str, value: Any) -> str:
    if not isinstance(value, str | Path):
        raise UsageError(f"{flag} {value}: must be text")
    return str(value)


def _attention(value: Any) -> Attention:
    for known in get_args(Attention):
        if value == known:
            chosen: Attention = known
            return chosen
    raise UsageError(f"--attention {value}: choose one of {', '.join(get_args(Attention))}")


def _weights(value: Any) -> Any:
    """Numbers from text such as 0.3,0.7; a list stays as it is."""
    if isinstance(value, list):
        return value
    try:
        return [float(part) for part in str(value).split(",")]
    except ValueError:
        raise UsageError(f"--weights {value}: must be numbers separated by commas, as in 0.3,0.7") from None


def _read_text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: is not text: {error}") from error
