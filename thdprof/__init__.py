"""thdprof: CUDA-graph caps for packed-sequence training, chosen from the data and proved at train time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Plan, load_plan

__version__ = "0.1.0"
__all__ = ["Plan", "__version__", "load_plan"]


def __getattr__(name: str) -> Any:
    """Import `Plan` and `load_plan` on first use, so that `thdprof --help` stays fast."""
    if name in ("Plan", "load_plan"):
        from thdprof import plan

        return getattr(plan, name)
    raise AttributeError(f"module 'thdprof' has no attribute {name!r}")
