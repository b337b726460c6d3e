"""The plan file: what `thdprof analyze` recommends and training applies. YAML, schema `thdprof.plan/1`."""

from __future__ import annotations

from thdprof.plan.file import SCHEMA, Plan, load_plan, parse_plan
from thdprof.plan.parts import (
    BucketPart,
    CostsPart,
    Count,
    DatasetPart,
    FallbackRate,
    GraphsPart,
    Impl,
    MicrobatchesPart,
    Module,
    OffloadPart,
    OneCapPart,
    Percentiles,
    PredictionsPart,
    Share,
    TimesPart,
    Training,
)

__all__ = [
    "SCHEMA",
    "BucketPart",
    "CostsPart",
    "Count",
    "DatasetPart",
    "FallbackRate",
    "GraphsPart",
    "Impl",
    "MicrobatchesPart",
    "Module",
    "OffloadPart",
    "OneCapPart",
    "Percentiles",
    "Plan",
    "PredictionsPart",
    "Share",
    "TimesPart",
    "Training",
    "load_plan",
    "parse_plan",
]
