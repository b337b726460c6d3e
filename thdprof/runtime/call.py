"""One call of a dispatched module: the arguments of one micro-batch, and the part of them that a capture fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thdprof.dispatch import Shape
from thdprof.runtime.padding import Boundaries, PackedSequence


class FallbackError(RuntimeError):
    """A micro-batch would run eagerly although the plan forbids it (`overflow: error`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a dispatched module: its arguments, and the micro-batch that they describe."""

    args: tuple[Any, ...]
    """The positional arguments."""
    kwargs: dict[str, Any]
    """The keyword arguments."""
    packed: PackedSequence
    """The PackedSequence among the arguments."""
    boundaries: Boundaries
    """The micro-batch's boundaries after the tail policy."""
    shape: Shape
    """The host-side integers by which a bucket is chosen."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors among the arguments, in order."""
    slot: int | None = None
    """Index of the slot that all ranks which share collectives use; None: the first free one."""

    def substitute(self, tensors: Sequence[torch.Tensor], packed: PackedSequence) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `tensors` in place of their tensors, in order, and `packed` in place of their metadata."""
        replacements = iter(tensors)

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(replacements)
            return packed if isinstance(value, PackedSequence) else value

        return [replaced(v) for v in self.args], {name: replaced(v) for name, v in self.kwargs.items()}

    def without_values(self) -> Call:
        """The call with meta tensors, which hold no memory, in place of its tensors: it can be kept as a sample."""
        tensors = tuple(t.detach().to("meta").requires_grad_(t.requires_grad) for t in self.tensors)
        args, kwargs = self.substitute(tensors, self.packed)
        return replace(self, args=tuple(args), kwargs=kwargs, tensors=tensors)


def describe_argument(value: Any) -> Any:
    """The part of an argument that a capture fixes.

    Raises:
        TypeError: the argument is neither a tensor nor a constant; a change inside it would go unnoticed.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, PackedSequence):
        return value.seq_idx is not None, value.cu_seqlens_padded is not None
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    raise TypeError(
        f"an argument of a graphed module is a {type(value).__name__}: give tensors, one PackedSequence and constants "
        "at the top level"
    )


def difference(captured: tuple[Any, ...], given: tuple[Any, ...], num_positional: int) -> str:
    """How a micro-batch differs from the one that graphs were captured for, in one clause; "" if it does not.

    Args:
        captured: the signature of the call that graphs were captured for, and which of its tensors take a gradient.
        given: the same of the micro-batch.
        num_positional: number of the micro-batch's positional arguments.
    """
    (then, took), (now, takes) = captured, given
    if then == now:
        return "" if took == takes else f"its tensors take a gradient: {takes}, and in the capture: {took}"
    if then[1] != now[1]:
        return f"it gives the arguments {', '.join(now[1])}, and the capture had {', '.join(then[1])}"
    if len(then[0]) == len(now[0]):
        names = [*(f"argument {n}" for n in range(num_positional)), *now[1]]
        for name, old, new in zip(names, then[0], now[0], strict=False):
            if old != new:
                return f"{name} is {_told(new)}, and in the capture {_told(old)}"
    return (
        "it runs under another autocast, or with other modules in training mode"
        if then[0] == now[0]
        else ("it gives other arguments")
    )


def _told(description: Any) -> str:
    return " ".join(str(part) for part in description) if isinstance(description, tuple) else str(description)
