"""Training by a plan with Hugging Face's Trainer and TRL's SFTTrainer: one callback. Needs torch and transformers."""

from __future__ import annotations

from thdprof.words import install_line

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - tested in a process that hides the packages
    raise ModuleNotFoundError(
        f"thdprof.transformers needs torch and transformers: {error}; {install_line('transformers')}"
    ) from error

from thdprof.transformers.callback import PlanCallback

__all__ = ["PlanCallback"]
