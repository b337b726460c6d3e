"""Packs whole documents: as few packs as best fit decreasing makes, with the short documents spread over all of them.

Best fit decreasing puts the short documents that are left at the end into a few packs. Here best fit only gives the
number of packs. Then each document, the longest first, goes into the emptiest pack. All packs are equally full when the
short documents come, and each takes as many of them. Where that needs more packs, part of the documents is placed by
best fit: the shortest, which close gaps, or the longest, which may fit together in few ways only.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from thdprof.schedule import compiled

_SPREADS = ((0, 1), (0.01, 1), (0.01, 4), (0.01, 16))
"""What is tried for a number of packs, the most even packs first. Share of the tokens, in the shortest documents, that
closes gaps between full packs. Part of a pack: longer documents go into the fullest pack with room as well."""
_KEPT, _KEPT_FROM = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2), 4
"""Shares of best fit's packs that are kept where spreading fails under a cap, and the steps from which that is tried:
where three long documents fit into a pack in few ways only, those are best fit's, and others are spread in pairs."""
_FOR_A_SPARE = 1000
"""Number of packs from which there may be one more, so that the last ones are not filled with short documents."""
_STEPS = 2000
"""The number of packs grows in steps of one in so many, until all documents have a place."""


def pack_documents(
    lengths: NDArray[np.int64], *, seq_length: int, max_docs: int | None = None, multiple: int = 1
) -> NDArray[np.int32]:
    """Put every document, whole, into one pack.

    There are at most 0.05% more packs than best fit decreasing makes under the same cap; from 1,000 packs on, one more.
    Equal arguments give equal packs.

    Args:
        lengths: tokens of every document, 1 to `seq_length` each, int64, shape [documents].
        seq_length: tokens of a pack.
        max_docs: most documents of a pack; None: any number.
        multiple: what the number of packs is a multiple of, where that adds less than 1% of them.

    Returns:
        The pack of every document, int32, shape [documents]. Packs are numbered from 0 without gaps.

    Raises:
        ValueError: a length, `seq_length` or `max_docs` is out of bounds.
    """
    order, descending = _sort_lengths(lengths, seq_length)
    without_cap = _spread_documents(descending, seq_length, len(descending), 0)
    chosen = _apply_cap(descending, without_cap, seq_length, max_docs)
    count = int(chosen.max(initial=-1)) + 1
    if 0 < (more := -count % multiple) < count / 100:
        chosen = _spread_documents(descending, seq_length, max_docs or len(descending), count + more)
    packs = np.empty(len(lengths), dtype=np.int32)
    packs[order] = chosen
    return packs


