"""Which micro-batches are verified, and which parameters are compared in each."""

from __future__ import annotations

from collections.abc import Sequence

EARLY = 64
"""Up to this number, micro-batches whose number is 0 or a power of two are verified, whatever the rate."""
_WORD = (1 << 64) - 1


def is_sampled(number: int, every: int) -> bool:
    """Whether micro-batch `number` is verified: one of each block of `every` micro-batches, and some early ones.

    The place in the block is scattered, because a fixed one would always meet the same place in the step, and with it
    the same slot.

    Args:
        number: number of the micro-batch, from 0.
        every: size of a block, at least 1.
    """
    if number <= EARLY and number & (number - 1) == 0:
        return True
    block, place = divmod(number, every)
    return place == _scatter(block) % every


def _scatter(number: int) -> int:
    """An integer of 64 bits that looks random and depends on `number` alone (SplitMix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
    return mixed ^ (mixed >> 31)


class Rotation:
    """Gives every parameter its turn: each sample begins where the one before it ended."""

    def __init__(self) -> None:
        self._first = 0

    def take(self, sizes: Sequence[int], limit: int) -> list[int]:
        """Positions of the next parameters: one at least, and more while all together keep to `limit`.

        Args:
            sizes: bytes of the gradient of each parameter, as many in every call.
            limit: most bytes of all that are taken.
        """
        if not sizes:
            return []
        chosen: list[int] = []
        total = 0
        for step in range(len(sizes)):
            position = (self._first + step) % len(sizes)
            total += sizes[position]
            if chosen and total > limit:
                break
            chosen.append(position)
        self._first = (chosen[-1] + 1) % len(sizes)
        return chosen
