"""Whether the times of a cost table are of other software or another GPU than the run's, as far as analyze can tell."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from thdprof.training.stamp import Stamp, warning

_PACKAGES = {"torch": "torch", "transformer_engine": "transformer-engine", "megatron_core": "megatron-core"}


def installed_here(version_of: Callable[[str], str] = importlib.metadata.version) -> dict[str, str | None]:
    """Versions of the training stack by a stamp's fields, from the packages' metadata; nothing is imported.

    Packages that are not installed are left out: the analysis may run elsewhere than training.
    """
    found: dict[str, str | None] = {}
    for field, package in _PACKAGES.items():
        try:
            found[field] = version_of(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def note_on_stamp(
    stamp: Stamp | None, *, gpu: str | None = None, version_of: Callable[[str], str] = importlib.metadata.version
) -> str | None:
    """One line that says where the run differs from what the table was measured on; None where it does not.

    Args:
        stamp: the table's stamp; None where it has none.
        gpu: name of the run's GPU as the user gives it, such as h100; None: not given.
        version_of: returns the version of an installed package.
    """
    if stamp is None:
        return None
    here = installed_here(version_of)
    if gpu is not None:
        here["gpu"] = stamp.gpu if gpu.lower() in stamp.gpu.lower() else gpu
    return warning(stamp, here)
