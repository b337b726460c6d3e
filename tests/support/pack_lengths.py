"""Lengths of documents, drawn as measured and modelled data has them; and how many packs best fit makes of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

SEQ_LENGTHS = {"chat 8k": 8192, "chat 32k": 32_768, "long 128k": 131_072, "turns 8k": 8192, "papers 32k": 32_768}
"""Tokens of a pack of each distribution. The last two have two modes."""


def draw(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Lengths of one distribution, int64, shape [count]; what is longer than its pack is cut."""
    rng = np.random.default_rng(seed)
    match name:
        case "chat 8k":
            lengths = rng.lognormal(5.8, 1.3, count)
        case "chat 32k":
            lengths = rng.lognormal(6.5, 1.6, count)
        case "long 128k":
            lengths = rng.lognormal(7.5, 1.8, count)
        case "turns 8k":  # nine short turns for each long document
            lengths = np.where(rng.random(count) < 0.9, rng.lognormal(4, 0.5, count), rng.lognormal(8.3, 0.4, count))
        case "papers 32k":  # nine abstracts for each paper, of which two or three make a pack
            lengths = np.where(rng.random(count) < 0.9, rng.lognormal(5.5, 0.6, count), rng.normal(14_000, 2500, count))
    return np.clip(lengths, 1, SEQ_LENGTHS[name]).astype(np.int64)


def count_best_fit(lengths: Iterable[int], seq_length: int, cap: int | None) -> int:
    """Packs of best fit decreasing: each document goes into the fullest pack that has room for it."""
    packs = 0
    with_room: list[tuple[int, int]] = []  # room and documents
    for need in sorted(lengths, reverse=True):
        at = bisect_left(with_room, (need, 0))
        room, documents = with_room.pop(at) if at < len(with_room) else (seq_length, 0)
        packs += documents == 0
        if room > need and documents + 1 != cap:
            insort(with_room, (room - need, documents + 1))
    return packs
