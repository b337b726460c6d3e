"""The updates of delayed scaling: from the amax that passes have written, over all ranks, to the next scaling factors.

Eagerly they run at the end of every forward, at the end of every backward, and after every recomputed part. They go
over all modules of the process and communicate, so that no graph holds them: they run after a replay instead, as often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "reduce_and_update_fp8_tensors"
"""The method of Transformer Engine's FP8GlobalStateManager that makes the updates."""


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


class Updates:
    """The updates that one pass makes eagerly, to be made after its replay."""

    def __init__(
        self, manager: Any, *, is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    ) -> None:
        """No updates are known yet.

        Args:
            manager: Transformer Engine's FP8GlobalStateManager.
            is_capturing: whether the current stream is captured.
        """
        self._manager, self._is_capturing = manager, is_capturing
        self._forward: list[bool] = []
        self._backward: list[bool] = []

    @contextmanager
    def held_back(self, *, record: bool = False) -> Iterator[None]:
        """Make no updates inside the block.

        Args:
            record: whether to note those that its captured pass would have made.
        """
        own = vars(self._manager)[NAME]
        forward: list[bool] = []
        backward: list[bool] = []

        def noted(forward_tensors: bool = True, **named: bool) -> None:
            if record and self._is_capturing():
                (backward if _in_backward() else forward).append(named.get("forward", forward_tensors))

        setattr(self._manager, NAME, staticmethod(noted))
        try:
            yield
        finally:
            setattr(self._manager, NAME, own)
        if record:
            self._forward, self._backward = forward, backward

    def after_forward(self) -> None:
        """Make the updates of a forward that was replayed; one without gradients makes none, as eagerly."""
        if torch.is_grad_enabled():
            self._make(self._forward)

    def after_backward(self) -> None:
        """Make the updates of a backward that was replayed."""
        self._make(self._backward)

    def _make(self, updates: list[bool]) -> None:
        for forward in updates:
            getattr(self._manager, NAME)(forward=forward)
