"""Whether there is memory for an eager pass beside the graphs."""

from __future__ import annotations

import torch

_EAGER_PER_SLOT = 1.25
"""Memory that an eager pass is taken to need, as a multiple of a slot's pool: it also keeps what the graphs reuse."""


def free_bytes(device: torch.device) -> int:
    """Bytes that torch can allocate outside the pools of graphs: those that the driver has, and those kept for reuse.

    Args:
        device: a GPU.
    """
    free, _ = torch.cuda.mem_get_info(device)
    segments = torch.cuda.memory_snapshot()
    kept = (
        s["total_size"] - s["active_size"]
        for s in segments
        if tuple(s["segment_pool_id"]) == (0, 0) and s["device"] == device.index
    )
    return int(free + sum(kept))


def missing_bytes(device: torch.device, *, slot_bytes: int, others: int) -> int:
    """Bytes that are missing for one eager pass; 0 if it fits, or if the device is no GPU.

    Args:
        device: where the pass runs.
        slot_bytes: bytes of the pool of a slot, whose largest graph does the same work.
        others: bytes that the verification needs besides the pass.
    """
    if device.type != "cuda":
        return 0
    return max(0, int(_EAGER_PER_SLOT * slot_bytes) + others - free_bytes(device))
