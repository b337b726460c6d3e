"""A model of torch's caching allocator: the bytes that it reserves for tensors that come and go.

It reserves more than the tensors hold, because it rounds. Sizes and rules are those of c10/cuda/CUDACachingAllocator in
torch 2.11: a request takes the smallest free block that holds it; the rest of the block stays free beside it; a new
segment is reserved if no block is large enough. The model has one stream and default settings.

A model of a pass knows its large tensors, but not the many that come and go between them and may use the rest of their
segments. So `reserved` computes both extremes, the rest unused and the rest used up, and takes the middle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_ROUNDED_TO = 512
"""Bytes: every request is rounded up to a multiple of this size."""
_SMALL = 2**20
"""Bytes: requests up to this size have segments of their own."""
_SMALL_SEGMENT = 2 * 2**20
"""Bytes of a segment for small requests."""
_OWN_SEGMENT = 10 * 2**20
"""Bytes: a request of this size or more gets a segment of its own, rounded up to `_SEGMENT_ROUNDED_TO`."""
_SHARED_SEGMENT = 20 * 2**20
"""Bytes of a segment that requests between `_SMALL` and `_OWN_SEGMENT` share."""
_SEGMENT_ROUNDED_TO = 2 * 2**20
"""Bytes: the size of a segment for one request is rounded up to a multiple of this size."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, taken or free."""

    small: bool
    """Whether the block lies in a segment for small requests."""
    number: int
    """Its index among all blocks."""
    nbytes: int
    free: bool = False
    before: _Block | None = None
    """Its neighbour in the segment."""
    after: _Block | None = None

    def key(self) -> tuple[int, int]:
        return self.nbytes, self.number


class Segments:
    """The segments that the allocator has reserved, and the blocks in them that are taken."""

    def __init__(self, *, shared: bool = True) -> None:
        """`shared`: whether requests of 1 to 10 MiB share segments of 20 MiB, as in torch; else each has its own."""
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self._own_from = _OWN_SEGMENT if shared else _SMALL_SEGMENT
        self._taken: dict[Hashable, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: list[_Block] = []

    def take(self, name: Hashable, nbytes: int) -> None:
        """Allocate `nbytes` under `name`, which must not be taken."""
        rounded = max(_ROUNDED_TO, -(-nbytes // _ROUNDED_TO) * _ROUNDED_TO)
        small = rounded <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (rounded, -1))
        block = self._blocks[free.pop(place)[1]] if place < len(free) else self._reserve(rounded, small)
        left = block.nbytes - rounded
        if left >= _ROUNDED_TO if small else left > _SMALL:
            rest = self._block(small, left)
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.nbytes = rest, rounded
            self._give(rest)
        block.free = False
        self._taken[name] = block

    def give_back(self, name: Hashable) -> None:
        """Free the block that was allocated under `name`; it is joined with free blocks beside it."""
        block = self._taken.pop(name)
        if block.after is not None and block.after.free:
            self._free[block.small].remove(block.after.key())
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            self._free[block.small].remove(block.before.key())
            self._join(block.before, block)
            block = block.before
        self._give(block)

    def _join(self, block: _Block, after: _Block) -> None:
        block.nbytes += after.nbytes
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _give(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], block.key())

    def _block(self, small: bool, nbytes: int) -> _Block:
        self._blocks.append(_Block(small, len(self._blocks), nbytes))
        return self._blocks[-1]

    def _reserve(self, nbytes: int, small: bool) -> _Block:
        if small:
            size = _SMALL_SEGMENT
        elif nbytes < self._own_from:
            size = _SHARED_SEGMENT if self._own_from == _OWN_SEGMENT else _SMALL_SEGMENT
        else:
            size = -(-nbytes // _SEGMENT_ROUNDED_TO) * _SEGMENT_ROUNDED_TO
        self.reserved_bytes += size
        return self._block(small, size)


GRADIENTS_AT_A_TIME = 3
"""Gradients of saved tensors that the model of a backward holds at a time, besides the saved tensors."""


class Gradients:
    """The gradients that a backward holds. Each is as large as its saved tensor, and the oldest is freed first."""

    def __init__(self, segments: Segments) -> None:
        self._segments, self._held = segments, deque[object]()

    def take(self, nbytes: int) -> None:
        """Allocate the next gradient, of `nbytes` bytes."""
        self._held.append(object())
        self._segments.take(self._held[-1], nbytes)
        if len(self._held) > GRADIENTS_AT_A_TIME:
            self._segments.give_back(self._held.popleft())


def reserved(passes: Callable[[bool], int]) -> int:
    """Bytes that passes reserve: the mean of both extremes. `passes` returns the bytes for each: whether segments are
    shared (see `Segments`).
    """
    return (passes(True) + passes(False)) // 2
