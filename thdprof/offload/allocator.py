"""What torch's caching allocator reserves for tensors that come and go: more than they hold, since it rounds.

Sizes and rules are those of c10/cuda/CUDACachingAllocator in torch 2.11: a request takes the smallest free block that
holds it, what is left of the block stays free beside it, and a new segment is reserved where none does. One stream,
default settings.

A model of a pass knows its large tensors, not all that comes and goes between them and may use what is left of their
segments. So `reserved` looks at both ends, nothing of it used and all, and takes the middle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_ROUNDED_TO = 512
_SMALL = 2**20
"""Requests of up to this size have segments of their own."""
_SMALL_SEGMENT = 2 * 2**20
_OWN_SEGMENT = 10 * 2**20
"""Requests from this size on get a segment that is hardly larger."""
_SHARED_SEGMENT = 20 * 2**20
_SEGMENT_ROUNDED_TO = 2 * 2**20


@dataclass(slots=True, eq=False)
class _Block:
    small: bool
    number: int
    nbytes: int
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    def key(self) -> tuple[int, int]:
        return self.nbytes, self.number


class Segments:
    """Reserved memory and what of it is taken."""

    def __init__(self, *, shared: bool = True) -> None:
        """Nothing is reserved.

        Args:
            shared: whether tensors of 1 to 10 MiB share segments of 20 MiB, as they do; else each fits its own.
        """
        self.reserved_bytes = 0
        self._own_from = _OWN_SEGMENT if shared else _SMALL_SEGMENT
        self._taken: dict[Hashable, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: list[_Block] = []

    def take(self, name: Hashable, nbytes: int) -> None:
        """Allocate `nbytes` under a name that is not taken."""
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
        """Free what was allocated under the name; it becomes one block with free ones beside it."""
        block = self._taken.pop(name)
        if block.after is not None and block.after.free:
            self._swallow_next(block)
        if block.before is not None and block.before.free:
            block = block.before
            self._free[block.small].remove(block.key())
            self._swallow_next(block, listed=False)
        self._give(block)

    def _swallow_next(self, block: _Block, *, listed: bool = True) -> None:
        after = block.after
        assert after is not None
        if listed:
            self._free[after.small].remove(after.key())
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
"""Gradients of saved tensors that a backward is taken to hold beside them."""


class Gradients:
    """Those that a backward holds: each is as large as the saved tensor that it is of, and the oldest goes first."""

    def __init__(self, segments: Segments) -> None:
        self._segments, self._held = segments, deque[object]()

    def take(self, nbytes: int) -> None:
        """Allocate the next one."""
        self._held.append(object())
        self._segments.take(self._held[-1], nbytes)
        if len(self._held) > GRADIENTS_AT_A_TIME:
            self._segments.give_back(self._held.popleft())


def reserved(passes: Callable[[bool], int]) -> int:
    """Bytes between what `passes` reserves in segments that are shared and in such as fit, which it is called with."""
    return (passes(True) + passes(False)) // 2
