"""The Trainer that a callback belongs to. Trainers hand callbacks everything but themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback


def trainer_in_call(callback: TrainerCallback) -> Any:
    """The Trainer that is calling `callback`, out of the calls that lead here; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if callback in getattr(handler, "callbacks", ()) and callable(getattr(owner, "train", None)):
            return owner
        frame = frame.f_back
    return None


def put_first(callback: TrainerCallback, trainer: Any) -> None:
    """Let `callback` be called before the others of `trainer`, so that what it adds to logs reaches their loggers."""
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def call_after_training(trainer: Any, end: Callable[[], None]) -> None:
    """Call `end` when the next `trainer.train` ends, by an error too; the Trainer has its own `train` again by then."""
    own = trainer.train
    before = vars(trainer).get("train")

    @functools.wraps(own)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        finally:
            if vars(trainer).get("train") is train:  # another one's wrapper stays, and calls this one
                if before is None:
                    del trainer.train
                else:
                    trainer.train = before
            end()

    trainer.train = train
