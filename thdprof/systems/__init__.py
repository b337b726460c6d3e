"""One module for each upstream system: its files, packers, order, limits, defaults and exports.

`thdprof.training.systems` registers what they bring, and a module is imported when something of it is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thdprof.errors import UsageError
from thdprof.training.systems import COLUMN_OWNERS, EXPORTS, FORMATS, PACKERS

if TYPE_CHECKING:
    from pathlib import Path

    from thdprof.read.dataset import ColumnKind, Format, Reading
    from thdprof.systems.base import Packer, Target


@cache
def find_packer(name: str) -> Packer:
    """The packer called `name`, a key of `PACKERS`."""
    packers: tuple[Packer, ...] = import_module(f"{__name__}.{PACKERS[name].module}").PACKERS
    return next(packer for packer in packers if packer.name == name)


def find_format(name: str, reading: Reading | None = None) -> Format:
    """The format called `name`, as the run reads it.

    Raises:
        UsageError: no such format.
    """
    from thdprof.read.dataset import Format, Reading

    if name not in FORMATS:
        raise UsageError(f"--format {name}: not a known format; known are auto, {', '.join(FORMATS)}")
    module, constant = FORMATS[name].place.split(".")
    found = getattr(import_module(f"{__name__}.{module}"), constant)
    return found if isinstance(found, Format) else found(reading or Reading())


def find_target(name: str) -> Target:
    """The system called `name`, a key of `EXPORTS`, as a plan is exported to it."""
    target: Target = import_module(f"{__name__}.{EXPORTS[name]}").TARGET
    return target


def claim_columns(path: Path, names: set[str], column: str, kind: ColumnKind) -> str | None:
    """The packer of those who train on a file whose lengths stand in `column`, among others; None: nobody is known.

    Raises:
        DataError: somebody packed the rows and did not store the lengths of their documents.
    """
    for module in COLUMN_OWNERS:
        claim: Any = import_module(f"{__name__}.{module}").claim_columns
        packer: str | None = claim(path, names, column, kind)
        if packer is not None:
            return packer
    return None
