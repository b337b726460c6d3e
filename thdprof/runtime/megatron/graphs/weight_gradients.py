"""Delayed weight gradients (`delay_wgrad_compute`) of modules that are captured: their graphs compute them.

Where weight gradients are delayed, a module of Transformer Engine only queues them in its backward, and computes them
when Megatron's schedule calls its `backward_dw`. A replay runs no Python and queues nothing: so modules inside graphs
compute the gradients in the backward's graph, and their `backward_dw` only tells Megatron that they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class CapturedWeightGradients:
    """The modules of one decoder that delay weight gradients, those inside graphs and the others."""

    def __init__(self, block: nn.Module, captured: Iterable[nn.Module]) -> None:
        """Nothing is changed yet.

        Args:
            block: the decoder.
            captured: modules whose passes are captured, with all modules inside them.
        """
        inside = {id(module) for part in captured for module in part.modules()}
        delaying = _delaying(block)
        self._captured = [module for module in delaying if id(module) in inside]
        self._others = [module for module in delaying if id(module) not in inside]
        self._begun = False

    def begin(self) -> None:
        """Let captured modules compute their weight gradients in every backward, replayed or eager."""
        if not self._begun:
            self._begun = True
            for module in self._captured:
                module.wgrad_store.disable_delay_wgrad_compute()
                vars(module)["backward_dw"] = _telling(module)

    def end(self) -> None:
        """Let weight gradients be delayed as before."""
        if self._begun:
            self._begun = False
            for module in self._captured:
                vars(module).pop("backward_dw", None)
                module.wgrad_store.enable_delay_wgrad_compute()

    @contextmanager
    def none_delayed(self) -> Iterator[None]:
        """Inside the block no module delays: a pass before a capture would leave gradients of its own in the queue of
        a module that is not captured, and training would take them for the next micro-batch's.
        """
        delaying = [module for module in (*self._captured, *self._others) if module.wgrad_store.delay_wgrad_compute()]
        for module in delaying:
            module.wgrad_store.disable_delay_wgrad_compute()
        try:
            yield
        finally:
            for module in delaying:
                module.wgrad_store.enable_delay_wgrad_compute()


def _delaying(block: nn.Module) -> list[Any]:
    return [
        module
        for module in block.modules()
        if (store := getattr(module, "wgrad_store", None)) is not None and store.delay_wgrad_compute()
    ]


def _telling(module: Any) -> Any:
    """What stands for a module's `backward_dw`: Megatron's gradient reduction waits for these hooks."""

    def backward_dw() -> None:
        for hook in module.wgrad_accumulation_and_reduce_hooks:
            hook()

    return backward_dw
