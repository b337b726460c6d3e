"""What times were measured on: versions of the training stack, the GPU and the processor."""

from __future__ import annotations

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
    transformer_engine: str | None
    """Version of Transformer Engine; null where it is not installed."""
    cudnn: str | None
    """Version of cuDNN."""
    megatron_core: str | None
    """Version of megatron-core; null where it is not installed."""
    gpu: str
    """Name of the GPU, as the driver gives it."""
    processor: str
    """Name of the processor, which eager times depend on."""


def differences(measured: Stamp, here: Mapping[str, str | None]) -> list[str]:
    """A phrase for every field in which a run differs from what times were measured on.

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
    return phrases


def warning(measured: Stamp, here: Mapping[str, str | None]) -> str | None:
    """One line that says where a run differs from what its plan's times were measured on; None where it does not."""
    phrases = differences(measured, here)
    if not phrases:
        return None
    return (
        f"the times of the cost table were measured elsewhere: {'; '.join(phrases)}. They may be wrong here: measure "
        "again with thdprof calibrate"
    )


def _plain_version(value: str | None) -> str | None:
    """A version without the label of its local build, or a name in lower case."""
    return None if value is None else value.partition("+")[0].strip().lower()
