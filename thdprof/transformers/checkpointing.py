"""Gradient checkpointing inside graphs: layers are recomputed without saving and restoring random states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

_FUNCTION = "_gradient_checkpointing_func"


@contextmanager
def without_random_states(decoder: nn.Module) -> Iterator[None]:
    """Let the layers' checkpoints leave random states alone inside the block: a capture cannot read them.

    Layers with dropout are refused together with checkpointing, so that a recomputed layer draws no random numbers.

    Args:
        decoder: the module whose layers transformers has told how to checkpoint.
    """
    kept: list[tuple[dict[str, Any], Any]] = []
    for module in decoder.modules():
        own = module.__dict__.get(_FUNCTION)
        if own is not None:
            kept.append((module.__dict__, own))
            module.__dict__[_FUNCTION] = partial(own, preserve_rng_state=False)
    try:
        yield
    finally:
        for home, own in kept:
            home[_FUNCTION] = own
