"""The states of delayed scaling: a scaling factor and a history of absolute maxima (amax) for every quantized tensor.

A pass quantizes by the scaling factors and writes each tensor's amax into the first row of its history. Other recipes
keep no state from one pass to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
"""Keys of a module's `fp8_meta`: the states of tensors that its forward quantizes, and of those of its backward."""


class Scales:
    """The states of delayed scaling of all modules inside one module, whichever of them exist at a time."""

    def __init__(self, module: nn.Module) -> None:
        """The states inside `module`; its forward makes them when it first runs."""
        metas = [getattr(part, "fp8_meta", None) for part in module.modules()]
        self._metas = [meta for meta in metas if isinstance(meta, dict)]
        self._read: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Scaling factors and histories, those of the forward before those of the backward."""
        return [tensor for key in (FORWARD, BACKWARD) for pair in self._pairs(key) for tensor in pair[2:]]

    def of_backward(self) -> list[torch.Tensor]:
        """Scaling factors and histories of tensors that a backward quantizes."""
        return [tensor for pair in self._pairs(BACKWARD) for tensor in pair[2:]]

    def _pairs(self, key: str) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
        found = []
        for meta in self._metas:
            state = meta.get(key)
            scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
            if isinstance(scale, torch.Tensor) and isinstance(history, torch.Tensor):
                found.append((meta, key, scale, history))
        return found

    @contextmanager
    def new_ones_reset(self) -> Iterator[None]:
        """Give states that the block makes the values with which they are born: factors of one, empty histories."""
        before = {id(tensor) for tensor in self.tensors()}
        try:
            yield
        finally:
            with torch.no_grad():
                for key in (FORWARD, BACKWARD):
                    for *_, scale, history in self._pairs(key):
                        if id(scale) not in before:
                            scale.fill_(1.0)
                        if id(history) not in before:
                            history.zero_()

    def remember(self) -> None:
        """Remember the tensors that graphs captured now read and write."""
        self._read = [*self._pairs(FORWARD), *self._pairs(BACKWARD)]

    def changed(self) -> str:
        """How the tensors differ from those that graphs read and write; "" if they do not."""
        for meta, key, scale, history in self._read:
            state = meta.get(key)
            if getattr(state, "scale", None) is not scale or getattr(state, "amax_history", None) is not history:
                return "scaling factors or amax histories of delayed scaling were replaced after graphs were captured"
        return ""

    def forget(self) -> None:
        """Forget what graphs read: they are gone."""
        self._read = []


@contextmanager
def recompute_copies_aside(state: Callable[[], Any]) -> Iterator[None]:
    """Keep the copies of scales that eager micro-batches have made for their recomputation out of the block's reach.

    Transformer Engine keeps them in queues, first in, first out: the passes of a capture, between the forward and the
    backward of another micro-batch, would take that one's copies for theirs.

    Args:
        state: returns Transformer Engine's global state of quantization.
    """
    queues: Sequence[Any] = list(state().fp8_tensors_recompute_buffer)
    waiting = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    try:
        yield
    finally:
        for queue in state().fp8_tensors_recompute_buffer:
            queue.clear()
        for queue, copies in zip(queues, waiting, strict=True):
            queue.extend(copies)