def _sort_lengths(lengths: NDArray[np.int64], seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the order from the longest to the shortest document, int64, and the lengths in that order, int32."""
    if not 1 <= seq_length < 2**31:
        raise ValueError(f"seq_length {seq_length}: use 1 to {2**31 - 1}")
    wrong = np.flatnonzero((lengths < 1) | (lengths > seq_length))
    if len(wrong):
        value = lengths[wrong[0]]
        raise ValueError(f"lengths: document {wrong[0]} has {value} tokens; use 1 to seq_length {seq_length}")
    keys = (seq_length - lengths.astype(np.int64)) << 32
    keys |= np.arange(len(lengths), dtype=np.int64)
    keys.sort()
    order = keys & (2**32 - 1)
    keys >>= 32
    return order, (seq_length - keys).astype(np.int32)


def _apply_cap(
    descending: NDArray[np.int32], without_cap: NDArray[np.int32], seq_length: int, max_docs: int | None
) -> NDArray[np.int32]:
    """Return the packs without a cap where they hold at most `max_docs` documents each, else others that do."""
    if max_docs is None:
        return without_cap
    if max_docs < 1:
        raise ValueError(f"max_docs {max_docs}: use 1 or more")
    counts = np.bincount(without_cap)
    if counts.max(initial=0) <= max_docs:
        return without_cap
    return _spread_documents(descending, seq_length, max_docs, max(len(counts), -(-len(descending) // max_docs)))


def _spread_documents(
    descending: NDArray[np.int32], seq_length: int, max_docs: int, at_least: int
) -> NDArray[np.int32]:
    """Return the packs of documents that come longest first: `at_least` or more, and few more than best fit makes."""
    size = len(descending)
    if size == 0:
        return np.zeros(0, dtype=np.int32)
    tokens = np.cumsum(descending[::-1], dtype=np.int64)

    def place(
        num_packs: int, spread: tuple[int, int] = (1, 1), most: int = max_docs, these: NDArray[np.int32] = descending
    ) -> NDArray[np.int32] | None:
        packs, num_placed = compiled.run(
            _place_documents, 100 * len(these), these, seq_length, most, num_packs, *spread
        )
        return packs if num_placed == len(these) else None

    @functools.cache
    def find_fewest() -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Best fit without a cap, and its packs from those of the fewest documents on."""
        packs = place(num_enough, most=size)
        assert packs is not None
        return packs, np.argsort(np.bincount(packs), kind="stable")

    def keep(num_packs: int, share: float) -> NDArray[np.int32] | None:
        """Keep a share of best fit's packs, those of the fewest documents, and spread all others over the rest."""
        packs, fewest = find_fewest()
        kept = fewest[: int(share * len(fewest))]
        numbers = np.full(len(fewest), -1, dtype=np.int32)
        numbers[kept] = np.arange(num_packs - len(kept), num_packs)
        found: NDArray[np.int32] = numbers[packs]
        others = place(num_packs - len(kept), spreads[1], these=descending[found < 0])
        if others is None or np.bincount(found[found >= 0]).max(initial=0) > max_docs:
            return None
        found[found < 0] = others
        return found

    # in best fit all packs but one are over half full or at their cap
    num_enough = int(min(size, 2 * tokens[-1] // seq_length + size // max_docs + 2))
    best_fit = place(num_enough)
    assert best_fit is not None
    num_best = int(best_fit.max()) + 1
    shares = np.searchsorted(tokens, [tokens[-1] * share for share, _ in _SPREADS], side="right")
    spreads = [
        (int(descending[-1 - at]), seq_length // part + 1) for at, (_, part) in zip(shares, _SPREADS, strict=True)
    ]
    at_most = max(at_least, num_best + max(num_best // _STEPS, int(num_best >= _FOR_A_SPARE)))
    at_least = at_least or at_most
    step = max(1, at_least // _STEPS)
    low, high = -1, 0  # steps that were too few, and those that are tried
    ways = [functools.partial(place, spread=spread) for spread in spreads]
    keeping = [functools.partial(keep, share=share) for share in _KEPT if max_docs < size]
    while at_least + high * step <= at_most:
        for way in (*ways, *(keeping if high >= _KEPT_FROM else ())):
            packs = way(at_least + high * step)
            if packs is None:
                continue
            while high - low > 1:
                middle = (low + high) // 2
                fewer = way(at_least + middle * step)
                low, high, packs = (middle, high, packs) if fewer is None else (low, middle, fewer)
            numbers: NDArray[np.int32] = np.cumsum(np.bincount(packs) > 0, dtype=np.int32) - np.int32(1)
            without_gaps: NDArray[np.int32] = numbers[packs]
            return without_gaps
        low, high = high, max(1, 2 * high)
    return best_fit


def _place_documents(
    descending: NDArray[np.int32], seq_length: int, max_docs: int, num_packs: int, shortest: int, longest: int
) -> tuple[NDArray[np.int32], int]:
    """Place documents of `shortest` to `longest` - 1 tokens into the emptiest pack, others into the fullest with room.

    Packs with equal room are a linked list, and a tree of marks finds the least room that suffices. So a document takes
    a number of steps that does not grow with the number of packs.

    Returns:
        The pack of each document, and how many documents were placed until one had no room anywhere.
    """
    size = len(descending)
    packs, counts = np.empty(size, dtype=np.int32), np.zeros(num_packs, dtype=np.int32)
    following = np.arange(1, num_packs + 1).astype(np.int32)
    following[-1] = -1
    first = np.full(seq_length + 1, -1, dtype=np.int32)
    leaves = 2
    while leaves <= seq_length:
        leaves *= 2
    marks = np.zeros(2 * leaves, dtype=np.bool_)
    first[seq_length] = 0
    _mark_room(marks, leaves + seq_length)
    most = seq_length
    i = 0
    while i < size:
        need = descending[i]
        spread = shortest <= need < longest
        if spread:
            while most > 0 and first[most] < 0:
                most -= 1
            room = most
        else:
            room = _find_room(marks, leaves, need)
        if room < need:
            return packs, i
        pack = first[room]
        first[room] = following[pack]
        if first[room] < 0:
            _clear_room(marks, leaves + room)
        while True:
            packs[i] = pack
            room -= need
            counts[pack] += 1
            i += 1
            if spread or i == size or descending[i] != need or room < need or counts[pack] >= max_docs:
                break
        if room > 0 and counts[pack] < max_docs:
            following[pack] = first[room]
            if first[room] < 0:
                _mark_room(marks, leaves + room)
            first[room] = pack
    return packs, size


def _mark_room(marks: NDArray[np.bool_], node: int) -> None:
    while node > 0 and not marks[node]:
        marks[node] = True
        node //= 2


def _clear_room(marks: NDArray[np.bool_], node: int) -> None:
    marks[node] = False
    while node > 1 and not marks[node ^ 1]:
        node //= 2
        marks[node] = False


def _find_room(marks: NDArray[np.bool_], leaves: int, need: int) -> int:
    """Return the least marked room of `need` or more, or -1."""
    node = leaves + need
    if marks[node]:
        return need
    while node > 1 and (node % 2 == 1 or not marks[node + 1]):
        node //= 2
    if node <= 1:
        return -1
    node += 1
    while node < leaves:
        node *= 2
        if not marks[node]:
            node += 1
    return node - leaves
