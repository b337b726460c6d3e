"""megatron-core's parallel state as one rank of several has it, without other processes."""

from __future__ import annotations

from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def ranks(world: int, rank: int, *, context: int = 2, hybrid: bool = True):
    """megatron-core's groups as rank `rank` of `world` has them, without other processes."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=context, hybrid_context_parallel=hybrid, create_gloo_process_groups=False
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._HYBRID_DP_CP_GROUPS.clear()  # which it leaves
        dist.destroy_process_group()
