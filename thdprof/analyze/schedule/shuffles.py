"""Repeats the shuffles of torch's CPU generator without importing torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled

_RANDOM64_FROM = (2**32 - 1) // 20
"""Number of elements from which torch draws 64 bits for each swap (ATen/native/TensorFactories.cpp, randperm_cpu)."""


def torch_randperm(size: int, seed: int) -> NDArray[np.int64]:
    """Return `torch.randperm(size, generator=torch.Generator().manual_seed(seed))`, int64, shape [size].

    torch seeds its Mersenne twister with the low 32 bits of `seed`, as NumPy's RandomState does.
    """
    permutation = np.arange(size, dtype=np.int64)
    if size < 2:
        return permutation
    state = np.random.RandomState(seed % 2**32)
    wide = size >= _RANDOM64_FROM
    draws = state.randint(0, 2**32, size=(size - 1) * (2 if wide else 1), dtype=np.uint32)
    if wide:
        high, low = draws[0::2].astype(np.uint64), draws[1::2]
        remainders = (high << np.uint64(32)) | low
    else:
        remainders = draws.astype(np.uint64)
    remainders %= np.arange(size, 1, -1, dtype=np.uint64)
    if size < 50_000:  # lists swap faster than arrays in plain Python
        return np.array(_swap_forward(permutation.tolist(), remainders.tolist()), dtype=np.int64)
    return np.asarray(compiled.run(_swap_forward, size, permutation, remainders.view(np.int64)))


def _swap_forward(permutation: Any, offsets: Any) -> Any:
    """Swap each element i of `permutation` with element i + offsets[i], in ascending order of i."""
    for i in range(len(offsets)):
        j = i + offsets[i]
        held = permutation[i]
        permutation[i] = permutation[j]
        permutation[j] = held
    return permutation
