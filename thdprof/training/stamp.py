"""What times were measured on: versions of the training stack, the GPU and the processor."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "torch",
        "transformer_engine": "Transformer Engine",
        "cudnn": "cuDNN",
        "megatron_core": "megatron-core",
        "gpu": "GPU",
        "processor": "processor",
    }
)
"""Fields of a stamp, with their names in messages."""


class Stamp(BaseModel):
    """The software and hardware that times were measured on."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    torch: str
    """Version of torch."""
    transformer_engine: str | None = None
    """Version of Transformer Engine; null where it is not installed."""
    cudnn: str | None = None
    """Version of cuDNN."""
    megatron_core: str | None = None
    """Version of megatron-core; null where it is not installed."""
    gpu: str
    """Name of the GPU, as the driver gives it."""
    processor: str
    """Name of the processor, which eager times depend on."""


def compare_stamp(measured: Stamp, here: Mapping[str, str | None]) -> str | None:
    """One line that says where a run differs from what times were measured on; None where it does not.

    Args:
        measured: what the times were measured on.
        here: the run's values by the fields' names; fields that are not known are left out.
    """
    phrases = []
    for name, words in WORDS.items():
        then = getattr(measured, name)
        if name in here and _plain_version(then) != _plain_version(here[name]):
            now, then = (version or "not installed" for version in (here[name], then))
            phrases.append(f"{words} {now}, measured with {then}")
    if not phrases:
        return None
    return (
        f"the times of the cost table were measured elsewhere: {'; '.join(phrases)}. They may be wrong here: measure "
        "again with thdprof calibrate"
    )


def _plain_version(value: str | None) -> str | None:
    """A version without the label of its local build, or a name in lower case."""
    return None if value is None else value.partition("+")[0].strip().lower()


def compare_with_installed(measured: Stamp | None, *, gpu: str | None = None) -> str | None:
    """`compare_stamp` with the packages that are installed here; None without a stamp.

    Versions come from the packages' metadata, and nothing is imported. Packages that are not installed are left out:
    the analysis may run elsewhere than training.

    Args:
        gpu: name of the run's GPU as the user gives it, such as h100; None: not given.
    """
    if measured is None:
        return None
    here: dict[str, str | None] = {}
    for field in ("torch", "transformer_engine", "megatron_core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            here[field] = importlib.metadata.version(field.replace("_", "-"))
    if gpu is not None:
        here["gpu"] = measured.gpu if gpu.lower() in measured.gpu.lower() else gpu
    return compare_stamp(measured, here)
