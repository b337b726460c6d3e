"""Megatron-Bridge's performance recipes, read as text and judged by the table of limits. Nothing of Bridge is run."""

from __future__ import annotations

from thdprof.megatron_limits.recipes.coverage import (
    HOPPER,
    Coverage,
    Verdict,
    counts,
    coverage_of,
    missing,
    reasons,
)
from thdprof.megatron_limits.recipes.find import find_bridge

__all__ = ["HOPPER", "Coverage", "Verdict", "counts", "coverage_of", "find_bridge", "missing", "reasons"]
