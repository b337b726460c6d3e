"""A staging buffer of static metadata for machines without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class UnpinnedStaging:
    """Stands for `thdprof.runtime.graphs.slots.StagingBuffer`: not pinned, and never being copied."""

    def __init__(self, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.int32)
        self.array = self.pinned.numpy()
        self.copied = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
