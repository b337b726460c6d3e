"""Plans applied in megatron-core with Transformer Engine: `install` after the model is built, before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thdprof.words import install_line

try:
    import megatron.core  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - tested in an environment without megatron-core
    raise ModuleNotFoundError(
        f"thdprof.runtime.megatron needs megatron-core and Transformer Engine: {install_line('megatron,te')}"
    ) from error

from thdprof.runtime.megatron.decoder.packed_seq_params import (
    Layout,
    context_group,
    lay_out,
    misplaced,
    packed_seq_params,
)
from thdprof.runtime.megatron.decoder_costs import measure_decoder
from thdprof.runtime.megatron.install import Installation, install
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.versions import VersionError

if TYPE_CHECKING:
    from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback as ThdprofCallback

__all__ = [
    "Installation",
    "Layout",
    "SettingsError",
    "VersionError",
    "context_group",
    "install",
    "lay_out",
    "measure_decoder",
    "misplaced",
    "packed_seq_params",
]


def __getattr__(name: str) -> Any:
    """ThdprofCallback, which alone needs Megatron-Bridge."""
    if name != "ThdprofCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

    return ThdprofCallback
