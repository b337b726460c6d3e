"""Differences of tensors, reduced where the tensors are and read on the host later, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thdprof.runtime.graphs.watch.findings import Difference

_PIECE = 2**22
"""Elements that are compared at a time: the comparison's own memory is some tens of bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor of a replay beside that of its eager runs: all of one shape, dtype and device."""

    name: str
    """What the tensor is."""
    replayed: torch.Tensor
    """The replay's values."""
    eager: torch.Tensor
    """The values of the eager run."""
    again: torch.Tensor | None = None
    """The values of a second eager run, if one was made."""
    before: torch.Tensor | None = None
    """The values that the runs have added theirs to; None: zeros."""


class Readback:
    """Differences on their way from the device to the host."""

    def __init__(self, compared: Sequence[Compared], *, rounding: float = 0.0) -> None:
        """Queue the comparison and the copy of its results.

        Args:
            compared: the tensors to compare, at least one.
            rounding: relative rounding error of the dtype in which the module computes; tensors may have another one,
                such as float32 gradients of a module that computes in bfloat16.
        """
        self._rounding = rounding
        # what is on the host already is read first, and needs no copy
        ordered = sorted(compared, key=lambda c: c.eager.device.type != "cpu")
        self._tensors = [(c.name, c.eager.numel(), c.eager.dtype) for c in ordered]
        reduced = [_reduced(c) for c in ordered]
        self._host = [row for row in reduced if row.device.type == "cpu"]
        self._rows = torch.empty(0, 5, dtype=torch.float64)
        self._copied: torch.cuda.Event | None = None
        if len(self._host) < len(reduced):
            rows = torch.stack(reduced[len(self._host) :])
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_ready(self) -> bool:
        """Whether `differences` would not wait."""
        return self._copied is None or bool(self._copied.query())

    def differences(self) -> list[Difference]:
        """The differences; waits for the copy if it has not ended."""
        if self._copied is not None:
            self._copied.synchronize()
        rows = [*(row.tolist() for row in self._host), *self._rows.tolist()]
        return [self._difference(*tensor, *row) for tensor, row in zip(self._tensors, rows, strict=True)]

    def _difference(
        self,
        name: str,
        elements: int,
        dtype: torch.dtype,
        unequal: float,
        largest: float,
        spread: float,
        scale: float,
        added: float,
    ) -> Difference:
        floating = dtype.is_floating_point
        return Difference(
            name=name,
            elements=elements,
            unequal=round(unequal),
            largest=largest,
            spread=spread,
            scale=added,
            rounding=torch.finfo(dtype).eps * scale + self._rounding * added if floating else 0.0,
        )


def _reduced(compared: Compared) -> torch.Tensor:
    """Number of unequal values, largest difference, spread of the eager runs, largest value, largest added value.

    A tensor of shape [5], float64.
    """
    eager = _pieces(compared.eager)
    again = eager if compared.again is None else _pieces(compared.again)
    before = [None] * len(eager) if compared.before is None else _pieces(compared.before)
    pieces = [_reduced_piece(*parts) for parts in zip(_pieces(compared.replayed), eager, again, before, strict=True)]
    if not pieces:
        return torch.zeros(5, dtype=torch.float64, device=compared.eager.device)
    rows = torch.stack(pieces)
    return torch.cat((rows[:, :1].sum(0), rows[:, 1:].amax(0)))


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.detach().reshape(-1).split(_PIECE) if tensor.numel() else ()


def _reduced_piece(
    replayed: torch.Tensor, eager: torch.Tensor, again: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    unequal, largest = _difference(replayed, eager)
    _, spread = _difference(again, eager)
    values = eager.double()
    added = values if before is None else values - before.double()
    return torch.stack((unequal.double(), largest, spread, _scale(values), _scale(added)))


def _scale(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isfinite(), values.abs(), 0.0).amax()


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of values that differ, and the largest difference; NaN equals NaN."""
    same = (one == other) | ((one != one) & (other != other))
    by = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return (~same).sum(), torch.where(same, 0.0, by).amax()
