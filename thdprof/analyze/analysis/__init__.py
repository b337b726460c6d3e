"""Analyses a dataset under training settings: predicts the micro-batches and recommends the buckets to capture."""

from __future__ import annotations

from thdprof.analyze.analysis.result import Analysis, CpSize
from thdprof.analyze.analysis.steps import Progress, analyze, analyze_read

__all__ = ["Analysis", "CpSize", "Progress", "analyze", "analyze_read"]
