"""What this process trains on, for the stamp of a cost table and for the comparison with one."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thdprof.megatron_limits.known_fields import unread_fields
from thdprof.plan import Plan
from thdprof.runtime.megatron.versions import installed
from thdprof.training.stamp import compare_stamp

logger = logging.getLogger(__name__)


def stamp_here() -> dict[str, str | None]:
    """Values of `thdprof.training.stamp.Stamp` by its fields."""
    packages = installed(["transformer-engine", "megatron-core"])
    return {
        "torch": str(torch.__version__),
        "transformer_engine": packages["transformer-engine"],
        "cudnn": _cudnn(),
        "megatron_core": packages["megatron-core"],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "processor": processor(),
    }


def warn_of_other_surroundings(plan: Plan, here: Mapping[str, str | None] | None = None) -> None:
    """Log one warning where this run differs from what the plan's times were measured on, if the plan has a stamp."""
    if (measured := plan.costs.stamp) is None:
        return
    if (text := compare_stamp(measured, stamp_here() if here is None else here)) is not None:
        logger.warning("%s", text)


def warn_of_unread_fields(config: Any, ddp: Any) -> None:
    """Log one warning that names what the run changes and thdprof has never looked at; arguments of `unread_fields`."""
    if unread := unread_fields(config, ddp):
        logger.warning(
            "settings that thdprof has never looked at are off their default, and may be wrong in graphs: %s; compare "
            "some steps with --replay off (install: replay=False)",
            ", ".join(unread),
        )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor; its architecture where the system has none."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cudnn() -> str | None:
    """Version of cuDNN as torch loads it, such as 9.19.0; None without it."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if number is None:
        return installed(["nvidia-cudnn-cu13"])["nvidia-cudnn-cu13"]
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
