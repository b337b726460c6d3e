"""Which tokens belong to whom, and which documents are perturbed together, so that few passes cover every pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thdprof.runtime.padding import Boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring tokens of a micro-batch that belong to one document, or to none."""

    kind: Literal["document", "padding", "tail"]
    """Whether these are a document's tokens, the padding after a document, or the tail after the last one."""
    number: int
    """The document, counted from 0; of padding, the document that it follows; of a tail, the number of documents."""
    begin: int
    """The first token, counted from the micro-batch's first."""
    end: int
    """One more than the last token."""

    def __str__(self) -> str:
        names = {"document": f"document {self.number}", "padding": f"the padding after document {self.number}"}
        return names.get(self.kind, "the tail after the last document")


def regions_of(boundaries: Boundaries, n_tokens: int) -> tuple[Region, ...]:
    """The regions of a micro-batch in the order of their tokens, those without a token left out.

    Args:
        boundaries: boundaries after the tail policy, on the host.
        n_tokens: tokens of the micro-batch.
    """
    valid, memory = np.asarray(boundaries.valid), np.asarray(boundaries.in_memory)
    found = []
    for number, (begin, end, length) in enumerate(zip(memory[:-1], memory[1:], np.diff(valid), strict=True)):
        middle = int(begin + length)
        found.append(Region(kind="document", number=number, begin=int(begin), end=middle))
        found.append(Region(kind="padding", number=number, begin=middle, end=int(end)))
    found.append(Region(kind="tail", number=len(valid) - 1, begin=int(memory[-1]), end=n_tokens))
    return tuple(region for region in found if region.begin < region.end)


def rounds(regions: Sequence[Region]) -> tuple[tuple[Region, ...], ...]:
    """Sets of regions to perturb at once, so that every ordered pair of regions is once apart: the one perturbed, the
    other not.

    Few regions are perturbed one by one. Of many, each round takes those whose position has a certain binary digit at a
    certain place: two positions differ in a digit, so that 2 * log2 of their number rounds are enough for all pairs.
    """
    digits = (len(regions) - 1).bit_length()
    if len(regions) <= 2 * digits:
        return tuple((region,) for region in regions)
    return tuple(
        tuple(region for position, region in enumerate(regions) if position >> place & 1 == digit)
        for place in range(digits)
        for digit in (0, 1)
    )
