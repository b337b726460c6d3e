"""Decides what moved: compares passes token by token, value for value, or within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thdprof.runtime.isolation.perturb import token_mask
from thdprof.runtime.isolation.regions import Region

SPREADS_ALLOWED = 4.0
"""Of a module that does not repeat itself, what moves by at most so many of its own spreads counts as unmoved: the
spread is known from few passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One tensor of a pass that is compared: an output, or the gradient of an input."""

    what: Literal["output", "gradient"]
    """Which of the two it is."""
    name: str
    """How a message calls it."""
    values: torch.Tensor
    """The values, without a graph."""
    dim: int
    """The dimension that runs over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """The first token of a document that moved, in the first tensor that did."""

    tensor: Watched
    """The tensor, of the unperturbed pass."""
    region: Region
    """The document."""
    token: int
    """The first token, counted from the micro-batch's first."""
    tokens_moved: int
    """Number of the document's tokens that moved in that tensor."""
    moved: float
    """Largest absolute difference at that token."""
    limit: float
    """Largest absolute difference that counts as unmoved."""


def moved_by_token(one: Watched, other: Watched) -> torch.Tensor:
    """Largest absolute difference at each token: shape [n_tokens]; infinite where one is no number and the other is.

    Raises:
        ValueError: the tensors have different shapes.
    """
    a, b = one.values, other.values
    if a.shape != b.shape or one.name != other.name:
        raise ValueError(told_of_shapes(one.name, a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = torch.float32 if a.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64
    by_value = (a.to(kind) - b.to(kind)).abs().movedim(one.dim, 0)[..., None].flatten(1)
    if by_value.shape[1] == 0:
        return by_value.new_zeros(by_value.shape[0])
    return torch.nan_to_num(by_value, nan=torch.inf, posinf=torch.inf).amax(1)


def told_of_shapes(name: str, one: torch.Tensor, other: torch.Tensor) -> str:
    """What to say where a tensor has another shape, or another tensor stands in its place, in another pass."""
    return (
        f"{name} has shape {tuple(one.shape)} in one pass and {tuple(other.shape)} in another, over equal boundaries: "
        "the shapes of a module's outputs may not depend on the values of its inputs"
    )


class Baseline:
    """Unperturbed passes: the values to compare with, and how far the module's own passes differ."""

    def __init__(self, first: Sequence[Watched], documents: Sequence[Region], n_tokens: int, tolerance: float) -> None:
        """The baseline of one unperturbed pass.

        Args:
            first: the tensors of that pass.
            documents: the documents' regions.
            n_tokens: tokens of the micro-batch.
            tolerance: largest difference that counts as none, as a share of a tensor's largest absolute value.

        Raises:
            ValueError: a value is infinite or no number, so that it could not be seen to move.
        """
        self.tensors = tuple(first)
        """The tensors of the first pass."""
        self.documents, self._n_tokens = tuple(documents), n_tokens
        self.spreads = [0.0 for _ in first]
        """Largest difference between passes, a tensor."""
        self._allowed = [0.0 for _ in first]
        for position, tensor in enumerate(first):
            mask = token_mask(documents, n_tokens, tensor.values.device)
            sizes = moved_by_token(tensor, _zeros_like(tensor))
            if not bool(torch.isfinite(sizes[mask]).all()):
                token = int(torch.nonzero(mask & ~torch.isfinite(sizes))[0])
                raise ValueError(
                    f"{tensor.name} is infinite or not a number at token {token}, before anything was perturbed: what "
                    "moves could not be seen; give inputs and weights as in training"
                )
            self._allowed[position] = tolerance * float(sizes[mask].max())

    def deterministic(self) -> bool:
        """Whether all unperturbed passes so far were equal, value for value, over the documents' tokens."""
        return not any(self.spreads)

    def repeat(self, again: Sequence[Watched]) -> None:
        """Widen the spreads by another unperturbed pass."""
        for position, (tensor, other) in enumerate(zip(self.tensors, again, strict=True)):
            mask = token_mask(self.documents, self._n_tokens, tensor.values.device)
            self.spreads[position] = max(self.spreads[position], float(moved_by_token(tensor, other)[mask].max()))

    def limit(self, position: int) -> float:
        """Largest difference of the tensor at `position` that counts as unmoved."""
        return max(SPREADS_ALLOWED * self.spreads[position], self._allowed[position])

    def first_moved(self, now: Sequence[Watched], watch: Sequence[Region]) -> Movement | None:
        """The first movement of a document in `watch`: outputs before gradients, then by token; None without one."""
        if not watch:
            return None
        for position, (tensor, other) in enumerate(zip(self.tensors, now, strict=True)):
            moved = moved_by_token(tensor, other)
            beyond = token_mask(watch, self._n_tokens, moved.device) & (moved > self.limit(position))
            if not bool(beyond.any()):
                continue
            token = int(torch.nonzero(beyond)[0])
            region = next(r for r in watch if r.begin <= token < r.end)
            return Movement(
                tensor=tensor,
                region=region,
                token=token,
                tokens_moved=int(beyond[region.begin : region.end].sum()),
                moved=float(moved[token]),
                limit=self.limit(position),
            )
        return None

    def unmoved(self, now: Sequence[Watched], perturbed: Sequence[Region]) -> set[int]:
        """Documents in `perturbed` of which no output moved, or no gradient although gradients are compared."""
        asked = [region for region in perturbed if region.kind == "document"]
        seen: dict[str, set[int]] = {}
        for position, (tensor, other) in enumerate(zip(self.tensors, now, strict=True)):
            beyond = (moved_by_token(tensor, other) > self.limit(position)).cpu()
            seen.setdefault(tensor.what, set()).update(r.number for r in asked if bool(beyond[r.begin : r.end].any()))
        return {r.number for r in asked if not all(r.number in numbers for numbers in seen.values())}

    def distance(self, other: Baseline) -> float:
        """Largest difference of the outputs from those of `other`, as a share of the other's largest output."""
        found = 0.0
        for one, two in zip(self.tensors, other.tensors, strict=False):
            if one.what == "output" and one.values.shape == two.values.shape:
                mask = token_mask(self.documents, self._n_tokens, one.values.device)
                largest = float(moved_by_token(two, _zeros_like(two))[mask].max())
                moved = float(moved_by_token(one, two)[mask].max())
                found = max(found, moved / largest if largest else moved)
        return found


def _zeros_like(tensor: Watched) -> Watched:
    return Watched(what=tensor.what, name=tensor.name, values=torch.zeros_like(tensor.values), dim=tensor.dim)
