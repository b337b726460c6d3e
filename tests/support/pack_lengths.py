"""Lengths of documents, drawn as measured and modelled data has them, for packers."""

from __future__ import annotations

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
