"""The training half: padded CUDA graphs with eager fallback, and the proof that the prediction held. Needs torch."""

from __future__ import annotations

from thdprof.words import install_line

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - tested in an environment without torch
    raise ModuleNotFoundError(f"thdprof.runtime needs torch: {install_line('runtime')}") from error

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.runtime.dispatched_module import FallbackError
from thdprof.runtime.graphs.graphed_module import GraphedModule, graphed
from thdprof.runtime.isolation import Isolation, Leak, verify_isolation
from thdprof.runtime.options import GraphOptions
from thdprof.runtime.padding import PackedSequence, pack
from thdprof.runtime.stats import Stats

__all__ = [
    "Bucket",
    "FallbackError",
    "FallbackReason",
    "GraphOptions",
    "GraphedModule",
    "Isolation",
    "Leak",
    "PackedSequence",
    "Stats",
    "graphed",
    "pack",
    "verify_isolation",
]
