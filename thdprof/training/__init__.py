"""A training run: its settings, and the model that it trains."""

from __future__ import annotations

from thdprof.training.definition import Definition, Kind, Panel, Setting, definitions_of, find_unread_fields
from thdprof.training.model import Fp8Recipe, Model, Norm, Precision, Recompute, check_model, model_definitions
from thdprof.training.settings import (
    DEFAULT_PROMPT_FORMAT,
    DYNAMIC_CP,
    STEP_PACKERS,
    TRL_PACKERS,
    Attention,
    Experts,
    GraphKind,
    Loader,
    PromptFormat,
    TailPolicy,
    TrainingOptions,
    TrainingSettings,
    definitions,
    shared_capture_ranks,
    shown,
    to_give,
)

__all__ = [
    "DEFAULT_PROMPT_FORMAT",
    "DYNAMIC_CP",
    "STEP_PACKERS",
    "TRL_PACKERS",
    "Attention",
    "Definition",
    "Experts",
    "Fp8Recipe",
    "GraphKind",
    "Kind",
    "Loader",
    "Model",
    "Norm",
    "Panel",
    "Precision",
    "PromptFormat",
    "Recompute",
    "Setting",
    "TailPolicy",
    "TrainingOptions",
    "TrainingSettings",
    "check_model",
    "definitions",
    "definitions_of",
    "find_unread_fields",
    "model_definitions",
    "shared_capture_ranks",
    "shown",
    "to_give",
]
